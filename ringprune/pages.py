"""Memory for state that passes read from end to end: on large pages, where the system has them for who asks.

A processor fetches ahead inside a page and keeps few of their addresses. On pages of 2 MiB instead of 4 KiB a pass over
residual and velocity is about a tenth faster. After a fork, as for a DataLoader's workers, the system divides a page
that is written to into small ones, and joins them in its own time: until then it is as fast as without.
"""

import ctypes
import functools
import mmap
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGE", "empty", "zeros"]

LARGE = 1 << 21
"""Bytes of a large page on x86-64, and on other processors with pages of 4 KiB."""


def empty(numel: int, device: torch.device) -> Tensor:
    """float32, shape ``(numel,)``, on ``device``; in CPU memory on large pages as far as whole ones fit into it."""
    room = torch.empty(numel, dtype=torch.float32, device=device)
    advise = _madvise()
    if type(room) is Tensor and room.device.type == "cpu" and advise is not None:  # a fake tensor has no memory
        begin = -(-room.data_ptr() // LARGE) * LARGE
        size = (room.data_ptr() + room.nbytes) // LARGE * LARGE - begin
        if size > 0:
            advise(begin, size, mmap.MADV_HUGEPAGE)  # advice: where it is not taken nothing changes
    return room


def zeros(numel: int, device: torch.device) -> Tensor:
    """The same, zeros."""
    return empty(numel, device).zero_()  # asked before the first touch, as a rule: that is what decides


@functools.lru_cache(maxsize=1)
def _madvise() -> Any:
    """The system's call; None where it knows no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call
