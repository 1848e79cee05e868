"""What the reductions have to do, on every rank of simulated groups and of real jobs: ``CHECKS`` lists it by name.

Tolerances: each of P-1 additions in float32 rounds by at most 2^-24 of a partial sum, and no partial sum exceeds the
sum of the magnitudes, what coding adds to them included.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm import Communicator
from ringprune.comm.communicator import Handle
from ringprune.reduction import GatheredRows, OwnedRows, RowSets
from ringprune.reduction.balanced import BalancedReduction
from ringprune.reduction.choice import choose_ring
from ringprune.reduction.coded import CodedReduction
from ringprune.reduction.dealt import Dealing, dealing
from ringprune.reduction.reduction import LibraryReduction
from ringprune.reduction.ring import CHUNK_VALUES, RingReduction, chunk_counts
from ringprune.reduction.sparse import GatheredReduction, SparseReduction, region_begins
from ringprune.wire.pairs import pair_code
from ringprune.wire.values import VALUE_FORMATS, ValueCode, value_code

Check = Callable[[Communicator], None]
CHECKS: dict[str, Check] = {}

Contribution = tuple[Tensor, Tensor]


def check(each: Check) -> Check:
    """Add a check to the suite."""
    CHECKS[each.__name__] = each
    return each


def noise(rank: int, numel: int) -> Tensor:
    """Random float32 values that every rank can compute for every other."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


def entries(rank: int, numel: int, density: float) -> Contribution:
    """Random indices and values; three decimals in the values make sums that cancel."""
    generator = torch.Generator().manual_seed(2000 + rank)
    indices = torch.nonzero(torch.rand(numel, generator=generator) < density).flatten().int()
    return indices, (torch.randn(indices.numel(), generator=generator) * 4).round() / 4


def everybodys(comm: Communicator, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, bit for bit; all are equally long."""
    return list(comm.allgather(tensor, name="everybody's").wait().view(comm.size, *tensor.shape))


def assert_same_bytes_everywhere(comm: Communicator, tensor: Tensor) -> None:
    """All ranks have the same bits."""
    numel = torch.tensor([tensor.numel()])
    assert everybodys(comm, numel) == [numel] * comm.size
    bits = tensor.view(torch.int32)
    assert all(torch.equal(other, bits) for other in everybodys(comm, bits))


def assert_conserved(comm: Communicator, name: str, numel: int) -> None:
    """Contributions = result + what all ranks dropped; everywhere the same result; bytes as the formula says."""
    code, own = value_code(name), noise(comm.rank, numel)
    before = comm.traffic.bytes_sent
    ring = RingReduction(comm, own.clone(), code, name=f"ring of {numel} {name}")
    result = ring.wait()
    counts = chunk_counts(numel, comm.size)
    hop = sum(4 * count if code is None else code.size(count) for count in counts)
    assert round(comm.traffic.bytes_sent - before) == 2 * (comm.size - 1) * hop
    assert_same_bytes_everywhere(comm, result)
    assert (ring.rest is None) == (code is None)
    rest = torch.zeros(numel) if ring.rest is None else ring.rest
    rests = torch.stack(everybodys(comm, rest)).double()
    given = torch.stack([noise(rank, numel) for rank in range(comm.size)]).double()
    # What was dropped before an addition is missing from its partial sum.
    largest = given.abs().sum(0) + rests.abs().sum(0)
    error = (given.sum(0) - result.double() - rests.sum(0)).abs()
    assert bool((error <= (comm.size - 1) * 2**-24 * largest).all())


@check
def a_ring_sums_any_number_of_values(comm: Communicator) -> None:
    for numel in (0, 1, 2, 3, 5, 1000, 1024, 4099):
        assert_conserved(comm, "fp32", numel)


@check
def a_coded_ring_hands_back_what_it_drops(comm: Communicator) -> None:
    for name in VALUE_FORMATS:
        for numel in (0, 1, 3, 257, 4099):
            assert_conserved(comm, name, numel)


@check
def a_long_ring_travels_in_chunks(comm: Communicator) -> None:
    numel = 2 * comm.size * CHUNK_VALUES + 5
    assert len(chunk_counts(numel, comm.size)) == 3
    for name in ("fp32", "int8"):
        assert_conserved(comm, name, numel)


@check
def rings_under_way_together_do_not_cross(comm: Communicator) -> None:
    """Long, short, coded and empty, all started first; a sum of the library's in between."""
    cases = [("fp32", 2 * comm.size * CHUNK_VALUES), ("int8", 3), ("bf16", 5000), ("fp32", 0), ("int4", 700)]
    alone = [
        RingReduction(comm, noise(comm.rank, n), value_code(name), name=f"alone {i}").wait()
        for i, (name, n) in enumerate(cases)
    ]
    rings = [
        RingReduction(comm, noise(comm.rank, n), value_code(name), name=f"ring {i}")
        for i, (name, n) in enumerate(cases)
    ]
    summed = comm.allreduce(torch.ones(1), name="in between")
    rings[0].drain()
    for ring, expected in zip(rings[1:], alone[1:], strict=True):
        assert torch.equal(ring.wait(), expected)
    assert summed.wait().item() == comm.size


@check
def sparse_sums_are_those_of_a_dictionary(comm: Communicator) -> None:
    for numel in (0, 1, 5, 1000):
        for density in (0.0, 0.01, 0.3, 0.6, 1.0):
            given = [entries(rank, numel, density) for rank in range(comm.size)]
            assert_sums(comm, given, numel)


@check
def sparse_sums_under_way_together_do_not_cross(comm: Communicator) -> None:
    given = [
        [entries(10 * i + rank, 500, density) for rank in range(comm.size)] for i, density in enumerate((0.1, 0.9))
    ]
    kinds = (SparseReduction, GatheredReduction)
    sums = [
        kind(comm, *each[comm.rank], 500, name=f"{kind.__name__} {i}") for i, each in enumerate(given) for kind in kinds
    ]
    sums[0].drain()
    results = [each.wait() for each in sums[1:]]
    for result, each in zip(results, (given[0], given[1], given[1]), strict=True):
        assert_entries(result, reference(each))


@check
def balanced_sums_are_the_largest_of_a_dictionary(comm: Communicator) -> None:
    for numel in (1, 5, 1000):
        for density in (0.0, 0.01, 0.3, 1.0):
            given = [entries(rank, numel, density) for rank in range(comm.size)]
            for total in {0, 1, numel // 10, numel // 2}:
                assert_largest(comm, given, numel, total, "fp32")


@check
def balanced_sums_in_fewer_bits_lose_nothing(comm: Communicator) -> None:
    for name in VALUE_FORMATS:
        given = [entries(rank, 2000, 0.2) for rank in range(comm.size)]
        assert_largest(comm, given, 2000, 300, name)


@check
def an_abandoned_sum_leaves_nobody_waiting(comm: Communicator) -> None:
    """Wherever it is abandoned all that was started has been waited for, and other messages come through."""
    watched = Watched(comm)
    for name, start in SUMS.items():
        for stops in count(1):
            drains = list(islice(start(watched), stops))
            drains[-1]()
            assert not watched.under_way, (name, stops)
            assert comm.allreduce(torch.ones(1), name="afterwards").wait().item() == comm.size
            if len(drains) < stops:
                break


@check
def the_choice_is_the_same_everywhere(comm: Communicator) -> None:
    choice = choose_ring(comm, 1 << 20)
    assert_same_bytes_everywhere(comm, torch.tensor([choice.from_bytes]))
    assert len(choice.reason.splitlines()) == 1


class Watched:
    """A communicator that knows which of its messages have not been waited for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.under_way = comm, set[str]()

    def __getattr__(self, attribute: str) -> Any:
        method = getattr(self._comm, attribute)
        if attribute not in ("allreduce", "allgather", "alltoall", "shift"):
            return method

        def start(*tensors: Tensor, name: str, **sizes: Any) -> Handle:
            self.under_way.add(name)
            return Watching(method(*tensors, name=name, **sizes), self.under_way, name)

        return start


@dataclass
class Watching:
    """A message under way, which stands in a set until it is waited for."""

    handle: Handle
    under_way: set[str]
    name: str

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> Tensor:
        self.under_way.discard(self.name)
        return self.handle.wait()


Stops = Iterable[Callable[[], None]]
"""How a sum is abandoned, at each point where it may be."""


def advanced(reduction: Any) -> Iterator[Callable[[], None]]:
    """After any number of messages."""
    yield reduction.drain
    while reduction.unfinished:
        reduction.advance()
        yield reduction.drain


def rows_of(comm: Communicator) -> tuple[Tensor, list[int]]:
    """This rank's rows of a table of 40, and how many every rank has."""
    return torch.arange(0, 40, comm.rank + 1), [len(range(0, 40, rank + 1)) for rank in range(comm.size)]


def row_sets(comm: Communicator) -> Stops:
    """At once: there is one message."""
    rows, counts = rows_of(comm)
    return [RowSets(comm, rows, counts, [40] * comm.size, name="row sets").drain]


def gathered_rows(comm: Communicator) -> Stops:
    """At once too."""
    rows, counts = rows_of(comm)
    return [GatheredRows(comm, torch.ones(len(rows), 2), counts, None, name="gathered rows").drain]


def owned_rows(comm: Communicator) -> Stops:
    """Once all messages were started."""
    rows = rows_of(comm)[0]
    owned = OwnedRows(comm, rows, torch.ones(len(rows), 2), 40, None, name="owned rows")
    for send in (owned.push_sets, owned.push_values, owned.tell, owned.gather_sets, owned.gather_values):
        send()
    return [owned.drain]


def balanced(comm: Communicator) -> Stops:
    """After any number of messages."""
    dealt = dealing(500, 50, comm.size)
    code = pair_code(dealt.expected, dealt.groups)
    own = entries(comm.rank, 500, 0.3)
    return advanced(BalancedReduction(comm, *own, dealing=dealt, judge=largest, code=code, name="balanced"))


SUMS: dict[str, Callable[[Any], Stops]] = {
    "library": lambda comm: advanced(LibraryReduction(comm, noise(comm.rank, 300), name="library")),
    "ring": lambda comm: advanced(RingReduction(comm, noise(comm.rank, 300), value_code("int4"), name="ring")),
    "coded": lambda comm: advanced(CodedReduction(comm, noise(comm.rank, 300), ValueCode("int8"), name="coded")),
    "gathered": lambda comm: advanced(GatheredReduction(comm, *entries(comm.rank, 500, 0.3), 500, name="gathered")),
    "sparse": lambda comm: advanced(SparseReduction(comm, *entries(comm.rank, 500, 0.3), 500, name="sparse")),
    "balanced": balanced,
    "row sets": row_sets,
    "gathered rows": gathered_rows,
    "owned rows": owned_rows,
}


def largest(indices: Tensor, sums: Tensor, count: int) -> Tensor:
    """The places of the ``count`` largest sums."""
    kept = ops.select(sums.abs(), [0, sums.numel()], [min(count, sums.numel())])
    return kept[kept != ops.PAD]


def assert_largest(comm: Communicator, given: list[Contribution], numel: int, total: int, name: str) -> None:
    """The same largest sums everywhere, in the bytes of the formula; and nothing is lost."""
    own, size = given[comm.rank], comm.size
    dealt = dealing(numel, total, size, turn=3)
    code = pair_code(dealt.expected, dealt.groups, values=name)
    before = comm.traffic.bytes_sent
    reduction = BalancedReduction(comm, *own, dealing=dealt, judge=largest, code=code, name="largest")
    indices, sums = reduction.wait()
    sent = comm.traffic.bytes_sent - before
    assert indices.dtype == torch.int32 and sums.dtype == torch.float32 and len(indices) == total
    assert bool((indices.diff() > 0).all()) and bool(((indices >= 0) & (indices < numel)).all())
    assert_same_bytes_everywhere(comm, indices)
    assert_same_bytes_everywhere(comm, sums)
    pieces = sum(code.size(len(mine)) for other, mine in enumerate(dealt.deal(own[0].numpy())) if other != comm.rank)
    assert round(size * sent) == size * (4 * (size - 1) + pieces) + (size - 1) * sum(map(code.size, dealt.shares))
    assert_all_there(comm, given, reduction, indices, sums)
    if name == "fp32":
        assert_shares_of_the_largest(given, dealt, dict(zip(indices.tolist(), sums.tolist(), strict=True)))


def assert_all_there(
    comm: Communicator, given: list[Contribution], reduction: BalancedReduction, indices: Tensor, sums: Tensor
) -> None:
    """What was kept is the ranks' values but for what they dropped."""
    numel = 1 + max([int(each[0].max()) for each in given if len(each[0])] + indices.tolist(), default=0)
    whole = torch.stack([torch.zeros(numel).index_put((each[0].long(),), each[1]) for each in given]).double()
    rests = torch.zeros(numel).index_put((given[comm.rank][0].long(),), reduction.rest)
    rests.index_add_(0, reduction.own_indices.long(), reduction.own_rest)
    dropped = torch.stack(everybodys(comm, rests)).double()
    error = ((whole - dropped).sum(0)[indices.long()] - sums.double()).abs()
    magnitude = (whole.abs() + dropped.abs()).sum(0)[indices.long()]
    assert bool((error <= (comm.size + 1) * 2**-24 * magnitude).all())


def assert_shares_of_the_largest(given: list[Contribution], dealt: Dealing, kept: dict[int, float]) -> None:
    """Exact sums; of what is dealt to each rank its share, the largest of them."""
    expected = reference(given)
    assert kept == {index: expected.get(index, 0.0) for index in kept}
    for share, entries_of in zip(dealt.shares, dealt.deal(np.arange(dealt.numel, dtype=np.int32)), strict=True):
        mine = set(entries_of.tolist())
        ranked = sorted((i for i in mine if expected.get(i)), key=lambda i: (-abs(expected[i]), i))
        assert len(mine & kept.keys()) == share and set(ranked[:share]) <= kept.keys()


def reference(given: list[Contribution]) -> dict[int, float]:
    """The sums, added in float32 in rank order."""
    sums: dict[int, float] = {}
    for indices, values in given:
        for index, value in zip(indices.tolist(), values, strict=True):
            sums[index] = float(torch.tensor(sums.get(index, 0.0)) + value)
    return sums


def assert_entries(result: Contribution, expected: dict[int, float]) -> None:
    """Exactly these, in order."""
    indices, values = result
    assert (indices.dtype, values.dtype) == (torch.int32, torch.float32)
    assert indices.tolist() == sorted(expected)
    assert values.tolist() == [expected[index] for index in sorted(expected)]


def assert_sums(comm: Communicator, given: list[Contribution], numel: int) -> None:
    """Both ways of summing give the reference; the bytes are those of the formulas in docs/wire-format.md."""
    own, size, rank = given[comm.rank], comm.size, comm.rank
    expected = reference(given)
    begins = region_begins(numel, size)
    lengths = [end - begin for begin, end in pairwise(begins)]

    def words(indices: list[int], region: int) -> int:
        count = sum(begins[region] <= index < begins[region + 1] for index in indices)
        return min(2 * count, lengths[region])

    before = comm.traffic.bytes_sent
    result = SparseReduction(comm, *own, numel, name="sparse").wait()
    sent = comm.traffic.bytes_sent - before
    assert_entries(result, expected)
    assert_same_bytes_everywhere(comm, result[0])
    assert_same_bytes_everywhere(comm, result[1])
    pieces = sum(words(own[0].tolist(), region) for region in range(size) if region != rank)
    sums = sum(words(list(expected), region) for region in range(size))
    wanted = 4 * (size - 1) * size + 4 * pieces + 4 * (size - 1) + (size - 1) / size * 4 * sums
    assert round(size * sent) == round(size * wanted)

    before = comm.traffic.bytes_sent
    result = GatheredReduction(comm, *own, numel, name="gathered").wait()
    sent = comm.traffic.bytes_sent - before
    assert_entries(result, expected)
    wanted = 4 * (size - 1) + (size - 1) / size * 8 * sum(indices.numel() for indices, _ in given)
    assert round(size * sent) == round(size * wanted)
