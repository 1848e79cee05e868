"""The hand-shake: what it tells of a difference."""

from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.arguments import describe_parameters
from ringprune.plan import ParamSpec, _narrowed, on_one_device
from ringprune.rank_words import by_rank
from tests.training import make_model, sgd, wrap


def test_parameters_on_several_devices_are_refused_with_what_to_do() -> None:
    """The first step failed, in a backward hook, with an error about the arguments of an operation of ours."""
    specs = [
        ParamSpec(name, (3,), torch.float32, torch.device(device), 0)
        for name, device in (("a", "cpu"), ("b", "cpu"), ("c", "cuda:1"))
    ]
    with pytest.raises(
        rp.ConfigurationError, match=r"'a' on cpu, 'c' on cuda:1\): wrap an optimizer of the parameters of"
    ):
        on_one_device(specs)
    param = torch.nn.Parameter(torch.ones(3))
    assert [spec.name for spec in describe_parameters([("a", param, 0), ("b", param, 1)])] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            [{"policy": rp.IWP(0.01)}, {"policy": rp.IWP(0.02)}],
            "'Policy.density.target=0.01' on rank 0, 'Policy.density.target=0.02' on rank 1",
        ),
        (
            [{"policy": rp.IWP(warmup=rp.Warmup(20))}, {"policy": rp.IWP()}],
            "'Policy.density.warmup.steps=20' on rank 0, 'Policy.density.warmup.steps=0' on rank 1",
        ),
        (
            [{"policy": rp.IWP()}, {"policy": rp.IWP(values="int8")}],
            "\"Policy.values='fp32'\" on rank 0, \"Policy.values='int8'\" on rank 1",
        ),
        ([{"policy": "iwp"}, {"policy": "dgc"}], "\"Policy.name='iwp'\" on rank 0, \"Policy.name='dgc'\" on rank 1"),
        ([{"seed": 0}, {"seed": 7}], "seed=0"),
    ],
)
def test_of_two_policies_it_tells_what_differs(options: list[dict[str, Any]], told: str) -> None:
    """It printed both of them in full, some 600 characters each, and left the comparing to people."""

    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.RankMismatchError) as caught:
            wrap(make_model(), comm, **{"policy": "iwp", "make": sgd} | options[comm.rank])
        assert told in str(caught.value)

    rp.simulate(2, rank)


def test_of_a_long_fact_the_key_stays() -> None:
    rest = ", ".join(f"'key{i}': {i}" for i in range(20))
    one, other = (f"param group 0: {{'lr': {rate}, {rest}}}" for rate in (0.1, 0.15))
    assert (_narrowed(one, other), _narrowed(other, one)) == ("'lr': 0.1", "'lr': 0.15")


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["", "late", ""], "rank 1: late"),
        (["late", "", "late"], "ranks 0, 2: late"),
        (["late"], "rank 0: late"),
        (["late"] * 64, "all 64 ranks: late"),
        (["early", "late", "early", ""], "ranks 0, 2: early; rank 1: late"),
        (["late"] * 20 + [""], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: late"),
    ],
)
def test_ranks_that_say_the_same_say_it_once(texts: list[str], told: str) -> None:
    """A loss that was NaN everywhere made an error of as many copies as there were ranks."""
    assert by_rank(texts) == told
