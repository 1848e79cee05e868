"""Rows in trouble: steps that are not made, checkpoints, and what is refused, on all ranks and with its reason."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.planning import DECAY_DENSE
from tests.tables import LENGTH, WAYS, Lookup, Table, drawn, loss_of_words, make_words, tables_of
from tests.training import same_bytes, weights

WIDTH = 4


@pytest.mark.parametrize("way", ["auto", *WAYS])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_row_of_one_rank_raises_on_all_and_leaves_nothing(way: str, overlap: bool) -> None:
    def rank(comm: rp.comm.Communicator, bad: bool) -> Tensor:
        table = Table(comm, rp.Parallax(way), LENGTH, WIDTH, overlap=overlap)
        for step in range(4):
            rows, gradients = drawn(10 * step + comm.rank, 9, LENGTH, WIDTH)
            if step == 2:
                if not bad:
                    continue
                before, state = weights(table.model), copy.deepcopy(table.optimizer.state_dict()["ringprune"])
                if comm.rank == 1:
                    gradients[4, 1] = math.nan
                with pytest.raises(rp.NonFiniteGradientError, match="rank 1: the gradient of 'weight' has 1 of 240"):
                    table.step((rows, gradients))
                assert same_bytes(weights(table.model), before)
                after = table.optimizer.state_dict()["ringprune"]["parameters"]["weight"]["overlap"]
                assert torch.equal(after, state["parameters"]["weight"]["overlap"])
                continue
            table.step((rows, gradients))
        assert table.optimizer.stats()["rows"]["weight"] == {way: 3} or way == "auto"
        return weights(table.model)

    bad, good = (rp.simulate(3, lambda comm, b=b: rank(comm, b)) for b in (True, False))
    assert all(same_bytes(each, good[0]) for each in bad)


def test_a_resumed_run_goes_the_same_ways_to_the_same_bytes() -> None:
    """How much the ranks overlapped is in the checkpoint; values in bfloat16 tell which way they went."""
    policy = rp.Parallax(values="bf16")

    def lookup(rank: int, step: int) -> Lookup:
        rows, gradients = drawn(100 * step + rank, 20, LENGTH, WIDTH)
        return [row // 8 for row in rows] if step % 2 else rows, gradients

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, int]:
        straight = Table(comm, policy, LENGTH, WIDTH)
        for step in range(6):
            straight.step(lookup(comm.rank, step))
        first = Table(comm, policy, LENGTH, WIDTH)
        for step in range(3):
            first.step(lookup(comm.rank, step))
        again = Table(comm, policy, LENGTH, WIDTH)
        again.model.load_state_dict(first.model.state_dict())
        again.optimizer.load_state_dict(first.optimizer.state_dict())
        for step in range(3, 6):
            again.step(lookup(comm.rank, step))
        return weights(straight.model), weights(again.model), len(straight.optimizer.stats()["rows"]["weight"])

    for straight, again, taken in rp.simulate(5, rank):
        assert same_bytes(straight, again)
        assert taken > 1


def test_a_flush_leaves_tables_alone() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_words()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            comm=comm,
            model=model,
            policy=replace(rp.IWP(0.05), rows=rp.Rows()),
            check_every=1,
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of_words(model, comm.rank, step).backward()
            optimizer.step()
        tables, layer = [t.detach().clone() for t in tables_of(model)], model["out"].weight.detach().clone()
        optimizer.flush()
        assert all(map(same_bytes, tables_of(model), tables))
        assert not same_bytes(model["out"].weight, layer)
        assert not bool(optimizer.state_dict()["ringprune"]["parameters"]["out.weight"]["residual"].any())
        optimizer.zero_grad()
        loss_of_words(model, comm.rank, 3).backward()
        optimizer.step()

    rp.simulate(2, rank)


def test_a_gradient_changed_after_backward_was_sent_as_it_was() -> None:
    """A coalesced one too, whose values autograd and the exchange could share."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        table = Table(comm, rp.Parallax("gather"), LENGTH, WIDTH)
        table.model.weight.register_hook(lambda grad: grad.coalesce())
        table.backward(([1, 2], torch.ones(2, WIDTH)))
        assert table.model.weight.grad is not None
        table.model.weight.grad._values().fill_(7.0)
        table.optimizer.step()
        return table.model.weight.grad

    assert all(bool((grad.values() == 1.0).all()) for grad in rp.simulate(2, rank))


@pytest.mark.parametrize("when", ["before the exchange", "after the exchange"])
def test_dense_gradients_beside_rows_that_are_changed_are_noticed(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where rows lie was asked too, which torch refuses to tell: an error on one rank, for which the others waited.

    Averages may be changed, which a warning tells.
    """
    late = when == "after the exchange"

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_words()
        policy = replace(rp.IWP(0.05, min_numel=100), rows=rp.Rows("gather"))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = rp.DistributedOptimizer(sgd, model.named_parameters(), policy=policy, comm=comm, model=model)
        loss_of_words(model, comm.rank, 0).backward()
        if late:
            optimizer.synchronize()
        if late or comm.rank == 1:
            for param in model["out"].parameters():
                param.grad.mul_(0.5)
        if late:
            optimizer.step()
        else:
            with pytest.raises(rp.UsageError, match=r"rank 1: the gradient of 'out\.weight' was changed"):
                optimizer.step()
        return weights(model)

    first, second = rp.simulate(2, rank)
    assert same_bytes(first, second)
    assert ("averages were changed" in caplog.text) == late


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_dense_gradient_of_a_table_raises_on_all_ranks(overlap: bool) -> None:
    """As where the table is the output matrix as well."""

    def rank(comm: rp.comm.Communicator) -> None:
        table = Table(comm, rp.Parallax(), LENGTH, WIDTH, overlap=overlap)
        before = weights(table.model)
        if comm.rank == 1:
            (table.model(torch.tensor([3])) @ table.model.weight.t()).sum().backward()
        else:
            table.backward(drawn(1, 5, LENGTH, WIDTH))
        with pytest.raises(rp.UsageError, match=r"rank 1: the gradient of 'weight' is not one of sparse rows"):
            table.optimizer.step()
        assert same_bytes(weights(table.model), before)
        table.step(drawn(1, 5, LENGTH, WIDTH))

    rp.simulate(2, rank, timeout=20)


def test_other_sparse_gradients_are_made_dense() -> None:
    """Of a module that does not say that its gradients are sparse."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(LENGTH, WIDTH))

    def rank(comm: rp.comm.Communicator) -> None:
        model = Hidden()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            policy="parallax",
            comm=comm,
            model=model,
        )
        nn.functional.embedding(torch.tensor([comm.rank]), model.weight, sparse=True).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert not model.weight.grad.is_sparse
        assert model.weight[:3, 0].tolist() == [0.5, 0.5, 1.0]
        assert optimizer.stats()["rows"] == {}

    rp.simulate(2, rank)


def test_what_cannot_go_with_rows_is_refused_with_its_reason() -> None:
    for slot, said in (
        ({"schedule": rp.LayerPriority()}, "rows=.* goes with schedule=None, local_steps=None"),
        ({"local_steps": rp.LocalSteps(2)}, "rows=.* goes with schedule=None, local_steps=None"),
    ):
        with pytest.raises(rp.ConfigurationError, match=said):
            replace(rp.Parallax(), **slot)
    with pytest.raises(rp.ArgumentTypeError, match=r"Policy\.rows='gather'"):
        replace(rp.IWP(), rows="gather")
    with pytest.raises(rp.ConfigurationError, match=r"way='gathered'.*did you mean 'gather'"):
        rp.Rows("gathered")
    with pytest.raises(rp.ConfigurationError, match="values='int8'"):
        rp.Rows(values="int8")
    with pytest.raises(rp.ConfigurationError, match="rows with ddp_hook"):
        rp.ddp_hook(rp.Parallax(), comm="mpi")
    for auto in ("auto", rp.Auto()):  # the second was told to be a policy such as IWP
        with pytest.raises(
            rp.ConfigurationError, match=r'policy="auto" goes with ringprune\.DistributedOptimizer alone'
        ):
            rp.ddp_hook(auto, comm="mpi")
    with pytest.raises(rp.ConfigurationError, match="schedule with ddp_hook"):
        rp.ddp_hook(rp.P3(), comm="mpi")  # it was accepted, and made no difference


def test_what_a_wrapper_cannot_have_with_rows_is_refused_with_its_reason() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_words()

        def wrap(optimizer: torch.optim.Optimizer, policy: Any = "parallax", **options: Any) -> Any:
            return rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy, comm=comm, **options)

        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(rp.ConfigurationError, match=r"policy 'parallax' .*: give the wrapper model="):
            wrap(sgd)
        with pytest.raises(rp.ArgumentTypeError, match="model='words'"):
            wrap(sgd, model="words")
        with pytest.raises(
            rp.ConfigurationError, match="hierarchical=True cannot go with: sums inside a node are dense"
        ):
            wrap(sgd, model=model, hierarchical=True)
        with pytest.raises(rp.ConfigurationError, match=r"SparseAdam: .*rows=rp.Rows\(\)"):
            wrap(torch.optim.SparseAdam(tables_of(model)), "dense")
        both = torch.optim.SparseAdam([*tables_of(model), model["out"].bias])
        with pytest.raises(rp.ConfigurationError, match=r"SparseAdam has 1 parameters, such as one of shape \[200\]"):
            wrap(both, model=model)
        adam = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            rp.ConfigurationError, match=r"AdamW takes no sparse ones: it has 2 tables .*wrapper of their"
        ):
            wrap(adam, model=model)  # torch said so in its first step, on weights that had begun to move
        wrap(torch.optim.AdamW(model["out"].parameters()), model=model).close()  # another optimizer has the tables
        for kind in DECAY_DENSE:
            decaying = kind(model.parameters(), lr=0.1, weight_decay=0.1)
            with pytest.raises(rp.ConfigurationError, match=r"weight_decay=0.1 has 2 tables .*a parameter group with"):
                wrap(decaying, model=model)
        taken = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with pytest.raises(rp.ConfigurationError, match=r"weight_decay=0.1 has 2 tables"):
            wrap(taken, replace(rp.IWP(0.05, correction="global"), rows=rp.Rows()), model=model)
        wrap(taken, replace(rp.IWP(0.05), rows=rp.Rows()), model=model).close()
        comm.abilities = comm.abilities - {"alltoall"}
        with pytest.raises(rp.ConfigurationError, match="'parallax' needs alltoall"):
            wrap(sgd, model=model)
        wrap(sgd, rp.Parallax("gather"), model=model).close()

    rp.simulate(1, rank)


@pytest.mark.parametrize("kind", DECAY_DENSE)
def test_torch_itself_does_not_decay_tables_of_which_some_rows_come(kind: Any) -> None:
    """Why that is refused at construction; where torch learns it, DECAY_DENSE has one less."""
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = kind(table.parameters(), lr=0.1, weight_decay=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_a_model_without_sparse_modules_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """The one mistake of a migration: the table then travels whole."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Embedding(LENGTH, WIDTH)
        rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            policy="parallax",
            comm=comm,
            model=model,
        )

    rp.simulate(2, rank)
    assert [r.message for r in caplog.records if "no module of model= has sparse=True" in r.message][1:] == []
    assert "no module of model= has sparse=True" in caplog.text


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("ranks", "max_norm", "trained", "said"),
    [(2, 1.0, True, 1), (1, 1.0, True, 0), (2, None, True, 0), (2, 1.0, False, 0)],
)
def test_max_norm_is_warned_about(
    kind: Any, ranks: int, max_norm: float | None, trained: bool, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks trained other weights in silence, unless a norm was above it before the first step."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.ModuleDict({"table": kind(LENGTH, WIDTH, max_norm=max_norm), "rest": nn.Linear(WIDTH, 2)})
        model["table"].weight.requires_grad_(trained)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rp.DistributedOptimizer(optimizer, model.named_parameters(), policy="dense", comm=comm, model=model)

    rp.simulate(ranks, rank)
    assert sum("table has max_norm" in record.message for record in caplog.records) == said


def test_ranks_that_know_of_other_sparse_parameters_hear_of_it() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Embedding(LENGTH, WIDTH, sparse=comm.rank == 0)
        with pytest.raises(rp.RankMismatchError, match="'weight' float32 sparse"):
            rp.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                policy="parallax",
                comm=comm,
                model=model,
            )

    rp.simulate(2, rank)
