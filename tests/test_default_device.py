"""Training under ``torch.set_default_device`` and ``set_default_dtype``: what RingPrune makes does not follow them.

The default device here is "meta", whose tensors hold nothing, so that one of them in the wrong place cannot go unseen.
"""

from typing import Any

import pytest
import torch

import ringprune as rp
from tests.training import batches, loss_of, make_model, same_bytes, sgd, weights

RANKS, STEPS = 2, 8

POLICIES: dict[str, Any] = {
    "dense": rp.Dense(),
    "dense coded": rp.Dense("int8"),
    "iwp": rp.IWP(0.05, explore=0.2, refresh=3),
    "iwp of all ranks": rp.IWP(0.05, roots="all", values="book4", dense_values="int8"),
    "iwp over the ring": rp.IWP(0.05, values="int4", reduction="ring"),
    "iwp ahead": rp.IWP(0.05, lookahead=True),
    "dgc": rp.DGC(0.05),
    "scalecom": rp.ScaleCom(0.05),
    "random_k": rp.RandomK(0.05),
    "slim_dp": rp.SlimDP(0.05),
    "mipd": rp.MIPD(0.05),
    "oktopk": rp.OkTopk(0.05),
    "p3": rp.P3(),
    "iwp for sgd": "iwp",
    "growing intervals": rp.IWP(0.05, local_steps=rp.LocalSteps(2, momentum="shared", growth=1.0)),
    "outer momentum": rp.Dense(local_steps=rp.LocalSteps(2, outer_momentum=0.5)),
}


def trained(policy: Any, device: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Weights and bytes of each rank; a checkpoint is made and loaded in the middle."""
    made = [(make_model(), list(batches(rank, STEPS))) for rank in range(RANKS)]
    scheduled = getattr(policy, "schedule", None) is not None
    checked = {} if scheduled or policy == "iwp" else {"check_every": 3}

    def rank(comm: rp.comm.Communicator) -> tuple[torch.Tensor, dict[str, Any]]:
        model, given = made[comm.rank]
        options = checked | ({"model": model} if scheduled else {})
        with torch.device(device):
            optimizer = rp.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm, **options
            )
            for i, batch in enumerate(given):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                if i == STEPS // 2:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.flush()
            stats = optimizer.stats()
            optimizer.close()
        return weights(model), {name: n for name, n in stats.items() if name.startswith("bytes_")}

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return rp.simulate(RANKS, rank, timeout=120)
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.bfloat16)]
)
def test_defaults_of_torch_change_nothing(policy: str, device: str, dtype: torch.dtype) -> None:
    """With a GPU as the default a few numbers of the host's were made on it, and met others that were not."""
    usual = trained(POLICIES[policy], "cpu", torch.float32)
    for expected, found in zip(usual, trained(POLICIES[policy], device, dtype), strict=True):
        assert same_bytes(expected[0], found[0])
        assert expected[1] == found[1]


@pytest.mark.parametrize("sharded", [False, True])
def test_tables_are_exchanged_under_another_default(sharded: bool) -> None:
    rows, dim = 40, 6

    def rank(comm: rp.comm.Communicator, device: str) -> torch.Tensor:
        table: Any = torch.nn.Embedding(rows, dim, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.arange(rows * dim).view(rows, dim) / 100)
        if sharded:
            table = rp.ShardedEmbedding.from_pretrained(table.weight.detach(), freeze=False, comm=comm)
        words = [torch.arange(i, i + 12, 1 + comm.rank) for i in range(STEPS)]
        with torch.device(device):
            optimizer = rp.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=0.1),
                table.named_parameters(),
                policy="parallax",
                comm=comm,
                model=table,
            )
            for batch in words:
                optimizer.zero_grad()
                table(batch).square().sum().backward()
                optimizer.step()
            state = table.state_dict()["weight"]
            optimizer.close()
        return state.detach().clone()

    for default, other in zip(
        rp.simulate(RANKS, lambda comm: rank(comm, "cpu"), timeout=60),
        rp.simulate(RANKS, lambda comm: rank(comm, "meta"), timeout=60),
        strict=True,
    ):
        assert same_bytes(default, other)
