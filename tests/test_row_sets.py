"""Sets of rows on the wire: what is sent is what comes, in as many words as the formula says; damage is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.errors import CommunicatorError
from ringprune.row_sets import decode_rows, encode_rows, set_words


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    length = draw(st.integers(1, 300))
    every = draw(st.integers(1, 5))
    return sorted(draw(st.sets(st.integers(0, length - 1))) | set(range(0, length, every))), length


@given(sets() | st.tuples(st.just([]), st.integers(1, 300)))
def test_a_set_comes_as_it_was_sent(case: tuple[list[int], int]) -> None:
    rows, length = case
    message = encode_rows(torch.tensor(rows, dtype=torch.int64), length)
    assert message.dtype == torch.int32
    assert message.numel() == set_words(len(rows), length) == min(len(rows), 2 * ((length + 63) // 64))
    assert decode_rows(message, len(rows), length, "set").tolist() == rows


@given(sets(), st.data())
def test_what_is_no_such_set_is_told(case: tuple[list[int], int], data: st.DataObject) -> None:
    """A bit more, or a number that does not ascend or is out of range."""
    rows, length = case
    message = encode_rows(torch.tensor(rows, dtype=torch.int64), length)
    if message.numel() == len(rows):
        place = data.draw(st.integers(0, len(rows) - 1))
        message[place] = data.draw(st.sampled_from([-1, length, *message[:place].tolist()]))
    else:
        place = data.draw(st.integers(0, 32 * message.numel() - 1))
        message[place // 32] ^= torch.tensor(1 << (place % 32)).to(torch.int32)
    with pytest.raises(CommunicatorError, match=f"the set: not {len(rows)} ascending rows within 0 to {length - 1}"):
        decode_rows(message, len(rows), length, "the set")
