"""Bugs that were found in what a checkpoint holds, each with the story it was found by."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save

import ringprune as rp
from ringprune.exchange.kept import KeptLane
from tests.training import MakeOptimizer, adamw, batches, loss_of, make_model, run, same_bytes, sgd, wrap

ROUNDING = 1e-5  # of float32 sums of numbers below 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_rounding_dropped_of_sums_is_the_same_in_all_on_any_number_of_ranks(ranks: int) -> None:
    """With op="sum" each rank took the mean that was saved: on half as many ranks half of it was lost."""

    def optimizer_of(model: nn.Module, comm: rp.comm.Communicator) -> rp.DistributedOptimizer:
        return wrap(model, comm, rp.Dense("int8"), op="sum")

    def residual(optimizer: rp.DistributedOptimizer) -> Tensor:
        kept: Tensor = next(iter(optimizer.state_dict()["ringprune"]["parameters"].values()))["residual"]
        return kept.clone()

    def first(comm: rp.comm.Communicator) -> tuple[dict[str, Tensor], dict[str, object], Tensor]:
        torch.manual_seed(comm.rank)
        model = nn.Linear(64, 64, bias=False)
        model.weight.data.fill_(0.1)
        optimizer = optimizer_of(model, comm)
        for _ in range(3):
            optimizer.zero_grad()
            (model.weight * torch.randn(64, 64)).sum().backward()
            optimizer.step()
        optimizer.flush()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), residual(optimizer)))

    saved = rp.simulate(4, first)
    kept = torch.stack([own for _, _, own in saved]).sum(0)

    def second(comm: rp.comm.Communicator) -> Tensor:
        model = nn.Linear(64, 64, bias=False)
        model.load_state_dict(saved[0][0])
        optimizer = optimizer_of(model, comm)
        optimizer.load_state_dict(copy.deepcopy(saved[0][1]))
        return residual(optimizer)

    assert kept.norm() > 0.01
    torch.testing.assert_close(torch.stack(rp.simulate(ranks, second)).sum(0), kept, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda params: torch.optim.SparseAdam(params, lr=0.1), id="SparseAdam"),
        pytest.param(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), id="SGD"),
    ],
)
def test_a_rank_whose_steps_were_all_left_out_saves_with_the_others(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """It had no state of its rows, gathered none, and the others waited for it."""

    def rank(comm: rp.comm.Communicator) -> dict[str, Tensor]:
        embedding = rp.ShardedEmbedding(10, 4, comm=comm)
        optimizer = rp.DistributedOptimizer(
            make([embedding.weight]), policy=rp.IWP(1.0, local_steps=4), nonfinite="skip", comm=comm
        )
        loss = embedding(torch.arange(0, 10, 2)).square().sum()  # rows of rank 0
        (loss * float("nan") if comm.rank == 0 else loss).backward()
        optimizer.step()
        first = optimizer.state_dict()["state"][0]
        optimizer.flush()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return {kind: value.to_dense() for kind, value in first.items() if isinstance(value, Tensor)}

    first, second = rp.simulate(2, rank, timeout=30)
    assert first.keys() == second.keys()
    assert any(value.shape == (10, 4) for value in first.values())
    for kind, value in first.items():
        assert torch.equal(value, second[kind])


class Averaging(torch.optim.Optimizer):
    """Keeps two kinds of rows, the first of them later in the alphabet."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Steps on what rows there are: a rank that has got none keeps nothing."""
        for param in (param for group in self.param_groups for param in group["params"]):
            if len(param.grad.coalesce().values()):
                state = self.state[param] or {"sum": torch.zeros_like(param), "average": torch.zeros_like(param)}
                state["sum"].add_(param.grad)
                state["average"].copy_(state["sum"] / 2)
                self.state[param] = state


def test_what_some_ranks_have_not_is_gathered_in_one_order() -> None:
    """In that in which each had it: the checkpoint had one kind of state under the name of another."""

    def rank(comm: rp.comm.Communicator) -> dict[str, Tensor]:
        embedding = rp.ShardedEmbedding(10, 4, comm=comm)
        optimizer = rp.DistributedOptimizer(Averaging([embedding.weight]), policy="dense", comm=comm)
        embedding(torch.tensor([1])).sum().backward()  # a row of rank 1
        optimizer.step()
        return copy.deepcopy(dict(optimizer.state_dict()["state"][0]))

    for state in rp.simulate(2, rank, timeout=30):
        assert torch.equal(state["sum"].sum(1), 4 * torch.eye(10)[1])
        assert torch.equal(state["average"].sum(1), 2 * torch.eye(10)[1])


TORN = "an exchange was broken off in the middle"


@pytest.mark.parametrize(
    ("policy", "options", "bucket", "whole"),
    [
        pytest.param(rp.IWP(0.05), {}, 1, False, id="overlap"),
        pytest.param(rp.IWP(0.05), {}, 0, True, id="overlap, before it takes effect"),
        pytest.param(rp.IWP(0.05), {"overlap": False}, 0, False, id="no overlap"),
        pytest.param(rp.IWP(0.05, local_steps=2), {}, 0, False, id="local steps"),
        pytest.param(rp.Dense("int8"), {}, 1, False, id="int8"),
    ],
)
def test_nothing_is_saved_of_an_exchange_that_was_broken_off(
    monkeypatch: pytest.MonkeyPatch, policy: rp.Policy, options: dict[str, Any], bucket: int, whole: bool
) -> None:
    """Ctrl-C inside step(), a checkpoint saved on the way out, and what had been kept back was lost in silence."""

    def interrupted(name: str) -> Callable[..., Any]:
        method = getattr(KeptLane, name)

        def instead(lane: KeptLane, *args: Any) -> Any:
            if lane.bucket.index == bucket:
                raise KeyboardInterrupt
            return method(lane, *args)

        return instead

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy, bucket_bytes=13_000, **options)
        run(model, optimizer, comm.rank, 5)
        last = copy.deepcopy(optimizer.state_dict())
        before = last["ringprune"]
        loss_of(model, next(batches(comm.rank, 1, 5))).backward()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            for name in ("_unpack", "_wait_in_parts"):  # of an index set, and of all entries
                patch.setattr(KeptLane, name, interrupted(name))
            optimizer.step()
        if not whole:
            with pytest.raises(rp.UsageError, match=TORN):
                optimizer.state_dict()
            if policy.local_steps:  # else a backward pass is under way
                optimizer.load_state_dict(last)
                run(model, optimizer, comm.rank, 2, 6)
                assert optimizer.state_dict()["ringprune"]["step"] == before["step"] + 1
                return
            with pytest.raises(rp.UsageError, match="an exchange was broken off"):
                optimizer.synchronize()  # what zero_grad() advises; it was an AssertionError, or went on without a word
                run(model, optimizer, comm.rank, 2, 6)
            return
        after = optimizer.state_dict()["ringprune"]
        assert after["step"] == before["step"]
        for name, kinds in before["parameters"].items():
            assert all(same_bytes(tensor, after["parameters"][name][kind]) for kind, tensor in kinds.items())

    rp.simulate(1, rank)


def test_nothing_is_saved_of_a_flush_that_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals are gone when it begins to send, and the weights have not got them."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 3)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("ringprune.packing.unflatten", interrupted)
            optimizer.flush()
        with pytest.raises(rp.UsageError, match=TORN):
            optimizer.state_dict()
        with pytest.raises(rp.UsageError, match=TORN):
            optimizer.flush()  # it would send nothing, and call all well

    rp.simulate(1, rank)


def test_what_was_broken_off_after_a_flush_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """close() asked for velocities to be given back, was refused, and left the hooks on the parameters."""

    def failing(*args: Any) -> None:
        raise rp.CommunicatorError("a rank is gone")

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 3)
        optimizer.flush()
        loss_of(model, next(batches(comm.rank, 1, 3))).backward()
        with monkeypatch.context() as patch, pytest.raises(rp.CommunicatorError, match="gone"):
            patch.setattr(KeptLane, "_unpack", failing)
            optimizer.step()
        optimizer.close()
        run(model, wrap(model, comm, rp.IWP(0.05)), comm.rank, 1)

    rp.simulate(1, rank)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "x"),
        ("step", None),
        ("step", -1),
        ("rank", 0.0),
        ("flushed", 1),
        ("findings", 5),
        ("fault", 3),
        ("highest", ["x"]),
        ("auto", None),
        ("parameters", {"0.weight": {"residual": torch.zeros(64, 64).to_sparse()}}),
        ("parameters", {"0.weight": {"residual": torch.zeros(64, 64, device="meta")}}),
        ("parameters", {"0.weight": {"residual": torch.zeros(64, 64, dtype=torch.complex64)}}),
    ],
)
def test_an_entry_that_was_changed_by_hand_is_refused(field: str, value: Any) -> None:
    """Bare errors of Python and torch, after a part of the state was overwritten; -1 failed at the next step."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        before = copy.deepcopy(saved["ringprune"])
        saved["ringprune"][field] = value
        with pytest.raises(rp.CheckpointError, match="entry is damaged"):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()["ringprune"]
        for name, kinds in before["parameters"].items():
            assert all(same_bytes(tensor, after["parameters"][name][kind]) for kind, tensor in kinds.items())

    rp.simulate(1, rank)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of one process that saves alone
@pytest.mark.parametrize(("policy", "make"), [(rp.Dense(), sgd), (rp.Dense(), adamw), (rp.IWP(0.05), adamw)])
def test_a_checkpoint_that_was_filled_in_part_is_refused(
    policy: rp.Policy, make: MakeOptimizer, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint loads what a new optimizer has already: momentum began anew, in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy, make)
        run(model, optimizer, comm.rank, 2)
        save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        optimizer.close()
        again = wrap(model, comm.duplicate(), policy, make)
        found = {"optimizer": again.state_dict()}
        load(found, checkpoint_id=tmp_path, no_dist=True)
        assert found["optimizer"]["ringprune"]["step"] == 2
        with pytest.raises(rp.CheckpointError, match=r"lacks \d+ .*torch\.save"):
            again.load_state_dict(found["optimizer"])
        run(model, again, comm.rank, 1)
        found = {"optimizer": again.state_dict()}  # now it has what there is to fill
        load(found, checkpoint_id=tmp_path, no_dist=True)
        again.load_state_dict(found["optimizer"])

    rp.simulate(1, rank)
