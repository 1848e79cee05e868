"""Host and device: copies to where a bucket's tensors are, and questions for which the host waits once."""

import bisect
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ringprune.threads import in_parts

__all__ = ["differing", "to_device", "to_host"]

BLOCK = 1 << 18
"""Entries compared at once: what was found of them stays in the cache, and threads seldom meet at the GIL."""


TOGETHER = 1 << 24
"""Entries of small tensors of a device that are compared at once: copies of both sides take 128 MiB in float32."""


def differing(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Which pairs do not hold the same numbers, by their position; NaN is not the same as itself.

    Args:
        pairs: tensors of one dtype and shape each, all on one device.
    """
    held = list(pairs)
    on_host = all(left.device.type == "cpu" for left, _ in held)
    flags = _differing_on_host(held) if on_host else _differing_on_device(held)
    return [i for i, differs in enumerate(flags) if differs]


def _differing_on_device(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """The same where torch.equal would wait at every pair, and each of many small pairs takes longer to launch.

    Most often none differ: copies of small ones are compared together, and one by one those of a group that differs.
    """
    groups = _groups([left for left, _ in pairs])
    differs = [_differ(*(_joined([pairs[i][side] for i in group]) for side in (0, 1))) for group in groups]
    found = torch.stack(differs).tolist()
    suspects = [i for group, flag in zip(groups, found, strict=True) if flag for i in group]
    flags = [False] * len(pairs)
    if suspects:
        one_by_one = torch.stack([_differ(*pairs[i]) for i in suspects]).tolist()
        for i, flag in zip(suspects, one_by_one, strict=True):
            flags[i] = flag
    return flags


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of tensors of one dtype, of ``TOGETHER`` entries at most, but for those that are larger alone."""
    groups: list[list[int]] = []
    open_of: dict[torch.dtype, tuple[list[int], int]] = {}  # and how many more entries it takes
    for i, tensor in enumerate(tensors):
        group, room = open_of.get(tensor.dtype, ([], -1))
        if tensor.numel() > room:
            group, room = [], TOGETHER
            groups.append(group)
        group.append(i)
        open_of[tensor.dtype] = group, room - tensor.numel()
    return groups


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Flat, one after another; a single one as it is, of which there need not be a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _differ(left: Tensor, right: Tensor) -> Tensor:
    return left.ne(right).any()


def _differing_on_host(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """The same on a CPU: torch.equal reads at a third of what one thread can, and on no more than one."""
    flags = [False] * len(pairs)
    plain = [i for i, pair in enumerate(pairs) if all(map(_is_plain, pair))]
    for i in set(range(len(pairs))).difference(plain):
        flags[i] = not torch.equal(*pairs[i])
    lefts, rights = ([pairs[i][side].detach().view(-1).numpy() for i in plain] for side in (0, 1))
    begins = list(itertools.accumulate((left.size for left in lefts), initial=0))

    def compare(begin: int, end: int) -> None:
        for n in range(bisect.bisect_right(begins, begin) - 1, bisect.bisect_left(begins, end)):
            first, last = max(begin - begins[n], 0), min(end, begins[n + 1]) - begins[n]
            for at in range(first, last, BLOCK):
                part = slice(at, min(at + BLOCK, last))
                if not flags[plain[n]] and (lefts[n][part] != rights[n][part]).any():
                    flags[plain[n]] = True

    in_parts(begins[-1], 1, compare)
    return flags


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy compares it as it lies, and as fast as memory."""
    known = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in (torch.float32, torch.float64)
    return known and tensor.is_contiguous() and not tensor.is_neg()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``, in the order of what the device is given to do.

    From memory that is not pinned, a copy to a GPU would wait for all that comes before it, backward passes included.
    Pinned memory, as of :func:`to_host`, is copied from as it is, later, and torch keeps it until then for its tensor
    and slices of this: not for what was made of it by way of numpy.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, which waits for it; one of the host is returned as it is.

    Into pinned memory: to other memory a GPU copies at a fraction of the speed.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)
