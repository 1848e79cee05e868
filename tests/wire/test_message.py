"""A frame tells what a message is, and any damage to it is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.errors import CommunicatorError
from ringprune.wire.message import FRAME_BYTES, WIRE_VERSION, new_message, open_message, seal


def sealed(body: bytes, code: int = 7) -> torch.Tensor:
    message = new_message(len(body))
    message[FRAME_BYTES:] = torch.tensor(list(body), dtype=torch.uint8)
    return seal(message, code)


@given(st.binary(max_size=64))
def test_a_body_comes_back(body: bytes) -> None:
    assert bytes(open_message(sealed(body), 7, len(body), name="m").tolist()) == body


@given(st.binary(max_size=64), st.data())
def test_any_damaged_byte_is_found(body: bytes, data: st.DataObject) -> None:
    message = sealed(body)
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CommunicatorError, match=rf"bucket 7.*wire format {WIRE_VERSION}"):
        open_message(message, 7, len(body), name="bucket 7")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (sealed(b"12345678")[:-1], "15 bytes instead of 16"),
        (torch.zeros(3, dtype=torch.uint8), "3 bytes instead of 16"),
        (torch.zeros(16, dtype=torch.uint8), "no message of RingPrune's"),
        (sealed(b"12345678", code=9), "number 9 instead of 7"),
    ],
)
def test_a_foreign_or_truncated_message_is_refused(message: torch.Tensor, complaint: str) -> None:
    with pytest.raises(CommunicatorError, match=complaint):
        open_message(message, 7, 8, name="m")


def test_another_version_is_named() -> None:
    message = sealed(b"12345678")
    message[1] = WIRE_VERSION + 1
    with pytest.raises(CommunicatorError, match=f"it is in wire format {WIRE_VERSION + 1}"):
        open_message(message, 7, 8, name="m")
