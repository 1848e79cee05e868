"""The plan: how large its buckets are, and what the hand-shake tells of a difference."""

from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.plan import ParamSpec, _narrowed
from ringprune.planning import make_plan
from ringprune.prediction.workload import flat
from tests.training import make_model, sgd, wrap


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
    ("policy", "entries"),
    [
        (rp.IWP(0.01), 12),
        (rp.IWP(0.02, local_steps=rp.LocalSteps(4)), 12),
        (rp.IWP(0.03), 6),  # more would be left to be sent behind backward
        (rp.DGC(0.01), 6),  # each rank sends entries of its own
        (rp.Dense(), 6),
    ],
)
def test_buckets_of_which_little_is_sent_are_larger(policy: rp.Policy, entries: int) -> None:
    """Each takes several messages; what a policy decides, the wrapper and the prediction make alike."""
    shapes = [[(1024, 1024)]] * 26
    workload = flat("made up", shapes, 1.0, "made up")
    specs = [ParamSpec(str(i), (1024, 1024), torch.float32, torch.device("cpu"), 0) for i in range(26)]
    params = [torch.empty(0)] * 26
    of = [len(b.members) for b in make_plan(policy, specs, params, None, (), groups=False)[0].buckets]
    assert of[:-1] == [entries] * (len(of) - 1)
    assert [len(b.members) for b in workload.plan(policy).buckets] == of
    given = make_plan(policy, specs, params, 8 << 20, (), groups=False)[0]
    assert [len(b.members) for b in given.buckets] == [2] * 13
