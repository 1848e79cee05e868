"""Specifications: they say what the policy's function takes, and mistakes are named."""

import dataclasses
from collections.abc import Callable

import pytest

import ringprune as rp
from ringprune.policies import POLICIES, Policy
from ringprune.simulation.methods import METHODS, Method, methods
from ringprune.simulation.spec import parse, renewed


def test_arguments_are_those_of_the_function() -> None:
    text = "iwp:density=0.04,roots=all,damping=0,mask_velocity=0,warmup=200,warmup.start=0.25,values=bf16,clip_norm=2"
    expected = rp.IWP(
        0.04,
        roots="all",
        damping=0.0,
        mask_velocity=False,
        warmup=rp.Warmup(200, 0.25),
        values="bf16",
        clip_norm=2.0,
    )
    assert parse(text).policy() == expected


@pytest.mark.parametrize("name", POLICIES)
def test_a_bare_name_is_the_default_policy(name: str) -> None:
    assert parse(name).policy() == POLICIES[name]()
    assert str(parse(name)) == name


@pytest.mark.parametrize(
    "text",
    ["dense", "dgc:density=0.3", "iwp:roots=all,warmup=30,warmup.start=0.5", "random_k:flush=1", "iwp:explore=1"],
)
def test_text_and_specification_are_one(text: str) -> None:
    spec = parse(text)
    assert parse(str(spec)) == spec
    assert parse(spec.resolved) == spec
    assert parse(spec.resolved).policy() == spec.policy()


def test_different_words_for_the_same_are_the_same() -> None:
    one, other = parse("iwp:explore=0.50,roots=all,density=0.01"), parse("iwp: roots=all , explore=5e-1")
    assert one == other
    assert one.resolved == other.resolved


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("iwq", "policy 'iwq': the policies are .*did you mean 'iwp'"),
        ("iwp:densty=0.1", "argument 'densty': iwp takes density, .*flush; did you mean 'density'"),
        ("iwp:density", "'density' needs a value"),
        ("iwp:density=0.1,density=0.2", "given twice"),
        ("iwp:density=2", "density=2"),
        ("iwp:flush=2", "flush=2: 0 or 1"),
        ("iwp:values=fp31", "did you mean 'fp32'"),
        ("iwp:warmup=30,warmup.begin=0.5", "'begin': warmup is a Warmup of steps, start"),
        ("iwp:local_steps=4,local_steps.momentun=shared", "field 'momentun'.*did you mean 'momentum'"),
        ("iwp:local_steps=4,local_steps.count=4", "are the same: give one"),
        ("iwp:local_steps.momentum=shared", "needs local_steps too, as in local_steps=4"),
        ("iwp:density=0.02:roots=all", "behind one colon, with commas"),
        ("iwp:density.start=0.5", "density has no fields"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=complaint):
        parse(text)


def policy_with(default: float, **more: object) -> Callable[..., Policy]:
    def made(damping: float = default, off: int | None = None) -> Policy:
        return dataclasses.replace(rp.IWP(damping=damping), name="made")

    return made


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    renewed.cache_clear()


def test_runs_under_other_defaults_are_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "made", policy_with(0.5))
    before = parse("made").resolved
    monkeypatch.setitem(POLICIES, "made", policy_with(0.25))
    assert parse("made").resolved != before
    assert parse("made:damping=0.5").resolved == before


def test_an_argument_that_is_new_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "made", policy_with(0.5))
    now = parse("made").resolved
    assert now == "made:damping=0.5,off=none"
    assert renewed("made:damping=0.5") == now
    assert renewed("made:damping=0.7") == "made:damping=0.7,off=none"
    assert renewed("made:gone=1") == "made:gone=1", "what can no longer be read stays as it is"


def test_methods_of_the_table_can_be_made() -> None:
    for method in methods():
        for task in ("digits", "gpt-adamw"):
            assert isinstance(method.at(task, 1 / 50).policy(), Policy)
    assert {"dense", "iwp", "iwp-raw", "dgc", "random_k"} <= {method.name for method in methods()}


def test_a_method_whose_policy_does_not_exist_is_left_out() -> None:
    assert not Method("later", "later:roots=all", "").exists
    assert not Method("later", "iwp:argument_to_come=1", "").exists
    assert [method.name for method in METHODS if method.exists] == [method.name for method in methods()]


def test_the_narrowest_specification_counts() -> None:
    other = {"1/150": "iwp:roots=2", "gpt-adamw": "iwp:roots=3", "gpt-adamw 1/150": "iwp:roots=4"}
    method = Method("m", "iwp", "", other=other)
    found = [
        method.at(task, budget).policy().roots.count for task in ("digits", "gpt-adamw") for budget in (0.02, 1 / 150)
    ]
    assert found == [1, 2, 3, 4]


def test_solving_for_local_steps_keeps_what_else_is_said_of_them() -> None:
    spec = parse("dense:local_steps=4,local_steps.momentum=shared").exchanging_every(7)
    assert str(spec) == "dense:local_steps=7,local_steps.momentum=shared"
    assert str(parse("dense").exchanging_every(7)) == "dense:local_steps=7"


def test_a_density_is_not_taken_where_it_is_solved_for() -> None:
    assert [m.name for m in methods(["iwp", "iwp:roots=2", "dense"])] == ["iwp", "iwp:roots=2", "dense"]
    with pytest.raises(rp.ConfigurationError, match="density is solved for"):
        methods(["iwp:density=0.02"])
    with pytest.raises(rp.ConfigurationError, match="neither a method"):
        methods(["nothing"])
