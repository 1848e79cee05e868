"""A sharded embedding trains as one whole table would, sends what the formula says, and nothing hangs."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ringprune as rp
from ringprune.embedding import embedding_of
from ringprune.sharding import Owners

# torch's own Adagrad and SparseAdam do not say whether they want the check.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, DIM = 53, 6
STEPS = 5
# Float64 sums of a few dozen terms near 1, in another order, over a few steps.
CLOSE = 1e-12

SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


class Words(nn.Module):
    """A table and a layer on it; rows looked up several times, padding among them."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layer = nn.Linear(DIM, 3, dtype=torch.float64)
        with torch.no_grad():
            for param in self.layer.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))

    def forward(self, indices: Tensor) -> Tensor:
        out: Tensor = self.layer(self.table(indices)).tanh()
        return out


def lookups(rank: int, step: int) -> Tensor:
    """What a rank looks up: another number of indices on each, none on one of them at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = 0 if (rank, step) == (1, 2) else 4 + rank
    return torch.randint(0, ROWS, (count, 3), generator=generator)


def step_both(comm: rp.comm.Communicator, step: int, ours: Any, theirs: Any, *, squared: bool = False) -> None:
    """A step of a sharded model on this rank's lookups, and one of a whole model on those of all ranks.

    ``ours`` and ``theirs`` are a model and its optimizer; the loss is a sum, of squares if ``squared``.
    """
    (model, optimizer), (reference, other) = ours, theirs

    def loss(of: nn.Module, rank: int) -> Tensor:
        found: Tensor = of(lookups(rank, step))
        return (found.square() if squared else found).sum()

    loss(model, comm.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    (sum((loss(reference, r) for r in range(comm.size)), torch.zeros(())) / comm.size).backward()
    other.step()
    other.zero_grad()


def sharded(comm: rp.comm.Communicator, **options: Any) -> rp.ShardedEmbedding:
    return rp.ShardedEmbedding(ROWS, DIM, 3, comm=comm, **{"dtype": torch.float64} | options)


def whole(comm: rp.comm.Communicator) -> nn.Embedding:
    table = nn.Embedding(ROWS, DIM, 3, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(sharded(comm).gathered())
    return table


@pytest.mark.parametrize(("ranks", "partitions"), [(1, None), (2, None), (3, 2), (4, 7)])
@pytest.mark.parametrize("make", SPARSE)
def test_it_trains_as_a_whole_table_on_all_batches(ranks: int, partitions: int | None, make: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table, reference = sharded(comm, partitions=partitions), whole(comm)
        optimizer, other = SPARSE[make](table.parameters()), SPARSE[make](reference.parameters())
        for step in range(STEPS):
            step_both(comm, step, (table, optimizer), (reference, other), squared=True)
        torch.testing.assert_close(table.gathered(), reference.weight.detach(), rtol=0, atol=CLOSE)

    rp.simulate(ranks, rank, timeout=60)


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (5, 2), (3, 3), (3, 1)])
def test_nodes_train_as_one_whole_table_and_send_each_row_once(ranks: int, per_node: int) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[float, int]:
        table, reference = sharded(comm, hierarchical=True), whole(comm)
        optimizer, other = SPARSE["momentum"](table.parameters()), SPARSE["momentum"](reference.parameters())
        for step in range(STEPS):
            step_both(comm, step, (table, optimizer), (reference, other), squared=True)
        torch.testing.assert_close(table.gathered(), reference.weight.detach(), rtol=0, atol=CLOSE)
        before = table.stats()
        table(torch.arange(ROWS))  # all ranks want every row
        after = table.stats()
        together = min(per_node, ranks - comm.rank // per_node * per_node)
        assert (after["bytes_inside_node"] > before["bytes_inside_node"]) == (together > 1)
        return after["bytes_sent"] - before["bytes_sent"], len(table.weight)

    nodes = -(-ranks // per_node)
    found = rp.simulate(ranks, rank, timeout=60, ranks_per_node=per_node)
    sent = sum(one[0] for one in found)
    # Every node pulls what others own once: 4 bytes to ask, 8 per entry; counts; and a flag that all ranks sum.
    rows = sum(ROWS - found[node * per_node][1] for node in range(nodes))
    assert sent == pytest.approx(rows * (4 + 8 * DIM) + 8 * nodes * (nodes - 1) + 2 * (ranks - 1) * 4)
    assert all(one[1] == 0 for number, one in enumerate(found) if number % per_node)


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.5)], ids=["dense", "iwp"])
def test_a_flush_leaves_rows_as_they_are(policy: rp.Policy) -> None:
    """It once made the last step of the table again: the gradient was still there."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        optimizer = rp.DistributedOptimizer(
            SPARSE["momentum"](model.parameters()), model.named_parameters(), policy=policy, comm=comm
        )
        model(lookups(comm.rank, 0)).sum().backward()
        optimizer.step()
        before = model.table.gathered().clone()
        optimizer.flush()
        assert torch.equal(model.table.gathered(), before)

    rp.simulate(2, rank, timeout=60)


@pytest.mark.parametrize("make", ["sgd", "momentum"])
@pytest.mark.parametrize(
    "policy", [rp.Dense(), rp.IWP(1.0), rp.Dense(local_steps=1)], ids=["dense", "iwp", "local steps"]
)
def test_inside_the_wrapper_all_is_averaged(policy: rp.Policy, make: str) -> None:
    """One process on the joined batch; the loss is a sum, so that ranks with more rows count for more.

    Rows in one param group with the layer once lost their momentum, where the policy took over that of the layer.
    """

    def rank(comm: rp.comm.Communicator) -> None:
        model, reference = Words(sharded(comm)), Words(whole(comm))
        optimizer = rp.DistributedOptimizer(
            SPARSE[make](model.parameters()), model.named_parameters(), policy=policy, comm=comm
        )
        other = SPARSE[make](reference.parameters())
        for step in range(STEPS):
            step_both(comm, step, (model, optimizer), (reference, other))
        # What the wrapper exchanges of the layer may be rounded to float32 on the way.
        torch.testing.assert_close(model.table.gathered(), reference.table.weight.detach(), rtol=0, atol=1e-5)
        stats = optimizer.stats()
        assert stats["embeddings"]["table.weight"]["lookups"] == sum(
            lookups(comm.rank, step).numel() for step in range(STEPS)
        )
        assert list(stats["parameters"]) == ["layer.weight", "layer.bias"]

    rp.simulate(3, rank, timeout=60)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from(["fp32", "fp16", "bf16"]), st.integers(0, 2**31))
def test_bytes_are_those_of_the_formula(ranks: int, partitions: int, values: Any, seed: int) -> None:
    """Of a rank's unique rows that others own: a 4-byte number, the row, and its gradient; and counts, 8 bytes each."""
    wanted = [
        torch.randint(0, ROWS, (20,), generator=torch.Generator().manual_seed(seed + rank)) for rank in range(ranks)
    ]
    owners = Owners(ROWS, partitions, ranks)
    owner = [owners.rank_of(rows.unique()) for rows in wanted]
    asks = [[int((owner[r] == other).sum()) for other in range(ranks)] for r in range(ranks)]
    entry = 4 if values == "fp32" else 2

    def rank(comm: rp.comm.Communicator) -> tuple[float, float]:
        table = sharded(comm, partitions=partitions, values=values, dtype=torch.float32)
        before = table.stats()["bytes_sent"]
        loss = table(wanted[comm.rank]).sum()
        between = table.stats()["bytes_sent"]
        loss.backward()
        return between - before, table.stats()["bytes_sent"] - between

    for r, (pulled, pushed) in enumerate(rp.simulate(ranks, rank, timeout=60)):
        asked = sum(asks[r]) - asks[r][r]
        served = sum(asks[other][r] for other in range(ranks)) - asks[r][r]
        assert pulled == pytest.approx(8 * (ranks - 1) + 4 * asked + entry * DIM * served)
        assert pushed == pytest.approx(entry * DIM * asked)


def test_the_first_values_do_not_depend_on_ranks_or_partitions() -> None:
    def table(comm: rp.comm.Communicator, partitions: int | None = None, seed: int = 0) -> Tensor:
        return rp.ShardedEmbedding(70_000, 2, comm=comm, partitions=partitions, seed=seed).gathered()

    alone = rp.simulate(1, table)[0]
    for ranks, partitions in ((2, None), (3, 2), (2, 9)):
        for found in rp.simulate(ranks, lambda comm, p=partitions: table(comm, p)):
            assert torch.equal(found, alone)
    assert not torch.equal(alone, rp.simulate(1, lambda comm: table(comm, seed=1))[0])
    # 140,000 independent normal numbers: mean and variance within five standard errors.
    assert abs(float(alone.mean())) < 5 / 140_000**0.5
    assert abs(float(alone.var()) - 1) < 5 * (2 / 140_000) ** 0.5
    assert len(alone.flatten().unique()) > 139_000, "blocks are not drawn alike"


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    rp.simulate(2, lambda comm: sharded(comm)(torch.tensor([1])).sum().backward())
    assert torch.equal(before, torch.get_rng_state())


def test_16_bit_rows_are_the_rows_rounded_and_so_are_gradients() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm, values="bf16", dtype=torch.float32)
        everything = torch.arange(ROWS)
        full = table.gathered()
        rows = table(everything)
        assert torch.equal(rows.detach(), full.bfloat16().float())
        weights = torch.linspace(0.1, 3, ROWS * DIM).view(ROWS, DIM)
        (rows * weights).sum().backward()
        rounded = weights.bfloat16().float()
        rounded[3] = 0
        assert table.weight.grad is not None
        # Every rank sends the same: their sum in float32 over their number, to its rounding.
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(
            table.gather(table.weight.grad.to_dense()), rounded, rtol=4 * eps, atol=0, check_stride=False
        )

    rp.simulate(3, rank, timeout=60)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_tables_are_added_in_float32(dtype: torch.dtype, hierarchical: bool) -> None:
    """Terms that are lost one by one, a lookup repeated 257 times, and sums beyond what 16 bits hold."""
    small = 2 * torch.finfo(dtype).eps / 8

    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm, dtype=dtype, hierarchical=hierarchical)
        rows = table(torch.tensor([5] * 257 + [6, 7]))
        assert rows.dtype == dtype
        terms = torch.full((259,), 1 / 256, dtype=dtype)
        terms[257] = 1.0 if comm.rank == 0 else small
        terms[258] = 40_000.0
        (rows * terms[:, None]).sum().backward()
        assert table.weight.grad is not None
        grad = table.gather(table.weight.grad)
        assert grad.dtype == dtype
        expected = [257 / 256, (1 + (comm.size - 1) * small) / comm.size, 40_000.0]
        # Each rank's terms are exact in 16 bits; a node's sum is rounded once on its way.
        rtol = torch.finfo(dtype).eps if hierarchical else 0.0
        torch.testing.assert_close(grad[5:8, 0], torch.tensor(expected).to(dtype), rtol=rtol, atol=0.0)

    rp.simulate(5, rank, timeout=20, ranks_per_node=2)


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_rows_of_64_bits_come_to_all_ranks_of_a_node(values: str) -> None:
    """Those that do not own any took rows that had travelled in 16 bits for float64, and over MPI read them so."""

    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm, hierarchical=True, values=values, dtype=torch.float64)
        indices = torch.tensor([5 + comm.rank, 2, 4])
        expected = table.gathered()[indices]
        found = table(indices)
        assert found.dtype == torch.float64
        near = 0.0 if values == "fp32" else torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[values]).eps
        torch.testing.assert_close(found.detach(), expected, rtol=near, atol=0.0)
        found.sum().backward()
        assert table.weight.grad is not None
        assert table.gather(table.weight.grad)[4, 0] == 1.0

    rp.simulate(4, rank, timeout=60, ranks_per_node=2)


def test_tables_are_made_on_one_rank_while_another_looks_for_its_own() -> None:
    """Simulated ranks are threads; with some tens of tables they met "Set changed size during iteration"."""

    def rank(comm: rp.comm.Communicator) -> None:
        table, made = sharded(comm), []
        for _ in range(2000):
            assert embedding_of(table.weight) is table
            if comm.rank % 2:
                made.append(copy.deepcopy(table))

    rp.simulate(4, rank, timeout=60)


def test_op_sum() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm, average=False)
        table(torch.tensor([5, 5, 3])).sum().backward()
        assert table.weight.grad is not None
        grad = table.gather(table.weight.grad)
        expected = torch.zeros_like(grad)
        expected[5] = 2 * comm.size
        assert torch.equal(grad, expected)

    rp.simulate(3, rank, timeout=60)


def test_a_table_looked_up_twice_in_one_pass() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table, reference = sharded(comm), whole(comm)
        for module in (table, reference):
            (module(torch.tensor([1, 2])).sum() * module(torch.tensor([[2, 4]])).sum()).backward()
        assert table.weight.grad is not None
        assert reference.weight.grad is not None
        grad = table.gather(table.weight.grad)
        torch.testing.assert_close(grad, reference.weight.grad.to_dense(), rtol=0, atol=CLOSE)

    rp.simulate(2, rank, timeout=60)


# -- wrong indices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("wrong", [ROWS, -1, 2**40])
def test_an_index_out_of_range_is_an_index_error_on_all_ranks_and_nothing_was_sent(
    wrong: int, hierarchical: bool
) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm, hierarchical=hierarchical)
        with pytest.raises(IndexError, match=rf"^rank 1: index {wrong} is out of range: the table has rows 0 to 52$"):
            table(torch.tensor([0, wrong if comm.rank == 1 else 2]))
        assert table.stats()["pulled"] == 0
        assert table(torch.tensor([[0, 2]])).shape == (1, 2, DIM)  # all ranks are where they were

    rp.simulate(3, rank, timeout=60, ranks_per_node=2)


def test_indices_of_another_dtype_are_refused_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        with pytest.raises(rp.IndexRangeError, match="rank 0: indices to look up have to be int32 or int64, not float"):
            table(torch.ones(2) if comm.rank == 0 else torch.ones(2, dtype=torch.int32))
        with pytest.raises(rp.IndexRangeError, match=r"rank 1: .* have to be a tensor of int32 or int64, not list"):
            table([1, 2] if comm.rank == 1 else torch.ones(2, dtype=torch.int32))

    rp.simulate(2, rank, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "num_embeddings=0"),
        ((4, 0), {}, "embedding_dim=0"),
        ((4, 4, 4), {}, "padding_idx=4"),
        ((4, 4), {"partitions": 5}, "partitions=5"),
        ((4, 4), {"values": "fp31"}, "did you mean 'fp32'"),
        ((4, 4), {"average": 1}, "average=1"),
        ((4, 4), {"comm": 3}, "comm=3"),
        ((4, 4), {"seed": -1}, "seed=-1"),
        ((4, 4), {"dtype": torch.int64}, "dtype=torch.int64"),
        ((4, 4), {"dtype": "float32"}, "dtype=float32"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=message):
        rp.simulate(2, lambda comm: rp.ShardedEmbedding(*arguments, **{"comm": comm} | options))


def test_ranks_that_make_different_tables_hear_of_it() -> None:
    with pytest.raises(rp.RankMismatchError, match="ShardedEmbedding"):
        rp.simulate(2, lambda comm: rp.ShardedEmbedding(10 + comm.rank, 4, comm=comm))
    with pytest.raises(rp.RankMismatchError, match="average=False"):
        rp.simulate(2, lambda comm: rp.ShardedEmbedding(10, 4, comm=comm, average=comm.rank == 0))


def test_a_rank_whose_arguments_cannot_work_is_heard_of_by_all() -> None:
    def rank(comm: rp.comm.Communicator) -> str:
        with pytest.raises(rp.RingPruneError) as error:
            rp.ShardedEmbedding(10, 4, comm=comm, values="fp32" if comm.rank else "fp31")
        return str(error.value)

    first, second = rp.simulate(2, rank, timeout=20)
    assert "did you mean" in first
    assert first in second


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.ones(4), r"not a tensor of shape \[4\]"),
        ([[1.0]], "not list"),
        (torch.ones(4, 3).int(), "dtype=torch.int32"),
    ],
)
def test_what_is_no_table_on_one_rank_is_heard_of_by_all(rows: Any, said: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ConfigurationError if comm.rank else rp.RankMismatchError, match=said):
            rp.ShardedEmbedding.from_pretrained(rows if comm.rank else torch.ones(4, 3), comm=comm)

    rp.simulate(2, rank, timeout=20)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_sizes_may_be_numbers_of_numpy() -> None:
    """They come from data, as ids.max() + 1: "num_embeddings=np.int64(9): a whole number of at least 1" was said."""

    def rank(comm: rp.comm.Communicator) -> torch.Size:
        sizes: Any = np.int64(9), np.int32(2), np.int64(-1)
        table = rp.ShardedEmbedding(*sizes, comm=comm)
        assert repr(table).startswith("ShardedEmbedding(9, 2, padding_idx=8,")
        options: Any = {"comm": comm, "repetitions": 1}
        assert rp.search_partitions(np.int64(1), np.int64(2), torch.tensor([0]), **options).best == 1
        return table.gathered().shape

    assert rp.simulate(2, rank, timeout=60) == [(9, 2)] * 2


def test_a_checkpoint_serves_any_number_of_ranks() -> None:
    def steps(comm: rp.comm.Communicator, saved: Any, begin: int, end: int) -> Any:
        model = Words(sharded(comm))
        optimizer = rp.DistributedOptimizer(
            torch.optim.Adagrad(model.parameters(), lr=0.1), model.named_parameters(), policy="dense", comm=comm
        )
        if saved is not None:
            kept = copy.deepcopy(saved)  # these ranks are threads, and torch takes a checkpoint's tensors as they are
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        for step in range(begin, end):
            # The same batches, whoever has them; sums, so that their average times the number of ranks is theirs all.
            parts = [lookups(number, step) for number in range(4)][comm.rank :: comm.size]
            losses = [model(part).sum() for part in (*parts, *[parts[0][:0]] * (4 - len(parts)))]
            (comm.size * sum(losses, torch.zeros(()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        return model.state_dict(), optimizer.state_dict()

    alone = rp.simulate(1, lambda comm: steps(comm, None, 0, 6))[0]
    saved: Any = None
    for (begin, end), ranks in zip(pairwise((0, 2, 4, 6)), (3, 1, 4), strict=True):
        saved = rp.simulate(ranks, lambda comm, s=saved, a=begin, b=end: steps(comm, s, a, b))[0]
    for key, tensor in alone[0].items():
        torch.testing.assert_close(saved[0][key], tensor, rtol=0, atol=CLOSE)
    assert saved[1]["state"][0]["sum"].shape == (ROWS, DIM)


class ByRow(torch.optim.Optimizer):
    """Adagrad with one number for each row, which also keeps one for each column."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Steps on the rows that have come."""
        for param in (param for group in self.param_groups for param in group["params"]):
            grad = param.grad.coalesce()
            state = self.state[param]
            if not state:
                state |= {"sum": param.new_zeros(len(param)), "columns": param.new_ones(1, param.shape[1])}
            rows, values = grad.indices()[0], grad.values()
            state["sum"][rows] += values.square().mean(1)
            param[rows] -= self.param_groups[0]["lr"] * values / (state["sum"][rows].sqrt() + 1e-8)[:, None]


def test_state_of_one_number_for_each_row_serves_any_number_of_ranks() -> None:
    """It was saved as each rank's own: another number of ranks went on with that of other rows, or with too few."""

    def steps(comm: rp.comm.Communicator, saved: Any, begin: int, end: int) -> Any:
        table = sharded(comm, average=False)
        optimizer = rp.DistributedOptimizer(ByRow(table.parameters()), policy="dense", comm=comm, op="sum")
        if saved is not None:
            table.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for step in range(begin, end):
            optimizer.zero_grad()
            own = torch.cat([lookups(rank, step) for rank in range(4)]).tensor_split(comm.size)[comm.rank]
            table(own).square().sum().backward()
            optimizer.step()
        return table.state_dict(), copy.deepcopy(optimizer.state_dict())

    whole = rp.simulate(1, lambda comm: steps(comm, None, 0, 6))[0]
    saved: Any = None
    for (begin, end), ranks in zip(pairwise((0, 2, 4, 6)), (3, 1, 4), strict=True):
        saved = rp.simulate(ranks, lambda comm, s=saved, a=begin, b=end: steps(comm, s, a, b))[0]
    torch.testing.assert_close(saved[0]["weight"], whole[0]["weight"], rtol=0, atol=CLOSE)
    assert saved[1]["state"][0]["sum"].shape == (ROWS,)


def test_numbers_for_the_columns_are_no_table_where_a_rank_has_one_row() -> None:
    """It took them for its table, and all ranks saved a table of zeros and of that row in their place."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        table = rp.ShardedEmbedding(3, DIM, comm=comm)  # two rows and one
        optimizer = rp.DistributedOptimizer(ByRow(table.parameters()), policy="dense", comm=comm)
        table(torch.arange(3)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        assert state["sum"].shape == (3,)
        return state["columns"]

    for columns in rp.simulate(2, rank, timeout=20):
        assert torch.equal(columns, torch.ones(1, DIM))


@pytest.mark.parametrize(
    "make",
    [
        SPARSE["momentum"],
        SPARSE["sparse_adam"],
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    ],
    ids=["momentum", "sparse_adam", "nesterov"],
)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_run_that_goes_on_ends_where_one_that_did_not_stop_does(hierarchical: bool, make: Any) -> None:
    """SGD's momentum of rows is sparse: it once came back dense, to which Nesterov's adds nothing sparse."""

    def rank(comm: rp.comm.Communicator) -> None:
        results = []
        for stop in (False, True):
            table = sharded(comm, hierarchical=hierarchical)
            optimizer = rp.DistributedOptimizer(make(table.parameters()), policy="dense", comm=comm)
            for step in range(STEPS):
                if stop and step == 3:
                    saved = copy.deepcopy((table.state_dict(), optimizer.state_dict()))
                    optimizer.close()
                    table = sharded(comm, seed=1, hierarchical=hierarchical)
                    optimizer = rp.DistributedOptimizer(make(table.parameters()), policy="dense", comm=comm)
                    table.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                table(lookups(comm.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(table.gathered())
        assert torch.equal(*results)

    rp.simulate(3, rank, timeout=20, ranks_per_node=2 if hierarchical else None)


@pytest.mark.parametrize("make", SPARSE)
def test_a_checkpoint_of_plain_training_goes_on_with_a_sharded_table(make: str) -> None:
    """The optimizer's state was left that of the whole table: torch could not add, in the first step."""

    def steps(table: Any, optimizer: Any, comm: rp.comm.Communicator, begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.zero_grad()
            rows = torch.cat([lookups(rank, step) for rank in range(comm.size)])  # the same on all ranks
            table(rows).square().sum().backward()
            optimizer.step()

    def rank(comm: rp.comm.Communicator) -> None:
        plain = whole(comm)
        trained = SPARSE[make](plain.parameters())
        steps(plain, trained, comm, 0, 3)
        table = sharded(comm, seed=1, partitions=2)
        table.load_state_dict(plain.state_dict())
        inner = SPARSE[make](table.parameters())
        inner.load_state_dict(copy.deepcopy(trained.state_dict()))
        optimizer = rp.DistributedOptimizer(inner, table.named_parameters(), policy="dense", comm=comm)
        steps(plain, trained, comm, 3, STEPS)
        steps(table, optimizer, comm, 3, STEPS)
        torch.testing.assert_close(table.gathered(), plain.weight.detach(), rtol=1e-12, atol=1e-12)

    rp.simulate(3, rank, timeout=60)


def test_what_a_class_made_of_it_has_besides_is_saved_too() -> None:
    """Parameters and buffers of such a class were left out in silence, and those of its modules were unexpected."""

    class Scaled(rp.ShardedEmbedding):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.norm = nn.LayerNorm(DIM)
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(1))

    def rank(comm: rp.comm.Communicator) -> None:
        a, b = (Scaled(ROWS, DIM, comm=comm, seed=seed) for seed in (0, 1))
        with torch.no_grad():
            a.scale.fill_(2.0)
            a.norm.weight.fill_(3.0)
            a.seen.fill_(4.0)
        saved = a.state_dict()
        assert saved["weight"].shape == (ROWS, DIM)
        b.load_state_dict(saved)
        assert torch.equal(a.weight, b.weight)
        assert (b.scale.item(), b.norm.weight[0].item(), b.seen.item()) == (2.0, 3.0, 4.0)
        with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
            b.load_state_dict({name: tensor for name, tensor in saved.items() if name != "scale"})

    rp.simulate(3, rank)


def test_tables_that_do_not_fit_are_refused() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        with pytest.raises(RuntimeError, match=r"shape \[2, 2\] in the checkpoint, the table here \[53, 6\]"):
            table.load_state_dict({"weight": torch.zeros(2, 2)})
        with pytest.raises(RuntimeError, match="Missing key"):
            table.load_state_dict({})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            table.load_state_dict({"weight": torch.zeros(ROWS, DIM), "more": torch.zeros(1)})

    rp.simulate(2, rank)


def test_pretrained_rows_are_those_given_and_frozen() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        given_rows = torch.arange(12.0).view(4, 3)
        table = rp.ShardedEmbedding.from_pretrained(given_rows, comm=comm)
        assert not table.weight.requires_grad
        assert torch.equal(table(torch.tensor([2, 0])), given_rows[[2, 0]])
        assert torch.equal(table.gathered(), given_rows)

    rp.simulate(3, rank)


def test_a_copy_looks_up_the_same_rows_and_a_pickle_is_refused() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        other = copy.deepcopy(table)
        with torch.no_grad():
            other.weight.add_(1)
        assert torch.equal(other.gathered(), table.gathered() + 1)
        model = Words(other)
        rp.DistributedOptimizer(SPARSE["sgd"](model.parameters()), model.named_parameters(), policy="dense", comm=comm)
        with pytest.raises(rp.ConfigurationError, match=r"cannot be pickled.*state_dict"):
            pickle.dumps(table)

    rp.simulate(2, rank)


# -- in the wrapper -------------------------------------------------------------------------------------------------


def wrapped(comm: rp.comm.Communicator, **options: Any) -> tuple[Words, rp.DistributedOptimizer]:
    model = Words(sharded(comm))
    given_options = {"policy": "dense", "make": SPARSE["sgd"]} | options
    make = given_options.pop("make")
    return model, rp.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), comm=comm, **given_options
    )


def test_a_row_that_is_not_finite_is_everybodys() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm)
        before = model.table.gathered()
        factor = torch.tensor(float("nan") if comm.rank == 2 else 1.0)
        (model.table(torch.tensor([4])).sum() * factor + model(torch.tensor([5])).sum()).backward()
        with pytest.raises(rp.NonFiniteGradientError, match=r"gradient of rows of 'table\.weight' has 6 entries"):
            optimizer.step()
        assert torch.equal(before, model.table.gathered())

    rp.simulate(3, rank, timeout=60)


def test_a_scaler_unscales_rows_and_an_overflow_skips_them_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model, optimizer = wrapped(comm, scaler=scaler)
        other, plain = wrapped(comm)
        for m, o, scale in ((model, optimizer, scaler.scale), (other, plain, lambda loss: loss)):
            scale(m(lookups(comm.rank, 0)).sum()).backward()
            scaler.step(o) if o is optimizer else o.step()
            o.zero_grad()
        scaler.update()
        torch.testing.assert_close(model.table.weight, other.table.weight, rtol=0, atol=CLOSE)
        before = model.table.gathered()
        scaler.scale(model(lookups(comm.rank, 1)).sum() * (float("inf") if comm.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.table.gathered())
        assert optimizer.stats()["skipped_steps"] == 1

    rp.simulate(2, rank, timeout=60)


def test_several_backward_passes_per_step_add_up() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm, backward_passes_per_step=2)
        other, plain = wrapped(comm)
        for step in (0, 1):
            model(lookups(comm.rank, step)).sum().backward()
        (other(lookups(comm.rank, 0)).sum() + other(lookups(comm.rank, 1)).sum()).backward()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(model.table.weight, other.table.weight, rtol=0, atol=CLOSE)

    rp.simulate(2, rank, timeout=60)


@pytest.mark.parametrize("explicitly", [False, True])
def test_only_tables_in_the_wrapper(explicitly: bool) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table, reference = sharded(comm), sharded(comm)
        optimizer = rp.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1), comm=comm)
        plain = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
        for module, stepper in ((table, optimizer), (reference, plain)):
            module(lookups(comm.rank, 0)).sum().backward()
            if explicitly and stepper is optimizer:
                optimizer.synchronize()
            stepper.step()
        assert torch.equal(table.weight, reference.weight)

    rp.simulate(3, rank, timeout=60)


def test_a_rank_may_be_in_its_first_step_where_another_pushes() -> None:
    """A rank without a batch has no gradient of the layer: the other's first bucket once waited for it in backward."""

    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm)
        for step in range(3):
            if comm.rank == 1:
                model.table(torch.empty(0, dtype=torch.int64)).sum().backward()
            else:
                model(lookups(comm.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rp.simulate(2, rank, timeout=20)


def test_only_tables_are_judged_as_everything_is() -> None:
    """Their gradients once did not count as a backward pass: NaN went into the table without a word."""

    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        optimizer = rp.DistributedOptimizer(SPARSE["sgd"](table.parameters()), policy="dense", comm=comm)
        table(torch.tensor([4])).sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        before = table.gathered()
        (table(torch.tensor([4])).sum() * (float("nan") if comm.rank else 1.0)).backward()
        with pytest.raises(rp.NonFiniteGradientError):
            optimizer.step()
        assert torch.equal(before, table.gathered())
        optimizer.zero_grad()
        with pytest.raises(rp.UsageError, match=r"step\(\) or synchronize\(\) before backward"):
            optimizer.step()

    rp.simulate(2, rank, timeout=20)


@pytest.mark.parametrize("both", [True, False])
def test_scales_stay_alike_whoever_owns_the_row_that_overflowed(both: bool) -> None:
    """With only tables in the wrapper, or beside others: two ranks once went on with different loss scales."""

    def rank(comm: rp.comm.Communicator) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = Words(sharded(comm))
        params = model.parameters() if both else model.table.parameters()
        optimizer = rp.DistributedOptimizer(SPARSE["sgd"](params), comm=comm, policy="dense", scaler=scaler)
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(model.table(torch.tensor([0])).sum() * factor).backward()  # row 0 is rank 0's
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.stats()["skipped_steps"] == 1
        return scaler.get_scale()

    assert rp.simulate(3, rank, timeout=20) == [4.0] * 3


def test_local_steps_with_only_tables() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table, other = sharded(comm), sharded(comm)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SparseAdam(table.parameters(), lr=0.1), comm=comm, policy=rp.Dense(local_steps=2)
        )
        plain = torch.optim.SparseAdam(other.parameters(), lr=0.1)
        for step in range(4):
            for module, stepper in ((table, optimizer), (other, plain)):
                module(lookups(comm.rank, step)).sum().backward()
                stepper.step()
                stepper.zero_grad()
        assert torch.equal(table.weight, other.weight)

    rp.simulate(2, rank, timeout=20)


@pytest.mark.parametrize(
    ("options", "table", "message"),
    [
        (
            {"policy": rp.Dense(local_steps=2), "scaler": torch.amp.GradScaler("cpu")},
            {},
            "ranks scale their losses by themselves",
        ),
        (
            {"make": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)},
            {},
            r"SGD with weight_decay=0.1 has 1 tables",
        ),
        ({"make": torch.optim.AdamW}, {}, r"AdamW takes no sparse gradients; 'table\.weight'.*SparseAdam"),
        ({"op": "sum"}, {}, r"the wrapper sums gradients.*'table\.weight' does not"),
        ({}, {"average": False}, r"the wrapper averages gradients.*'table\.weight' does not"),
    ],
)
def test_what_would_train_something_else_is_refused(options: Any, table: Any, message: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm, **table))
        given_options = {"policy": "dense", "comm": comm, "make": SPARSE["sgd"]} | options
        make = given_options.pop("make")
        with pytest.raises(rp.ConfigurationError, match=message):
            rp.DistributedOptimizer(
                make(model.parameters()),
                model.named_parameters(),
                **given_options,
            )

    rp.simulate(2, rank, timeout=20)


def test_local_steps_decay_tables() -> None:
    """A rank's own rows get dense gradients then."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer = rp.DistributedOptimizer(sgd, model.named_parameters(), policy=rp.Dense(local_steps=2), comm=comm)
        before = model.table.weight.detach().clone()
        for step in range(2):
            model(lookups(comm.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = (model.table.weight != before).any(1) | (before == 0).all(1)
        assert bool(moved.all()), "rows that nobody looked up decay as well"

    rp.simulate(2, rank, timeout=20)


def test_a_gradient_that_a_term_of_the_loss_made_dense() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm)
        (model(lookups(comm.rank, 0)).sum() + model.table.weight.square().sum()).backward()
        optimizer.step()

    rp.simulate(2, rank, timeout=20)


def test_a_weight_that_was_replaced_is_still_this_ranks_own() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        table.weight = nn.Parameter(table.weight.detach().clone())
        before = table.gathered()
        rp.broadcast_parameters(list(table.named_parameters()), 0, comm=comm)
        assert torch.equal(before, table.gathered())

    rp.simulate(2, rank)


def test_a_table_that_was_closed_says_so() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        table = sharded(comm)
        table.close()
        with pytest.raises(rp.UsageError, match="closed"):
            table(torch.tensor([1]))

    rp.simulate(2, rank)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile itself reads it
def test_in_a_compiled_model_a_table_looks_up_as_it_is() -> None:
    """torch.compile went into its messages, and failed on those of MPI."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        expected = model(lookups(0, 0))
        found = torch.compile(model, backend=keep)(lookups(0, 0))
        assert torch.equal(found, expected)
        found.sum().backward()
        assert model.table.weight.grad is not None

    rp.simulate(1, rank, timeout=60)
    assert len(graphs) == 1, "the layer behind it"


def test_a_schedule_with_a_sharded_embedding_is_refused_with_the_reason() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        with pytest.raises(rp.ConfigurationError, match=r"a ShardedEmbedding cannot go with.*pulls rows"):
            rp.DistributedOptimizer(
                SPARSE["sgd"](model.parameters()), model.named_parameters(), policy="p3", comm=comm, model=model
            )

    rp.simulate(2, rank)


def test_nor_does_it_go_with_one_that_another_optimizer_steps_on() -> None:
    """A rank without a batch waited in its push for another one, which waited in backward for that rank's exchange."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        with pytest.raises(rp.ConfigurationError, match=r"a ShardedEmbedding cannot go with.*pulls rows"):
            rp.DistributedOptimizer(SPARSE["sgd"](model.layer.parameters()), policy="p3", comm=comm, model=model)
        # Where the table is told nowhere, the first exchange waits for the end of the backward pass all the same.
        optimizer = rp.DistributedOptimizer(
            SPARSE["sgd"](model.layer.parameters()), policy="p3", comm=comm, model=model.layer
        )
        if comm.rank == 1:
            model.table(torch.empty(0, dtype=torch.int64)).sum().backward()
        else:
            model(lookups(comm.rank, 0)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.close()

    rp.simulate(2, rank, timeout=20)


def test_broadcast_parameters_leaves_each_rank_its_rows() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = Words(sharded(comm))
        before = model.table.gathered()
        with torch.no_grad():
            model.layer.weight.add_(comm.rank)
        rp.broadcast_parameters(list(model.named_parameters()), 0, comm=comm)
        assert torch.equal(before, model.table.gathered())
        assert torch.equal(model.layer.weight, Words(nn.Identity()).layer.weight)

    rp.simulate(3, rank)


def test_ranks_may_be_anywhere_in_the_exchange_when_a_table_is_pushed_to() -> None:
    """Pulls and pushes once shared the exchange's communicator, where they would have met its messages."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.ModuleDict({"words": Words(sharded(comm)), "more": nn.Linear(64, 64)})
        with torch.no_grad():
            for param in model["more"].parameters():
                param.fill_(0.01)
        optimizer = rp.DistributedOptimizer(
            SPARSE["sgd"](model.parameters()),
            model.named_parameters(),
            policy=replace(rp.IWP(0.1), roots=rp.IWP(0.1, roots="all").roots),
            comm=comm,
            bucket_bytes=1024,
        )
        for step in range(8):
            hidden = model["more"](torch.full((2, 64), 1.0 + comm.rank))
            (model["words"](lookups(comm.rank, step)).sum() + hidden.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([param.detach().flatten() for param in model["more"].parameters()])

    first, *others = rp.simulate(4, rank, timeout=60)
    assert all(torch.equal(first, other) for other in others)
