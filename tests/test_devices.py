"""Questions to a device: the answers are those that torch gives one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.devices import differing

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


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
