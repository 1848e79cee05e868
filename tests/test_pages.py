"""State on large pages: ordinary tensors whatever the system says, and advice for nothing but their own memory."""

import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringprune import pages
from ringprune.residual import Residual

CPU = torch.device("cpu")
SMAPS, ENABLED = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """What the kernel notes of the mapping that an address lies in; ``hg`` is: large pages were asked for."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.parametrize("numel", [0, 1, pages.LARGE // 4, 3 * pages.LARGE // 4 + 1, 4 * pages.LARGE])
def test_zeros_are_ordinary_tensors(numel: int) -> None:
    room = pages.zeros(numel, CPU)
    assert (room.shape, room.dtype, room.device) == ((numel,), torch.float32, CPU)
    assert not room.any()
    assert pages.empty(numel, CPU).shape == (numel,)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system knows no large pages")
@pytest.mark.parametrize("numel", [pages.LARGE // 4 - 1, pages.LARGE // 4, 3 * pages.LARGE // 4, 4 * pages.LARGE])
def test_advice_is_for_whole_pages_inside_the_tensor(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *arguments: given.append(arguments))
    room = pages.empty(numel, CPU)
    begin, end = room.data_ptr(), room.data_ptr() + room.nbytes
    for start, size, advice in given:
        assert advice == mmap.MADV_HUGEPAGE
        assert start % pages.LARGE == 0
        assert size % pages.LARGE == 0
        assert begin <= start < start + size <= end
    whole = end // pages.LARGE - -(-begin // pages.LARGE)
    assert sum(size for _, size, _ in given) == max(whole, 0) * pages.LARGE


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no large pages to ask for here")
def test_residual_and_velocity_are_advised() -> None:
    state = Residual([0, 4 * pages.LARGE], velocity=True, spare=True, device=CPU)
    for room in (state.residual, state.velocity, state.next_residual, state.next_velocity):
        assert room is not None
        assert "hg" in flags_at(room.data_ptr() + room.nbytes // 2)


def test_fake_tensors_have_no_memory_to_advise_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call was made on address 0."""
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    with FakeTensorMode():
        assert pages.empty(4 * pages.LARGE, CPU).shape == (4 * pages.LARGE,)


@pytest.mark.parametrize("call", [None, lambda *arguments: -1], ids=["no such call", "refused"])
def test_a_system_without_them_changes_nothing(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: call)
    assert pages.zeros(pages.LARGE, CPU).sum() == 0.0


def test_memory_of_other_devices_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    assert pages.empty(pages.LARGE, torch.device("meta")).device.type == "meta"
