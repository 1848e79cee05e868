"""Which tensors travel packed, dense or as rows; when a packed one is cheaper sent whole, and which way rows go."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ringprune.plan import ParamSpec, Plan, build_plan
from ringprune.row_sets import set_words
from ringprune.validation import one_of, whole_number

__all__ = [
    "WAYS",
    "AllDense",
    "LargeMatrices",
    "Named",
    "Routing",
    "Rows",
    "cheapest",
    "expected_union",
    "plan_of",
    "sent_whole",
    "way_costs",
]

PACKED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AllDense:
    """Everything travels dense."""

    def packed(self, spec: ParamSpec) -> bool:
        """Whether the parameter travels packed: never."""
        return False


@dataclass(frozen=True)
class LargeMatrices:
    """Tensors of at least two dimensions and ``min_numel`` entries travel packed, the rest dense.

    One-dimensional tensors (biases, norms) are few bytes and often start at zero, where a ratio to the weight means
    nothing. Float64 parameters travel dense as well: the residual is float32.

    Args:
        min_numel: smallest tensor worth packing.
    """

    min_numel: int = 2048

    def __post_init__(self) -> None:
        whole_number("min_numel", self.min_numel, 1)

    def packed(self, spec: ParamSpec) -> bool:
        """Whether the parameter travels packed."""
        return not spec.sparse and len(spec.shape) > 1 and spec.numel >= self.min_numel and spec.dtype in PACKED_DTYPES


@dataclass(frozen=True)
class Named:
    """Of what another routing packs, the buckets with these tensors; its other buckets are sent whole in their places.

    Args:
        names: of tensors; kept sorted, for ranks compare what is written of it.
        of: the other routing.
    """

    names: Collection[str]
    of: LargeMatrices = LargeMatrices()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(sorted(set(self.names))))

    def packed(self, spec: ParamSpec) -> bool:
        """Whether the parameter travels packed."""
        return spec.name in self.names and self.of.packed(spec)


Routing = AllDense | LargeMatrices | Named


def plan_of(
    routing: Routing,
    specs: Sequence[ParamSpec],
    bucket_bytes: int,
    facts: Iterable[str],
    *,
    groups: bool = False,
) -> Plan:
    """The buckets of a routing; see :func:`ringprune.plan.build_plan`.

    Args:
        routing: which tensors travel packed.
        specs: the parameters, in the optimizer's order.
        bucket_bytes: size of a bucket.
        facts: what else must be equal on every rank.
        groups: dense buckets are handed to the library as groups of tensors: they are smaller.
    """
    if not isinstance(routing, Named):
        packed = [routing.packed(spec) for spec in specs]
        return build_plan(specs, packed, bucket_bytes, facts, tapered=groups)
    plan = plan_of(routing.of, specs, bucket_bytes, facts, groups=groups)
    # Moved behind the packed ones, what fills early would wait for what fills last.
    whole = [not any(routing.packed(specs[member]) for member in bucket.members) for bucket in plan.buckets]
    buckets = (replace(b, route="dense") if w else b for b, w in zip(plan.buckets, whole, strict=True))
    return replace(plan, buckets=tuple(buckets))


def sent_whole(density: float) -> bool:
    """Whether packed tensors are sent whole at this density, without indices.

    From a density of 2/3 on selection saves at most a third of the bytes, and costs every rank time.
    """
    return density >= 2 / 3


WAYS = ("gather", "dense", "union", "owners")
"""How rows go, the fewest messages first."""


@dataclass(frozen=True)
class Rows:
    """How the gradient of a table travels of which each rank has some rows, as of ``nn.Embedding(sparse=True)``.

    Args:
        way: ``"gather"``: all ranks' rows to all, summed there. ``"dense"``: an allreduce of the whole table.
            ``"union"``: an allreduce of the rows that some rank has. ``"owners"``: each row to the rank that owns it,
            whose sums go to all. ``"auto"``: at each step, and for each table, that of the fewest bytes.
        values: ``"fp32"``, ``"fp16"`` or ``"bf16"`` on the wire. What rounding drops is lost.

    Raises:
        ConfigurationError: an argument is none of these.
    """

    way: str = "auto"
    values: str = "fp32"

    def __post_init__(self) -> None:
        one_of("way", self.way, ("auto", *WAYS))
        one_of("values", self.values, ("fp32", "fp16", "bf16"))


def expected_union(counts: Sequence[int], length: int, last: tuple[int, int] = (0, 0)) -> float:
    """How many rows the ranks probably have together.

    Args:
        counts: rows of each rank.
        length: rows of the table.
        last: of the step before, rows that some rank had, and the sum over the ranks; zeros where there was none. The
            ranks are taken to overlap as they did. Without, as sets drawn at random do.
    """
    total = sum(counts)
    if last[1]:
        expected = total * last[0] / last[1]
    else:
        absent = 1.0
        for count in counts:
            absent *= 1 - count / length
        expected = length * (1 - absent)
    return min(max(expected, *counts), total, length)


def way_costs(counts: Sequence[int], length: int, row_bytes: float, union: float) -> dict[str, float]:
    """Bytes that each way sends per rank, in units of (P-1)/P, after all ranks know ``counts``.

    Args:
        counts: rows of each rank, P of them.
        length: rows of the table.
        row_bytes: bytes of a row's values.
        union: rows that the ranks have together, or how many that probably are.
    """
    size, total = len(counts), sum(counts)
    sets = 4.0 * sum(set_words(count, length) for count in counts)
    back = min(4 * union, 4 * set_words(length, length))
    return {
        "gather": sets + row_bytes * total,
        "dense": sets + 2 * row_bytes * length,
        "union": sets + 2 * row_bytes * union,
        # The last term: how many rows each rank has for each, and of how many it has the sums.
        "owners": (sets + row_bytes * total) / size + back + row_bytes * union + 8 * size,
    }


def cheapest(costs: dict[str, float]) -> str:
    """The way of the fewest bytes, of several the one of the fewest messages."""
    return min(WAYS, key=costs.__getitem__)
