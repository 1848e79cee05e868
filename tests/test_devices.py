"""Questions to a device: the answers are those that torch gives one by one."""

from itertools import permutations
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.devices import _differing_on_device as differing_on_device
from ringprune.devices import _groups as groups_of
from ringprune.devices import differing, to_device, to_host
from tests.places import PLACES

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("place", PLACES)
@given(st.lists(st.sampled_from(["same", "other", "nan", "empty", "zeros"]), max_size=6))
def test_pairs_that_differ_are_found(place: str, kinds: list[str]) -> None:
    pairs = {
        "same": (torch.ones(3), torch.ones(3)),
        "other": (torch.ones(2, 2), torch.eye(2)),
        "nan": (torch.tensor([torch.nan]), torch.tensor([torch.nan])),
        "empty": (torch.ones(0), torch.ones(0)),
        "zeros": (torch.tensor(0.0), torch.tensor(-0.0)),
    }
    given = [tuple(tensor.to(place) for tensor in pairs[kind]) for kind in kinds]
    assert differing(given) == [i for i, (left, right) in enumerate(given) if not torch.equal(left, right)]


@given(st.data())
def test_one_entry_that_differs_is_found_wherever_it_is(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5))
    dtypes = st.sampled_from(FLOATS)
    lefts = [torch.ones(shape, dtype=data.draw(dtypes)) for shape in shapes]
    rights = [data.draw(st.sampled_from([torch.clone, across]))(left) for left in lefts]
    changed = [i for i, right in enumerate(rights) if right.numel() and data.draw(st.booleans())]
    for i in changed:
        rights[i][tuple(data.draw(st.integers(0, size - 1)) for size in rights[i].shape)] = 2
    block, threads = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mock.patch("ringprune.devices.BLOCK", block), mock.patch("ringprune.threads.FEWEST", 1):
            assert differing(zip(lefts, rights, strict=True)) == changed
        with mock.patch("ringprune.devices.TOGETHER", block):  # as on a device
            flags = differing_on_device(list(zip(lefts, rights, strict=True))) if lefts else []
        assert [i for i, differs in enumerate(flags) if differs] == changed
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtypes", list(permutations(FLOATS, 2)), ids=str)
def test_of_several_dtypes_none_loses_what_the_others_do_not_have(
    place: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Joined in the wrong one, 1 and the next number would be the same."""
    ones = [torch.ones(3, dtype=dtype, device=place) for dtype in dtypes]
    for i, dtype in enumerate(dtypes):
        others = [one.clone() for one in ones]
        others[i][1] = 1 + torch.finfo(dtype).eps
        assert differing_on_device(list(zip(ones, others, strict=True))) == [j == i for j in range(2)]


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(FLOATS)), max_size=12), st.integers(1, 40))
def test_what_is_joined_is_small_and_of_one_dtype(given: list[tuple[int, torch.dtype]], most: int) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in given]
    with mock.patch("ringprune.devices.TOGETHER", most):
        groups = groups_of(tensors)
    assert sorted(i for group in groups for i in group) == list(range(len(tensors)))
    for group in groups:
        assert len({tensors[i].dtype for i in group}) == 1
        assert sum(tensors[i].numel() for i in group) <= most or len([i for i in group if tensors[i].numel()]) == 1


def across(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with its axes in another order in memory, as channels_last has them."""
    return tensor.mT.clone(memory_format=torch.contiguous_format).mT if tensor.dim() > 1 else tensor.clone()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_there_and_back(place: str, numel: int) -> None:
    """From a part of what came to the host, too, which is pinned and copied from as it is."""
    tensor = torch.arange(numel, dtype=torch.int32)
    there = tensor.to(place)
    host = to_host(there)
    assert host.device.type == "cpu" and torch.equal(host, tensor)
    assert host is there if place == "cpu" else numel == 0 or host.is_pinned()
    again = to_device(host[numel // 2 :], torch.device(place))
    assert again.device.type == place and torch.equal(again.cpu(), tensor[numel // 2 :])
