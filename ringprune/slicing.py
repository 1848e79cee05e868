"""A Plan for sending by priority: large dense tensors are cut into slices, small neighbours travel together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringprune.plan import Bucket, ParamSpec, Plan, Route, make_bucket

__all__ = ["InPieces", "Piece", "SlicedPlan", "part_of", "slice_plan"]


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: the whole of it, or one slice.

    Attributes:
        param: its position among the parameters.
        start: its first entry in the flat parameter.
        end: the entry after its last.
    """

    param: int
    start: int
    end: int


@dataclass(frozen=True)
class SlicedPlan:
    """What is exchanged in pieces.

    Attributes:
        plan: a Plan whose parameters are the pieces; slices are named ``weight[0:1048576]``.
        pieces: what each of these is a part of.
        params: the parameters, in the optimizer's order.
    """

    plan: Plan
    pieces: tuple[Piece, ...]
    params: tuple[ParamSpec, ...]

    def members(self, bucket: Bucket) -> list[int]:
        """The parameters that a bucket holds pieces of."""
        return sorted({self.pieces[i].param for i in bucket.members})


def slice_plan(
    params: Sequence[ParamSpec],
    packed: Sequence[bool],
    whole: Sequence[bool],
    slice_bytes: int,
    fuse_bytes: int,
    facts: Iterable[str],
) -> SlicedPlan:
    """Cut parameters into slices, and put pieces into buckets in the order of the parameters.

    Packed tensors are not cut, so that selection does not change.

    Args:
        params: the parameters, in the order in which the forward pass uses them, as near as is known.
        packed: for each, whether it travels packed.
        whole: for each, whether it is not to be cut.
        slice_bytes: largest slice, as float32.
        fuse_bytes: tensors are put together up to this size, as float32.
        facts: what else must be equal on every rank, one line each.
    """
    pieces: list[Piece] = []
    groups: list[tuple[Route, list[int]]] = []
    open_groups: dict[object, tuple[list[int], int]] = {}
    most = max(1, slice_bytes // 4)
    for number, (spec, is_packed, uncut) in enumerate(zip(params, packed, whole, strict=True)):
        route: Route = "packed" if is_packed else "dense"
        ends = [spec.numel] if is_packed or uncut or not spec.numel else _cuts(spec.numel, most)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            key, size = (route, spec.dtype, spec.device), 4 * (end - start)
            members, used = open_groups.get(key, ([], 0))
            if not members or used + size > fuse_bytes:
                members, used = [], 0
                groups.append((route, members))
            members.append(len(pieces))
            open_groups[key] = members, used + size
            pieces.append(Piece(number, start, end))
    specs = tuple(_spec(params[piece.param], piece) for piece in pieces)
    buckets = tuple(make_bucket(index, route, members, specs) for index, (route, members) in enumerate(groups))
    lines = [*facts, f"{len(params)} parameters, slices of at most {slice_bytes} bytes, fused up to {fuse_bytes}"]
    lines += [f"parameter {i} is {spec}" for i, spec in enumerate(params)]
    lines += [f"bucket {bucket.index} is {bucket.route}: pieces {bucket.members}" for bucket in buckets]
    return SlicedPlan(Plan(specs, buckets, tuple(lines)), tuple(pieces), tuple(params))


def _cuts(numel: int, most: int) -> list[int]:
    """Where the slices of ``numel`` entries end: as few as may be, as even as may be."""
    count = -(-numel // most)
    return [numel * (i + 1) // count for i in range(count)]


def _spec(spec: ParamSpec, piece: Piece) -> ParamSpec:
    if piece.end - piece.start == spec.numel:
        return spec
    name = f"{spec.name}[{piece.start}:{piece.end}]"
    return ParamSpec(name, (piece.end - piece.start,), spec.dtype, spec.device, spec.group)


def part_of(tensor: Tensor, piece: Piece) -> Tensor:
    """A piece's part of its parameter's tensor; the tensor itself where it is all of it."""
    if piece.end - piece.start == tensor.numel():
        return tensor
    return tensor.detach().view(-1)[piece.start : piece.end]


class InPieces(Sequence[Tensor]):
    """Parts of parameters' tensors, cut when they are asked for: what is behind ``param.data`` may be replaced."""

    def __init__(self, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> None:
        self._pieces, self._tensors = pieces, tensors

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        piece = self._pieces[index]
        tensor = self._tensors[piece.param]
        # Laid out otherwise since (channels last), a parameter is copied to be read. What is written to is not.
        return part_of(tensor if piece.end - piece.start == tensor.numel() else tensor.contiguous(), piece)
