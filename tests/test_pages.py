"""State on large pages: ordinary tensors whatever the system says, and advice for nothing but their own memory."""

import mmap
from typing import Any

import pytest
import torch

from ringprune import pages

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("call", [None, lambda *arguments: -1], ids=["no such call", "refused"])
def test_a_system_without_them_changes_nothing(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: call)
    assert pages.zeros(pages.LARGE, CPU).sum() == 0.0


def test_memory_of_other_devices_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    assert pages.empty(pages.LARGE, torch.device("meta")).device.type == "meta"
