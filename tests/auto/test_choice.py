"""What ``Auto`` takes, and what it refuses by name."""

from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.auto import as_choice
from ringprune.auto.choice import called, names_of

SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("candidates", "error", "text"),
    [
        ((), rp.ConfigurationError, "one policy or more"),
        (("dense",), rp.ArgumentTypeError, "holds 'dense'"),
        (rp.IWP(), rp.ArgumentTypeError, "several policies"),
        (5, rp.ArgumentTypeError, "Auto.candidates=5.*several policies"),
        ((rp.Dense(), rp.P3()), rp.ConfigurationError, "schedule="),
        ((rp.Dense(), rp.OkTopk(0.01)), rp.ConfigurationError, "index_sets="),
        ((rp.Dense(local_steps=4),), rp.ConfigurationError, "local_steps=.*ringprune advise"),
        ((rp.Dense(), rp.IWP(0.1, warmup=rp.Warmup(9))), rp.ConfigurationError, "warm-up"),
        ((rp.ScaleCom(0.01),), rp.ConfigurationError, "low_pass="),
    ],
)
def test_candidates_that_cannot_work_are_refused(candidates: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rp.Auto(candidates)


@pytest.mark.parametrize("arguments", [{"margin": -0.1}, {"share": 0.0}, {"share": 2.0}])
def test_numbers_have_ranges(arguments: dict[str, float]) -> None:
    with pytest.raises(rp.ConfigurationError, match=next(iter(arguments))):
        rp.Auto(**arguments)


def test_a_list_of_candidates_may_be_given() -> None:
    assert rp.Auto([rp.Dense()]).candidates == (rp.Dense(),)


def test_no_two_have_one_name() -> None:
    twins = [rp.IWP(0.01), rp.IWP(0.01, roots="all"), rp.IWP(1.0), rp.IWP(0.01, explore=0.1), rp.Dense()]
    assert names_of(twins) == ["IWP 1 %", "IWP 1 % (2)", "IWP 100 %", "IWP 1 % (3)", "dense"]


def test_only_sgd_gets_what_keeps_gradients_back() -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]

    def rank(comm: rp.comm.Communicator) -> tuple[list[str], list[str]]:
        makes = torch.optim.SGD(params, lr=0.1), torch.optim.AdamW(params)
        sgd, adam = ([called(policy) for policy in rp.Auto().policies(made, comm)] for made in makes)
        return sgd, adam

    sgd, adam = rp.simulate(1, rank)[0]
    assert sgd == ["dense", "dense bf16", "IWP 10 % bf16", "IWP 1 % bf16"]
    assert adam == ["dense", "dense bf16"]


def test_dampening_goes_with_no_momentum_correction() -> None:
    """It is refused at once, not in the middle of training; the defaults do without."""
    damped = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9, dampening=0.5)

    def rank(comm: rp.comm.Communicator) -> list[str]:
        with pytest.raises(rp.ConfigurationError, match="dampening"):
            rp.Auto((rp.Dense(), rp.IWP(0.1))).policies(damped, comm)
        return [called(policy) for policy in rp.Auto().policies(damped, comm)]

    assert rp.simulate(1, rank)[0] == ["dense", "dense bf16"]


def test_a_policy_is_itself_and_auto_begins_with_its_first() -> None:
    assert as_choice(None, SGD, {}) == (rp.IWP(), None)
    assert as_choice("iwp", SGD, {}) == (rp.recommended(SGD), None)
    assert as_choice("dgc", SGD, {}) == (rp.DGC(), None)
    assert as_choice("auto", SGD, {}) == (rp.Dense(), rp.Auto())
    mine = rp.Auto((rp.Dense("bf16"), rp.IWP(0.1)))
    assert as_choice(mine, SGD, {}) == (rp.Dense("bf16"), mine)


@pytest.mark.parametrize("given", ["hierarchical=True", "guard"])
def test_what_cannot_be_predicted_is_refused_by_name(given: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=given):
        as_choice("auto", SGD, {given: True})
    as_choice("dense", SGD, {given: True})
