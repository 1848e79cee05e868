"""Facts that are equal on every rank: the parameters, their buckets, and the hand-shake that checks it."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch.nn.parameter import UninitializedParameter

from ringprune.comm.communicator import Communicator
from ringprune.errors import ConfigurationError, RankMismatchError

__all__ = [
    "Bucket",
    "ParamSpec",
    "Plan",
    "Route",
    "build_plan",
    "gather_texts",
    "make_bucket",
    "on_one_device",
    "shake_hands",
    "why_unfit",
]

Route = Literal["packed", "dense", "rows"]

LONG_FACT = 120
"""Characters of a fact that people still compare by eye."""

TAIL_BYTES = 1 << 20
"""From here on a shorter message takes hardly less time."""

ALONE_BYTES = 4 << 20
"""A tensor this long gains nothing from waiting for others."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter that takes part in the exchange.

    Attributes:
        name: the user's name for it.
        shape: its shape.
        dtype: dtype of the parameter and of its gradient.
        device: where it lives.
        group: number of its param group in the wrapped optimizer.
        sparse: its gradient is sparse, some rows of a table, and travels as such.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: int
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of entries."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        kind += " sparse" if self.sparse else ""
        return f"{self.name!r} {kind} {list(self.shape)} on {self.device.type} in param group {self.group}"


def why_unfit(param: torch.Tensor) -> str | None:
    """Why a parameter cannot take part whatever its shape and dtype; None where it can."""
    if hasattr(param, "placements"):  # of a DTensor
        return (
            "is a DTensor: with FSDP or tensor parallelism each rank has its own part, and torch exchanges it. "
            "RingPrune is for models that every rank has whole"
        )
    if isinstance(param, UninitializedParameter):
        return "of a lazy module has no shape yet: run a batch through the model, make the optimizer, then wrap it"
    if param.is_meta:
        return "is on the meta device, without memory: model.to_empty(device=...) and initialise it, then wrap"
    return None


def on_one_device(specs: list[ParamSpec]) -> list[ParamSpec]:
    """The parameters themselves.

    Raises:
        ConfigurationError: they lie on several devices.
    """
    first = {str(spec.device): spec.name for spec in reversed(specs)}
    if len(first) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in sorted(first.items()))
        raise ConfigurationError(
            f"parameters lie on several devices ({where}): wrap an optimizer of the parameters of each"
        )
    return specs


@dataclass(frozen=True)
class Bucket:
    """Several tensors that are exchanged together, one after another in one flat range.

    Attributes:
        index: place in the order in which buckets are exchanged.
        route: ``"packed"`` (values at an agreed index set), ``"dense"`` (all entries) or ``"rows"`` (the rows of one
            table that some rank has).
        members: positions in ``Plan.params``.
        offsets: where each member starts in the flat range, and the end: ``len(members) + 1`` numbers.
        dtype: dtype of the values on the wire.
        device: where its tensors live.
    """

    index: int
    route: Route
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """Entries of all members."""
        return self.offsets[-1]

    @property
    def numels(self) -> list[int]:
        """Entries of each member."""
        return [end - start for start, end in pairwise(self.offsets)]


@dataclass(frozen=True)
class Plan:
    """What is exchanged, in which order.

    Attributes:
        params: every parameter that requires a gradient, in the optimizer's order.
        buckets: in the order of exchange.
        facts: one line per fact that must be the same on every rank, in the order in which they are compared.
    """

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    facts: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Entries of all parameters."""
        return sum(spec.numel for spec in self.params)


def build_plan(
    params: Sequence[ParamSpec],
    packed: Sequence[bool],
    bucket_bytes: int,
    facts: Iterable[str],
    *,
    tapered: bool = False,
) -> Plan:
    """Put parameters into buckets.

    Packed buckets come first, in reverse order of the parameters, since backward makes the last layer's gradients
    first. What travels dense comes after them: those are small tensors from all over the model, so that their buckets
    are full only when backward is nearly done. Tables of which rows travel come last, each by itself: mostly they are
    what the forward pass begins with.

    Args:
        params: the parameters in the optimizer's order.
        packed: for each parameter, whether it travels packed, unless its gradient is sparse.
        bucket_bytes: a bucket is closed when its float32 values would exceed this many bytes.
        facts: what else must be equal on every rank, one line each.
        tapered: a dense bucket holds at most half of what has not been sent before it, so that the last message, which
            nothing hides, is short; and it ends with a long tensor, which could wait for another layer's otherwise.
    """
    reverse = range(len(params) - 1, -1, -1)
    groups: list[tuple[Route, list[int]]] = []
    for route in ("packed", "dense"):
        chosen = [i for i in reverse if packed[i] == (route == "packed") and not params[i].sparse]
        split = _split(params, chosen, bucket_bytes, tapered=tapered and route == "dense")
        groups += [(route, members) for members in split]
    groups += [("rows", [i]) for i in reverse if params[i].sparse]
    buckets = tuple(make_bucket(index, route, members, params) for index, (route, members) in enumerate(groups))
    lines = [*facts, f"{len(params)} parameters, buckets of at most {bucket_bytes} bytes"]
    lines += [f"parameter {i} is {spec}" for i, spec in enumerate(params)]
    lines += [f"bucket {bucket.index} is {bucket.route}: parameters {bucket.members}" for bucket in buckets]
    return Plan(tuple(params), buckets, tuple(lines))


def _split(
    params: Sequence[ParamSpec], chosen: Sequence[int], bucket_bytes: int, *, tapered: bool = False
) -> list[list[int]]:
    """Cut ``chosen`` into runs of one dtype and device that stay below ``bucket_bytes``, keeping their order."""
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    left = sum(4 * params[i].numel for i in chosen)
    for i in chosen:
        key, size = (params[i].dtype, params[i].device), 4 * params[i].numel
        members, used, limit = filling.get(key, ([], 0, 0))
        if not members or used + size > limit:
            members, used, limit = [], 0, min(bucket_bytes, max(left // 2, TAIL_BYTES)) if tapered else bucket_bytes
            done.append(members)
        members.append(i)
        ends = tapered and size >= ALONE_BYTES
        filling[key] = members, used + size, 0 if ends else limit
        left -= size
    return done


def make_bucket(index: int, route: Route, members: Sequence[int], params: Sequence[ParamSpec]) -> Bucket:
    """A bucket of some of ``params``, which are of one dtype and device."""
    first = params[members[0]]
    offsets = tuple(accumulate((params[i].numel for i in members), initial=0))
    wire = torch.float64 if first.dtype == torch.float64 else torch.float32
    return Bucket(index, route, tuple(members), offsets, wire, first.device)


def shake_hands(facts: Sequence[str], comm: Communicator, device: torch.device, failure: str | None = None) -> None:
    """Check that all ranks built the same thing; all of them call this, at construction.

    Costs one allgather of 33 bytes when all is well.

    Args:
        facts: this rank's facts, in the order in which they are compared.
        comm: the communicator that will carry the exchange.
        device: where messages live.
        failure: what went wrong while this rank built its part, if anything did; the others then hear of it.

    Raises:
        RankMismatchError: on all ranks, naming the first difference and who has it.
    """
    digest = hashlib.sha256("\n".join(facts).encode()).digest() + bytes([failure is not None])
    message = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    rows = comm.allgather(message, name="hand-shake").wait().reshape(comm.size, -1).cpu()
    if bool((rows == rows[0]).all()) and not rows[0, -1]:
        return
    texts = gather_texts(failure if failure is not None else "\n".join(facts), comm, device, name="hand-shake facts")
    failed = [rank for rank in range(comm.size) if rows[rank, -1]]
    if failed:
        raise RankMismatchError(
            f"rank {failed[0]} could not build its part ({len(failed)} of {comm.size} ranks): {texts[failed[0]]}"
        )
    raise RankMismatchError(_first_difference([text.split("\n") for text in texts]))


def gather_texts(text: str, comm: Communicator, device: torch.device, *, name: str) -> list[str]:
    """Every rank's text, in rank order; all ranks call this (two allgathers: lengths, then the texts)."""
    data = text.encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [int(n) for n in comm.allgather(length, name=f"{name}, lengths").wait()]
    message = torch.tensor(list(data), dtype=torch.uint8, device=device)
    joined = bytes(comm.allgather(message, sizes=sizes, name=name).wait().cpu().tolist())
    ends = list(accumulate(sizes, initial=0))
    return [joined[a:b].decode() for a, b in pairwise(ends)]


def _first_difference(facts: list[list[str]]) -> str:
    for line in range(max(len(lines) for lines in facts)):
        seen = [lines[line] if line < len(lines) else "nothing" for lines in facts]
        for fact in seen:
            if fact != seen[0]:
                same = [str(r) for r, other in enumerate(seen) if other == fact]
                first, second = _narrowed(seen[0], fact), _narrowed(fact, seen[0])
                return (
                    f"the ranks built different things; the first difference: {first!r} on rank 0, "
                    f"{second!r} on rank {', '.join(same)}. Build model, policy and seed alike on all ranks"
                )
    raise AssertionError("facts differ by digest and are equal by text")


def _narrowed(fact: str, other: str) -> str:
    """Of a long fact the setting that differs: ``Policy.density.target=0.01`` of a policy written out in full."""
    if len(fact) <= LONG_FACT:
        return fact
    shorter = min(len(fact), len(other))
    alike = fact[: next((i for i in range(shorter) if fact[i] != other[i]), shorter)]
    begin = max((end.end() for end in re.finditer(r", |[({[]", alike)), default=0)
    path: list[str] = []
    for word, bracket in re.findall(r"([\w.=]*)([()])", fact[:begin]):
        path = path[:-1] if bracket == ")" else [*path, word.partition("=")[0]]
    setting = re.match(r"[^,)]*", fact[begin:])
    assert setting is not None
    return ".".join([*path, setting[0]])
