"""What roots propose, and what comes of it: bad proposals, sets chosen ahead, sets of each rank's own."""

import copy
import dataclasses
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.agreement import Proposals
from ringprune.wire import WIRE_VERSION, IndexCode
from ringprune.wire.indices import _CODES
from ringprune.wire.message import FRAME_BYTES, seal
from tests.training import batches, loss_of, make_model, run, same_bytes, sgd, train, weights, wrap

encode = IndexCode.encode


def out_of_range(code: IndexCode, positions: Tensor) -> Tensor:
    message = encode(code, positions)
    message[FRAME_BYTES + 8 :] = 0
    message[FRAME_BYTES + 8 + 4 * (code.count - 1) : FRAME_BYTES + 8 + 4 * code.count] = torch.tensor(
        [code.numel], dtype=torch.int32
    ).view(torch.uint8)
    return seal(message, _CODES[code.coding])


def unsorted(code: IndexCode, positions: Tensor) -> Tensor:
    return encode(code, positions.flip(0))


def too_many(code: IndexCode, positions: Tensor) -> Tensor:
    message = encode(code, positions)
    message[FRAME_BYTES : FRAME_BYTES + 8] = torch.tensor([code.count + 1]).view(torch.uint8)
    return seal(message, _CODES[code.coding])


def truncated(code: IndexCode, positions: Tensor) -> Tensor:
    message = encode(code, positions)
    message[-4:] ^= 1  # what a collective of agreed size can do worst
    return message


def of_another_version(code: IndexCode, positions: Tensor) -> Tensor:
    message = encode(code, positions)
    message[1] = WIRE_VERSION - 1
    return message


BAD = {
    "out of range": (out_of_range, "not ascending positions below 7168"),
    "unsorted": (unsorted, "not ascending positions below 7168"),
    "too many": (too_many, "73 indices, more than the 72 agreed"),
    "damaged": (truncated, "its checksum does not fit"),
    "of another version": (of_another_version, f"it is in wire format {WIRE_VERSION - 1}"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_proposal_raises_on_all_ranks_before_anything_is_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bad, complaint = BAD[kind]
    monkeypatch.setattr(IndexCode, "encode", make_bad)

    def rank(comm: rp.comm.Communicator) -> str:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.01, index_format="list"), sgd)
        before = weights(model)
        with pytest.raises(rp.CommunicatorError) as caught:
            run(model, optimizer, comm.rank, 1)
        assert same_bytes(weights(model), before)
        state = optimizer.state_dict()["ringprune"]["parameters"]
        assert not any(entry["residual"].any() for entry in state.values() if "residual" in entry)
        return str(caught.value)

    messages = rp.simulate(3, rank)
    assert len(set(messages)) == 1
    root = rp.IWP().roots.of(0, 0, 0, 3)[0]
    assert f"bucket 0 indices from rank {root} at step 0" in messages[0] and complaint in messages[0]


def test_a_set_chosen_ahead_is_that_of_the_residual() -> None:
    """The second step sends the largest of what the first has left over, and of its own gradient at those entries."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Linear(100, 50, bias=False)
        optimizer = wrap(model, comm, rp.IWP(0.02, lookahead=True), sgd)
        rms = model.weight.detach().double().square().mean().sqrt().float()  # refreshed every 50 steps
        run_one(model, optimizer)
        kept = optimizer.state_dict()["ringprune"]["parameters"]["weight"]["residual"].flatten().clone()
        largest = (kept.abs() / (model.weight.detach().flatten().abs() + rms + 1e-8)).topk(100).indices
        run_one(model, optimizer)
        assert model.weight.grad is not None
        assert set(model.weight.grad.flatten().nonzero().flatten().tolist()) == set(largest.tolist())

    rp.simulate(1, rank)


def run_one(model: nn.Module, optimizer: rp.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()


def test_what_was_begun_ahead_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """flush, load_state_dict and close wait for it, on all ranks."""
    made, waited = [], []
    start, wait = Proposals.__init__, Proposals.wait
    monkeypatch.setattr(Proposals, "__init__", lambda self, *a, **k: (made.append(id(self)), start(self, *a, **k))[1])
    monkeypatch.setattr(Proposals, "wait", lambda self: (waited.append(id(self)), wait(self))[1])

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05, lookahead=True), sgd)
        run(model, optimizer, comm.rank, 2)
        optimizer.flush()
        run(model, optimizer, comm.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        run(model, optimizer, comm.rank, 2)
        optimizer.close()

    rp.simulate(3, rank)
    assert len(made) == len(waited) > 3 * 6


def test_own_sets_are_the_mean_of_what_each_rank_chose() -> None:
    """Gathered and scattered sums are the same to the bit: both add in the order of the ranks."""
    runs = [
        rp.simulate(4, lambda comm, sets=sets: train(comm, rp.DGC(0.05, index_sets=sets), sgd, 6)[0])
        for sets in ("gathered", "scattered")
    ]
    assert same_bytes(runs[0][0], runs[1][0])


def test_bytes_of_own_sets_grow_with_the_ranks_when_gathered() -> None:
    def per_rank(size: int, policy: rp.Policy) -> float:
        _, optimizer = rp.simulate(size, lambda comm: train(comm, policy, sgd, 3))[0]
        stats = optimizer.stats()
        return stats["bytes_values"] + stats["bytes_indices"]

    assert per_rank(8, rp.DGC(0.01)) > 3 * per_rank(2, rp.DGC(0.01))
    assert per_rank(8, rp.IWP(0.01)) < 2 * per_rank(2, rp.IWP(0.01))


@pytest.mark.parametrize(
    "slots", [{"explore": 0.5}, {"values": "int8"}, {"lookahead": True}], ids=["explore", "values", "lookahead"]
)
def test_own_sets_with_what_needs_a_shared_one(slots: dict[str, Any]) -> None:
    with pytest.raises(rp.ConfigurationError, match="each rank chooses for itself"):
        dataclasses.replace(rp.DGC(), **slots)


def test_random_entries_cost_no_index_bytes_and_every_entry_comes_up() -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[dict[str, Any], Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, rp.RandomK(0.1), sgd)
        seen = torch.zeros(64, 64, dtype=torch.bool)
        for batch in batches(comm.rank, 60):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            seen |= model[0].weight.grad != 0
        return optimizer.stats(), seen

    stats, seen = rp.simulate(2, rank)[0]
    assert stats["bytes_indices"] == 0 and stats["bytes_values"] > 0
    assert float(seen.float().mean()) > 0.9


def test_look_ahead_after_a_step_that_was_sent_whole_chooses_by_the_gradient() -> None:
    """Nothing is left over then; an empty set used to be sent, and a resumed run did otherwise."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        policy = rp.IWP(0.01, lookahead=True, warmup=rp.Warmup(4))
        data = list(batches(comm.rank, 6))
        results = []
        for stop in (None, 1):
            model = make_model()
            optimizer = wrap(model, comm, policy, sgd)
            for step, batch in enumerate(data):
                if step == stop:
                    saved, kept = optimizer.state_dict(), model.state_dict()
                    optimizer.close()
                    model = make_model()
                    model.load_state_dict(kept)
                    optimizer = wrap(model, comm, policy, sgd)
                    optimizer.load_state_dict(saved)
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                assert bool(model[0].weight.grad.any())
            results.append(weights(model))
            optimizer.close()
        return results[0], results[1]

    for straight, resumed in rp.simulate(2, rank):
        assert same_bytes(straight, resumed)


def test_backward_does_not_wait_for_other_ranks() -> None:
    """A rank without a gradient starts nothing before step(); what the user sends in between used to deadlock."""
    original = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60), nn.Linear(60, 60))

    def rank(comm: rp.comm.Communicator) -> None:
        model = copy.deepcopy(original)
        optimizer = wrap(model, comm, rp.IWP(0.05, values="int8"), sgd, bucket_bytes=1)
        for step in range(3):
            optimizer.zero_grad()
            if comm.rank == 0 or step != 1:
                model(torch.randn(4, 60)).square().mean().backward()
            if step:  # at the first step ranks compare their weights as soon as a bucket is full
                meet.wait(timeout=20)  # stands for a collective of the user's
            optimizer.step()

    meet = threading.Barrier(2)
    rp.simulate(2, rank, timeout=10)


def test_roots_read_hardly_anything_twice_however_long_they_waited_for_their_turn() -> None:
    """Four ranks take turns at random. Of hints from their last turn, whenever that was, a third did not fit."""
    steps = 60

    def job(comm: rp.comm.Communicator) -> dict[str, int]:
        weight = nn.Parameter(torch.ones(100, 600))
        inner = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
        policy = rp.IWP(0.01, roots=1, warmup=rp.Warmup(steps=0))
        optimizer = rp.DistributedOptimizer(inner, [("w", weight)], policy=policy, comm=comm)
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            (weight * torch.randn(100, 600, generator=random)).sum().backward()
            optimizer.step()
        selection: dict[str, int] = optimizer.stats()["selection"]
        return selection

    tally = Counter[str]()
    for counts in rp.simulate(4, job, timeout=60):
        tally.update(counts)
    assert tally["tensors"] == steps
    assert tally["missed"] + tally["overflowed"] <= steps / 10


def test_flush_leaves_the_momentum_of_coded_dense_tensors_alone() -> None:
    """What rounding drops is sent with the next step, under its momentum; a flush used to step on it."""

    def moved(policy: rp.Policy) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
            run(model, optimizer, comm.rank, 3)
            before = weights(model)
            optimizer.flush()
            return weights(model) - before

        return rp.simulate(2, rank)[0]

    assert not moved(rp.Dense("int8")).any() and not moved(rp.Dense()).any()
