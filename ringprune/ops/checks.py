"""The argument checks of the ops: cheap ones for every call, and those the torch references share.

Every message names op, argument, value and what is allowed. ``csrc/checks.h`` is the same for the compiled kernels.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ringprune.errors import ArgumentTypeError, ConfigurationError

__all__ = [
    "FLOATS",
    "FLOATS_AND_DOUBLE",
    "MAX_POSITIONS",
    "check_flat",
    "check_indices",
    "check_integers",
    "check_length",
    "check_numbers",
    "check_offsets",
    "check_overlap",
    "check_positions",
    "check_tensors",
    "check_truths",
    "offsets_of",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOATS_AND_DOUBLE = (*FLOATS, torch.float64)
MAX_POSITIONS = 2**31 - 1
"""Entries of the largest bucket whose positions fit int32."""
FLOAT32_MAX = torch.finfo(torch.float32).max


def offsets_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor starts when all are laid one after another; the last entry is the total."""
    return list(accumulate((tensor.numel() for tensor in tensors), initial=0))


def check_flat(
    op: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    numel: int | None = None,
) -> None:
    """Refuse what is not a contiguous 1-D ``dtype`` tensor; of ``numel`` entries and on ``device`` where given."""
    _check_tensor(op, name, tensor, (dtype,), device)
    if tensor.dim() != 1:
        raise ConfigurationError(f"{op}: {name} has shape {tuple(tensor.shape)}; one dimension is needed")
    if numel is not None and tensor.numel() != numel:
        raise ConfigurationError(f"{op}: {name} has {tensor.numel()} entries; {numel} are needed")


def check_tensors(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    dtypes: tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
    numel: int | None = None,
) -> None:
    """Refuse what is not a sequence of contiguous tensors of ``dtypes``.

    Args:
        op: name of the op, for the message.
        name: name of the argument, for the message.
        tensors: what was given.
        dtypes: the dtypes allowed.
        device: where all must be; None: where the first is.
        numel: entries they must have together; None: any.
    """
    _check_sequence(op, name, tensors, "tensors")
    total = 0
    for i, tensor in enumerate(tensors):
        # the plain test first: the name of the i-th tensor is only made for a message
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or not _fits(tensor, device):
            _check_tensor(op, f"{name}[{i}]", tensor, dtypes, device)
        device = device or tensor.device
        total += tensor.numel()
    if numel is not None and total != numel:
        raise ConfigurationError(f"{op}: {name} have {total} entries together; {numel} are needed")


def check_length(op: str, name: str, values: Sequence[object], length: int) -> None:
    """Refuse what is not a list or tuple with one value per tensor."""
    _check_sequence(op, name, values, "values")
    if len(values) != length:
        raise ConfigurationError(f"{op}: {name} has {len(values)} values; {length} are needed, one per tensor")


def check_numbers(op: str, name: str, values: Sequence[float], length: int, low: float = -FLOAT32_MAX) -> None:
    """Refuse what is not one number of float32's range, at least ``low``, per tensor."""
    check_length(op, name, values, length)
    for i, value in enumerate(values):
        if not isinstance(value, (float, int)):
            raise ArgumentTypeError(f"{op}: {name}[{i}] is a {type(value).__name__}; a float is needed")
        if not low <= value <= FLOAT32_MAX:  # also catches NaN
            allowed = "a finite number of float32" if low < 0 else f"a finite number of float32 that is >= {low:g}"
            raise ConfigurationError(f"{op}: {name}[{i}] = {value}; {allowed} is needed")


def check_truths(op: str, name: str, values: Sequence[bool], length: int) -> None:
    """Refuse what is not one bool per tensor."""
    check_length(op, name, values, length)
    for i, value in enumerate(values):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{op}: {name}[{i}] is a {type(value).__name__}; a bool is needed")


def check_offsets(op: str, offsets: Sequence[int], numel: int) -> None:
    """Refuse offsets that do not rise from 0 to ``numel``."""
    check_integers(op, "offsets", offsets)
    if not offsets or offsets[0] != 0 or offsets[-1] != numel:
        ends = f"{offsets[0]} to {offsets[-1]}" if offsets else "nothing"
        raise ConfigurationError(f"{op}: offsets go from {ends}; 0 to {numel} is needed")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise ConfigurationError(
                f"{op}: offsets[{i}] = {offsets[i]} is below offsets[{i - 1}] = {offsets[i - 1]}; they must not fall"
            )


def check_integers(op: str, name: str, values: Sequence[int]) -> None:
    """Refuse what is not a list or tuple of ints."""
    _check_sequence(op, name, values, "ints")
    for i, value in enumerate(values):
        if not isinstance(value, int):
            raise ArgumentTypeError(f"{op}: {name}[{i}] is a {type(value).__name__}; an int is needed")


def check_positions(op: str, numel: int) -> None:
    """Refuse more entries than int32 positions can tell apart."""
    if numel > MAX_POSITIONS:
        raise ConfigurationError(
            f"{op}: {numel} entries together; at most {MAX_POSITIONS} are allowed, for positions are int32"
        )


def check_indices(op: str, indices: Tensor, numel: int, name: str = "indices") -> None:
    """Refuse indices that are not strictly ascending in [0, numel). Reads all of them: for the references only."""
    bad = (indices < 0) | (indices >= numel)
    bad[1:] |= indices[1:] <= indices[:-1]
    if not bool(bad.any()):
        return
    i = int(bad.int().argmax())
    index = int(indices[i])
    if not 0 <= index < numel:
        raise ConfigurationError(f"ringprune::{op}: {name}[{i}] = {index} is not in [0, {numel})")
    raise ConfigurationError(
        f"ringprune::{op}: {name}[{i}] = {index} is not above {name}[{i - 1}] = {int(indices[i - 1])}; "
        "they must be strictly ascending"
    )


def check_overlap(op: str, name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors that share memory. Reads addresses: for the references only."""
    start, other_start = written.data_ptr(), other.data_ptr()
    end, other_end = start + written.nbytes, other_start + other.nbytes
    if max(start, other_start) < min(end, other_end):
        raise ConfigurationError(f"ringprune::{op}: {name} shares memory with {other_name}")


def _check_sequence(op: str, name: str, values: object, of: str) -> None:
    """Refuse what is not a list or tuple, the sequences torch's dispatcher takes."""
    if not isinstance(values, (list, tuple)):
        raise ArgumentTypeError(f"{op}: {name} is a {type(values).__name__}; a list of {of} is needed")


def _fits(tensor: Tensor, device: torch.device | None) -> bool:
    return (device is None or tensor.device == device) and tensor.layout is torch.strided and tensor.is_contiguous()


def _check_tensor(
    op: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device | None
) -> None:
    """Refuse what is not a contiguous tensor of ``dtypes`` on ``device``."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{op}: {name} is a {type(tensor).__name__}; a tensor is needed")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentTypeError(f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}; {allowed} is needed")
    if device is not None and tensor.device != device:
        raise ConfigurationError(f"{op}: {name} is on {tensor.device}; {device} is needed, where the other tensors are")
    if not _fits(tensor, device):
        raise ConfigurationError(
            f"{op}: {name} (shape {tuple(tensor.shape)}, layout {tensor.layout}) is not contiguous; "
            "a dense contiguous tensor is needed"
        )
