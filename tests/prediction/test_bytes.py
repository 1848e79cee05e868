"""The bytes that are predicted are those that the communicator counts when the exchange is really made."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.errors import ConfigurationError
from ringprune.metrics import CONTENTS
from ringprune.policies import Policy
from ringprune.prediction import Link, Setting, predict
from ringprune.prediction.messages import messages
from tests.prediction.made_up import BUCKET_BYTES, FREE, MODEL

STEPS = 4


def counted(policy: Policy, ranks: int) -> dict[str, float]:
    """Bytes of a step by content, without the check of the weights, which is made once."""

    def train(comm: Communicator) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(comm.rank)
        shared = torch.Generator().manual_seed(100)
        params = [torch.nn.Parameter(torch.randn(shape, generator=shared)) for shape in MODEL.shapes]
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(params, lr=1e-3),
            [(str(i), p) for i, p in enumerate(params)],
            policy=policy,
            comm=comm,
            bucket_bytes=BUCKET_BYTES,
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.stack([(p * torch.randn(p.shape, generator=draw)).sum() for p in params]).sum().backward()
            optimizer.step()
        return optimizer.stats()

    stats = rp.simulate(ranks, train, timeout=60)[0]
    found = {content: stats[f"bytes_{content}"] for content in CONTENTS}
    found["headers"] -= (ranks - 1) * (4 + 8 * (2 + len(MODEL.shapes)))
    return {content: count / STEPS for content, count in found.items()}


def predicted(policy: Policy, ranks: int) -> dict[str, float]:
    setting = Setting(MODEL, ranks, Link(1e9), FREE, BUCKET_BYTES)
    return dict.fromkeys(CONTENTS, 0.0) | predict(setting, policy).bytes_sent


EXACT = [
    rp.Dense(),
    rp.Dense("fp16"),
    rp.Dense("int4"),
    rp.Dense(local_steps=2),
    rp.IWP(0.01),
    rp.IWP(0.1, index_format="list"),
    rp.IWP(0.001, values="bf16"),
    rp.IWP(0.02, values="int8", dense_values="int8"),
    rp.IWP(0.05, values="book4", dense_values="fp16"),
    rp.IWP(0.01, refresh=2),
    rp.IWP(0.01, local_steps=2),
    rp.IWP(0.01, local_steps=rp.LocalSteps(2, growth=1.0)),
    rp.IWP(0.9),
    rp.IWP(0.01, reduction="ring"),
    rp.IWP(0.05, values="fp16", reduction="ring"),
    rp.RandomK(0.01),
    rp.DGC(0.01),
    rp.ScaleCom(0.01),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("policy", EXACT, ids=lambda policy: f"{policy.name}-{policy.values}-{policy.density.target}")
def test_bytes_are_those_counted(policy: Policy, ranks: int) -> None:
    assert predicted(policy, ranks) == pytest.approx(counted(policy, ranks), rel=1e-9)


@pytest.mark.parametrize(
    "policy", [rp.IWP(0.05, roots=2), rp.IWP(0.05, roots="all"), rp.IWP(0.05, explore=0.3)], ids=["two", "all", "lot"]
)
def test_where_proposals_overlap_they_are_a_bound(policy: Policy) -> None:
    """Indices are exact; of the values at most what every root proposes, at least what one of them does."""
    ranks = 4
    ours, theirs = predicted(policy, ranks), counted(policy, ranks)
    assert {k: ours[k] for k in ("indices", "dense", "headers")} == pytest.approx(
        {k: theirs[k] for k in ("indices", "dense", "headers")}, rel=1e-9
    )
    roots = policy.roots.number(ranks)
    least = (1 - policy.explore) / roots
    assert least * ours["values"] * (1 - 1e-3) <= theirs["values"] <= ours["values"]


def test_one_rank_sends_nothing() -> None:
    assert sum(predicted(rp.IWP(0.01), 1).values()) == 0
    assert sum(predicted(rp.Dense(), 1).values()) == 0


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("ranks", [2, 16, 300])
def test_indices_take_what_elias_and_fano_promise(density: float, ranks: int) -> None:
    """At most 2 + log2(n / c) bits each, and 32 bytes for frame, number and two parts in whole words."""
    policy = rp.IWP(density)
    for bucket in MODEL.plan(policy, BUCKET_BYTES).buckets:
        if bucket.route == "packed":
            count = sum(max(1, round(density * n)) for n in bucket.numels)
            first = messages(bucket, policy, ranks, "packed")[0]
            assert first.kind == "broadcast"
            assert 8 * (first.payload - 32 - 8) <= count * (2 + math.log2(bucket.numel / count)) + 1


EXPLORING = replace(rp.IWP(0.01, explore=0.3), explore_by="rank")


@pytest.mark.parametrize(
    "policy",
    [
        rp.P3(),
        rp.Parallax(),
        rp.IWP(0.01, lookahead=True),
        rp.IWP(0.01, clip_norm=1.0),
        rp.MIPD(0.01),
        rp.OkTopk(0.01),
        rp.DGC(0.01, index_sets="scattered"),
        EXPLORING,
    ],
    ids=lambda policy: policy.name,
)
def test_what_cannot_be_predicted_is_refused_by_name(policy: Policy) -> None:
    with pytest.raises(ConfigurationError, match=f"{policy.name!r} .*cannot be predicted.*mpi_scripts/"):
        predict(Setting(MODEL, 4, Link(1e9), FREE, BUCKET_BYTES), policy)


def test_regions_of_very_many_ranks_are_not_counted_one_by_one() -> None:
    """``advise`` takes up to a billion ranks, and of as many regions it made a list for each prediction."""
    ranks = 10**6
    bucket = MODEL.plan(rp.Dense(), BUCKET_BYTES).buckets[0]
    large = replace(bucket, offsets=tuple(1000 * ranks * offset for offset in bucket.offsets))
    tracemalloc.start()
    there, back = messages(large, rp.Dense("fp16"), ranks, "dense")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert 2 * large.numel < back.payload < 2.1 * large.numel
    assert there.payload == pytest.approx(back.payload, rel=2 / ranks)
