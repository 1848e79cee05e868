"""Balanced global top-k: what is kept, what stays, and what it costs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.reduction import dealing
from ringprune.wire import pair_code
from tests.training import make_model, nesterov, run, same_bytes, sgd, train, wrap

ROWS, COLUMNS = 40, 60


def exchange(
    comm: rp.comm.Communicator, policy: rp.Policy, grads: list[Tensor], **options: Any
) -> list[dict[str, Tensor]]:
    """Give each rank's gradients to the wrapper, step by step; what it then keeps, and what it makes of them."""
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).view_as(layer.weight))
    optimizer = wrap(layer, comm, policy, lambda p: torch.optim.SGD(p, lr=1.0, **options))
    history = []
    for grad in grads:
        optimizer.zero_grad()
        (layer.weight * grad).sum().backward()
        optimizer.step()
        assert layer.weight.grad is not None
        state = optimizer.state_dict()["ringprune"]["parameters"]["weight"]
        history.append(state | {"average": layer.weight.grad.clone()})
    return history


def noise(rank: int, step: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sums_of_proposals_are_kept_and_all_the_rest_stays_where_it_was(size: int) -> None:
    """Of each rank's own largest entries, at the indices kept; an entry that a rank did not propose stays with it."""
    k = round(0.05 * ROWS * COLUMNS)
    histories = rp.simulate(size, lambda comm: exchange(comm, rp.OkTopk(0.05), [noise(comm.rank)]))
    proposed = [
        torch.zeros(ROWS * COLUMNS).index_fill(0, noise(r).abs().view(-1).topk(k).indices, 1) for r in range(size)
    ]
    kept = histories[0][0]["average"].view(-1) != 0
    assert int(kept.sum()) == k
    sums = sum(p * noise(r).view(-1) for r, p in enumerate(proposed))
    assert torch.allclose(histories[0][0]["average"].view(-1), torch.where(kept, sums / size, 0.0))
    assert float(sums[kept].square().sum()) > 0.95 * float(sums.square().topk(k).values.sum())
    for r, history in enumerate(histories):
        sent = kept & (proposed[r] > 0)
        assert same_bytes(history[0]["residual"].view(-1), torch.where(sent, 0.0, noise(r).view(-1)))


def test_velocity_is_masked_only_where_a_value_was_sent_and_kept() -> None:
    size, policy = 3, rp.OkTopk(0.05, correction="local")

    def steps(comm: rp.comm.Communicator) -> list[Tensor]:
        return [noise(comm.rank, step) for step in range(2)]

    histories = rp.simulate(size, lambda comm: exchange(comm, policy, steps(comm), momentum=0.9))
    for rank, history in enumerate(histories):
        sent = history[0]["residual"] == 0
        expected = torch.where(sent, 0.0, noise(rank))
        assert same_bytes(history[0]["velocity"], expected) and bool(sent.any())
    kept = rp.simulate(
        size,
        lambda comm: exchange(
            comm, rp.OkTopk(0.05, correction="local", mask_velocity=False), steps(comm), momentum=0.9
        ),
    )
    assert same_bytes(kept[0][0]["velocity"], noise(0))


def test_an_entry_that_no_rank_judges_large_is_kept_for_its_sum() -> None:
    """Middling on every rank, largest of the sum: one rank's own choice would not send it."""
    size, k = 4, round(0.05 * ROWS * COLUMNS)

    def grad(rank: int) -> Tensor:
        flat = torch.full((ROWS * COLUMNS,), 1e-3)
        flat[:20] = 1.0  # the same on all ranks
        flat[100 * (rank + 1) : 100 * (rank + 1) + k - 20] = 2.0  # each rank's own
        return flat.view(ROWS, COLUMNS)

    for history in rp.simulate(size, lambda comm: exchange(comm, rp.OkTopk(0.05), [grad(comm.rank)])):
        assert bool((history[0]["average"].view(-1)[:20] == 1.0).all())


def test_few_entries_are_added_by_few_ranks() -> None:
    """Of 12 entries one rank adds all, the largest are the largest; another rank at every step."""
    size, steps, k = 8, 8, 12
    shared = noise(99)

    def rank(comm: rp.comm.Communicator) -> list[dict[str, Tensor]]:
        return exchange(comm, rp.OkTopk(k / shared.numel()), [shared] * steps)

    residual = torch.zeros(ROWS * COLUMNS)
    for entry in rp.simulate(size, rank)[0]:
        residual += shared.view(-1)
        largest = residual.abs().topk(k).indices
        assert set(entry["average"].view(-1).nonzero().flatten().tolist()) == set(largest.tolist())
        residual[largest] = 0.0


# -- bytes ------------------------------------------------------------------------------------------------------------


def volume(size: int, density: float, **options: Any) -> tuple[float, int]:
    """Bytes of packed entries per rank and step, mean over the ranks, of a matrix of 200 x 300; and K."""
    steps = 3

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        layer = nn.Linear(300, 200, bias=False)
        with torch.no_grad():
            layer.weight.fill_(0.5)
        optimizer = wrap(layer, comm, rp.OkTopk(density, **options), sgd)
        draw = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.randn(4, 300, generator=draw)).square().mean().backward()
            optimizer.step()
        stats = optimizer.stats()
        assert stats["realised_density"] == pytest.approx(round(density * 60_000) / 60_000)
        return stats

    results = rp.simulate(size, rank)
    return sum(s["bytes_values"] + s["bytes_indices"] for s in results) / size / steps, round(density * 60_000)


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_a_rank_sends_less_than_half_of_the_papers_bound_of_six_words_per_entry(size: int) -> None:
    """Pieces and sums, ``K (P-1)/P`` pairs each, and some bytes for each message (frame, whole words, count)."""
    for density in (0.01, 0.1):
        sent, total = volume(size, density)
        words = (size - 1) / size * total
        index_bytes = pair_code(total, 60_000).indices.position_bytes / total
        messages = 2 * min(size, total // 32)
        assert sent <= 2 * words * (4 + index_bytes + 0.1) + 24 * messages + 4 * (size - 1)
        assert sent < 0.5 * 6 * 4 * words


def test_bytes_do_not_grow_with_the_ranks() -> None:
    per_share = [volume(size, 0.1)[0] / ((size - 1) / size) for size in (2, 32)]
    assert per_share[1] < 1.25 * per_share[0]


def test_fewer_bits_are_fewer_bytes() -> None:
    exact, half, eighth = (volume(4, 0.05, values=values)[0] for values in ("fp32", "bf16", "int8"))
    assert half < 0.68 * exact and eighth < 0.48 * exact


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_bytes_are_those_of_the_formula(size: int, values: str) -> None:
    """The sums travel in messages of known sizes; pieces in as many bytes as what is proposed is dealt."""

    def rank(comm: rp.comm.Communicator) -> tuple[dict[str, Any], float]:
        model = make_model()
        optimizer = wrap(model, comm, rp.OkTopk(0.05, values=values))
        sent: dict[str, float] = {}
        alltoall, allgather = comm.alltoall, comm.allgather

        def counting(original: Any, kind: str) -> Any:
            def call(tensor: Tensor, *, name: str, **sizes: Any) -> Any:
                before = comm.traffic.bytes_sent
                handle = original(tensor, name=name, **sizes)
                key = name.rpartition(": ")[2]
                sent[key] = sent.get(key, 0.0) + comm.traffic.bytes_sent - before
                return handle

            return call

        comm.alltoall, comm.allgather = counting(alltoall, "a"), counting(allgather, "g")
        run(model, optimizer, comm.rank, 4)
        return sent, optimizer.stats()

    total, numel = 205 + 154, 7168
    code = pair_code(math.ceil(total / size), math.ceil(numel / size), values=values)
    for sent, stats in rp.simulate(size, rank):
        kept = sum(map(code.size, dealing(numel, total, size).shares))
        assert sent["largest sums"] == pytest.approx(4 * (size - 1) / size * kept)
        assert sent["number of entries"] == 4 * 4 * (size - 1)
        packed = sent["largest sums"] + sent["number of entries"] + sent["pieces"]
        assert stats["bytes_values"] + stats["bytes_indices"] == pytest.approx(packed)
        assert stats["bytes_indices"] == pytest.approx(code.index_share * packed)


# -- what it works with -----------------------------------------------------------------------------------------------


def test_a_hierarchy_of_single_ranks_is_no_hierarchy() -> None:
    runs = [
        rp.simulate(3, lambda comm, o=options: train(comm, rp.OkTopk(0.05), nesterov, **o)[0], ranks_per_node=1)[0]
        for options in ({}, {"hierarchical": True})
    ]
    assert same_bytes(*runs)


@pytest.mark.parametrize("slot", [{"explore": 0.5}, {"lookahead": True}], ids=["explore", "lookahead"])
def test_what_needs_a_shared_set_is_refused(slot: dict[str, Any]) -> None:
    with pytest.raises(rp.ConfigurationError, match="each rank chooses for itself"):
        replace(rp.OkTopk(), **slot)


def test_other_scores_judge_sums_too() -> None:
    """IWP's score in the balanced slot: owners compare what they have summed by the ratio to the weight."""
    policy = replace(rp.IWP(0.05, damping=0.0), index_sets="balanced")
    small = torch.zeros(ROWS, COLUMNS)
    small.view(-1)[:] = 1.0

    def rank(comm: rp.comm.Communicator) -> Tensor:
        return exchange(comm, policy, [small])[0]["average"]

    average = rp.simulate(1, rank)[0].view(-1)
    weight = torch.linspace(-1, 1, ROWS * COLUMNS)
    assert set(average.nonzero().flatten().tolist()) == set((1 / weight.abs()).topk(120).indices.tolist())


def test_a_communicator_without_alltoall_is_refused() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        comm.abilities = comm.abilities - {"alltoall"}
        with pytest.raises(rp.ConfigurationError, match="policy 'oktopk' needs alltoall"):
            wrap(make_model(), comm, "oktopk")

    rp.simulate(1, rank)
