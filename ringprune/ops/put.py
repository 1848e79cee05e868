"""Write averaged values back into tensors that are zero elsewhere: stage 7 of the exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS, check_flat, check_indices, check_positions, check_tensors, offsets_of
from ringprune.ops.library import call, define

__all__ = ["put"]

SCHEMA = "put(Tensor(a!)[] outputs, Tensor indices, Tensor values) -> ()"


def put(outputs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Make ``outputs`` zero except at ``indices``, where they become ``values``.

    Args:
        outputs: T contiguous tensors of any shape, float32, float16 or bfloat16; N entries together, counted through
            all of them. Overwritten; they share no memory with each other or with ``values``.
        indices: int32 [K], strictly ascending positions in [0, N); checked before anything is written. On CUDA a check
            would wait for the device: there positions outside of [0, N) are passed over (nothing is written for them),
            and where they do not ascend any of ``values`` may be missing.
        values: float32 [K], rounded to nearest, ties to even, where the output has fewer bits.

    Raises:
        ConfigurationError: a shape, device or an index does not fit; nothing has been written.
        ArgumentTypeError: a dtype does not fit; nothing has been written.
    """
    call(_put, outputs, indices, values)


def check_put(outputs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Refuse arguments of :func:`put` that do not fit."""
    check_flat("put", "indices", indices, torch.int32)
    check_flat("put", "values", values, torch.float32, device=indices.device, numel=indices.numel())
    check_tensors("put", "outputs", outputs, FLOATS, device=indices.device)
    check_positions("put", sum(output.numel() for output in outputs))


def put_reference(outputs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """:func:`put` in torch."""
    offsets = offsets_of(outputs)
    check_indices("put", indices, offsets[-1])
    bounds = torch.searchsorted(indices, torch.tensor(offsets, device=indices.device)).tolist()
    for i, output in enumerate(outputs):
        part = slice(bounds[i], bounds[i + 1])
        output.zero_()
        output.view(-1)[indices[part] - offsets[i]] = values[part].to(output.dtype)


def _put_fake(outputs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Nothing is returned, so there is no shape to tell."""


_put = define(SCHEMA, check_put, put_reference, _put_fake)
