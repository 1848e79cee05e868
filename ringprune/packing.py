"""Stages 5 and 7: values leave the residual at the agreed indices, and averages come back into dense tensors."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import ops

__all__ = ["flatten", "laid_out_as", "no_rows", "pack", "unflatten", "unflatten_part", "unpack"]


def pack(
    residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int], *, lazily: bool
) -> tuple[Tensor, ops.Sent | None]:
    """[5] Take the residual at ``indices``.

    Args:
        residual: float32, shape ``(n,)``.
        velocity: float32, shape ``(n,)``, cleared as well where selection left something out of a tensor (DGC's
            momentum factor masking, arXiv 1712.01887, eq. 9); None to keep it.
        indices: int32, ascending, the agreed set.
        offsets: the bucket's offsets.
        lazily: what is taken may leave with the next pass over the state, where that costs less.

    Returns:
        Float32 values, one per index; and what is to leave the state with the next pass, None where it has left.
    """
    if lazily:
        return ops.take_lazily(residual, velocity, indices, offsets)
    return ops.take(residual, velocity, indices, offsets), None


def unpack(outputs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """[7] Write ``values`` at ``indices`` of the bucket's tensors and zero everywhere else."""
    ops.put(outputs, indices, values)


def flatten(tensors: Sequence[Tensor], factors: Sequence[float], into: Tensor) -> None:
    """Copy ``factor * tensor`` of a bucket's tensors into one flat buffer, in the buffer's dtype."""
    parts = torch.split(into, [t.numel() for t in tensors])
    torch._foreach_copy_(parts, [tensor.reshape(-1) for tensor in tensors])
    if any(factor != 1.0 for factor in factors):
        torch._foreach_mul_(parts, list(factors))


def unflatten(outputs: Sequence[Tensor], values: Tensor, factor: float = 1.0) -> None:
    """Copy a flat buffer back into a bucket's tensors, times a factor; to the bit what that is one after the other."""
    parts = torch.split(values, [o.numel() for o in outputs])
    if values.is_cuda:  # what a launch costs weighs more than another pass
        if factor != 1.0:
            torch._foreach_mul_(parts, factor)
        torch._foreach_copy_(list(outputs), [part.view_as(o) for part, o in zip(parts, outputs, strict=True)])
        return
    for output, part in zip(outputs, parts, strict=True):
        if factor == 1.0 or output.dtype != values.dtype:
            output.copy_(part.view_as(output).mul_(factor) if factor != 1.0 else part.view_as(output))
        else:
            torch.mul(part.view_as(output), factor, out=output)


def unflatten_part(
    outputs: Sequence[Tensor], offsets: Sequence[int], begin: int, values: Tensor, factor: float
) -> None:
    """Copy a part of a flat buffer back, as :func:`unflatten` does all of it.

    Args:
        outputs: the bucket's tensors, contiguous.
        offsets: the bucket's offsets.
        begin: where the part begins in the bucket.
        values: the part.
        factor: what it is multiplied by.
    """
    if values.numel() == offsets[-1]:
        unflatten(outputs, values, factor)
        return
    end = begin + values.numel()
    for i in range(bisect_right(offsets, begin) - 1, bisect_left(offsets, end)):
        first, last = max(begin, offsets[i]), min(end, offsets[i + 1])
        flat = outputs[i].view(-1)[first - offsets[i] : last - offsets[i]]
        unflatten([flat], values[first - begin : last - begin], factor)


def laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of ``param``'s shape with its strides too: torch's fused optimizers take both as flat memory."""
    if param.is_contiguous() or tensor.is_sparse or tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def no_rows(table: Tensor) -> Tensor:
    """A sparse tensor of a table's shape, dtype and device that holds none of its rows."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=table.device)
    values = table.new_empty(0, *table.shape[1:], requires_grad=False)
    return torch.sparse_coo_tensor(
        rows, values, table.shape, device=table.device, is_coalesced=True, check_invariants=False
    )
