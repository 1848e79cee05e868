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
"""Entries of a device compared at once, of which there are copies meanwhile: 128 MiB in float32."""


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

    Most often none differ: copies of many at once are compared, and one by one those of a group that differs.
    """
    groups: list[list[int]] = []
    room = -1
    for i, (left, _) in enumerate(pairs):
        if left.numel() > room:
            groups.append([])
            room = TOGETHER
        groups[-1].append(i)
        room -= left.numel()
    differs = torch.stack([_joined(pairs, group, 0).ne(_joined(pairs, group, 1)).any() for group in groups]).tolist()
    suspects = [i for group, found in zip(groups, differs, strict=True) if found for i in group]
    flags = [False] * len(pairs)
    if suspects:
        found = torch.stack([pairs[i][0].ne(pairs[i][1]).any() for i in suspects]).tolist()
        for i, flag in zip(suspects, found, strict=True):
            flags[i] = flag
    return flags


def _joined(pairs: Sequence[tuple[Tensor, Tensor]], group: Sequence[int], side: int) -> Tensor:
    """One side of some pairs, flat; where dtypes are mixed, in one that has all their numbers."""
    return torch.cat([pairs[i][side].detach().reshape(-1) for i in group])


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
