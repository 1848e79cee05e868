"""Bit maps of positions are the same wherever they are made and read, and are refused alike; one set of several roots.

With the id "cpu" what a device does is done to tensors of the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune import threads
from ringprune.errors import CommunicatorError
from ringprune.ops import PAD
from ringprune.wire import IndexCode, index_code, indices, map_on_device
from ringprune.wire.message import FRAME_BYTES, seal
from tests.places import PLACES

CPU = torch.device("cpu")
PARTS = st.sampled_from([64, 192, map_on_device.PART])
SIZES = st.one_of(st.integers(0, 200), st.sampled_from([255, 256, 257, 1000, 5000]))


@contextmanager
def as_on_a_device(part: int = map_on_device.PART) -> Iterator[None]:
    """Maps are coded by operations of torch even on the host, in parts of so many entries."""
    with mock.patch.object(map_on_device, "PART", part), mock.patch.object(indices, "_codes_itself", return_value=True):
        yield


def drawn(numel: int, density: float, seed: int) -> Tensor:
    """Ascending positions."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.flatnonzero(generator.random(numel) < density).astype(np.int32))


def padded(positions: Tensor, pads: int, seed: int) -> Tensor:
    """With ``PAD`` in places that are drawn."""
    places = np.random.default_rng(seed).integers(0, positions.numel() + 1, pads)
    return torch.from_numpy(np.insert(positions.numpy(), places, PAD))


@pytest.mark.parametrize("place", PLACES)
@given(numel=SIZES, density=st.floats(0, 1), pads=st.integers(0, 5), part=PARTS, seed=st.integers(0, 2**32 - 1))
@example(numel=0, density=1, pads=0, part=64, seed=0)
@example(numel=0, density=1, pads=3, part=64, seed=0)
@example(numel=64, density=1, pads=1, part=64, seed=0)
@example(numel=5000, density=1, pads=0, part=192, seed=0)
@example(numel=5000, density=0, pads=5, part=192, seed=0)
def test_bytes_and_positions_are_the_same_on_a_device(
    place: str, numel: int, density: float, pads: int, part: int, seed: int
) -> None:
    expected = drawn(numel, density, seed)
    positions = padded(expected, pads, seed)
    code = index_code(positions.numel(), numel, "bitmap")
    message = code.encode(positions)
    host = code.decode_maps({"m": message}, CPU)
    with as_on_a_device(part):
        assert torch.equal(code.encode(positions.to(place)), message)
        found = code.decode_maps({"m": message}, torch.device(place))
    assert found.device.type == place
    for each in (found, host):
        assert each.dtype == torch.int32 and torch.equal(each.cpu(), expected)


@pytest.mark.parametrize("place", PLACES)
def test_a_large_map_has_several_parts(place: str) -> None:
    numel = 2 * map_on_device.PART + 100
    positions = drawn(numel, 0.3, 0)
    code = index_code(positions.numel() + 2, numel, "bitmap")
    message = code.encode(positions)
    with as_on_a_device():
        assert torch.equal(code.encode(padded(positions, 2, 0).to(place)), message)
        assert torch.equal(code.decode_maps({"m": message}, torch.device(place)).cpu(), positions)


@pytest.mark.parametrize("place", PLACES)
@given(numel=st.integers(1, 400), densities=st.lists(st.floats(0, 1), min_size=1, max_size=4), part=PARTS)
def test_several_maps_are_one_set(place: str, numel: int, densities: list[float], part: int) -> None:
    sets = [drawn(numel, density, seed) for seed, density in enumerate(densities)]
    code = index_code(max(each.numel() for each in sets), numel, "bitmap")
    messages = {f"from rank {rank}": code.encode(each) for rank, each in enumerate(sets)}
    before = {name: message.clone() for name, message in messages.items()}
    host = code.decode_maps(messages, CPU)
    with as_on_a_device(part):
        found = code.decode_maps(messages, torch.device(place))
    for each in (found, host):
        assert torch.equal(each.cpu(), torch.cat(sets).unique()) and each.dtype == torch.int32
    assert all(torch.equal(message, before[name]) for name, message in messages.items())


@given(numel=SIZES, density=st.floats(0, 1), number=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
@example(numel=5000, density=1, number=5, seed=0)
def test_on_several_threads_maps_are_the_same(numel: int, density: float, number: int, seed: int) -> None:
    positions = drawn(numel, density, seed)
    code = index_code(positions.numel(), numel, "bitmap")
    with (
        mock.patch.object(torch, "get_num_threads", return_value=number),
        mock.patch.object(threads, "FEWEST", 64),
        mock.patch.object(indices, "BLOCK", 128),
    ):
        message = code.encode(positions)
        found = code.decode_maps({"m": message}, CPU)
    bits = np.unpackbits(message[FRAME_BYTES + 8 :].numpy(), bitorder="little")
    assert np.array_equal(np.flatnonzero(bits), positions.numpy())
    assert torch.equal(found, positions)


def outcome(code: IndexCode, message: Tensor, place: str | None) -> list[int] | str:
    """Positions, or what the error says; without a place as of one proposal in any format."""
    try:
        if place is None:
            found = code.decode(message, name="m")
        else:
            with as_on_a_device():
                found = code.decode_maps({"m": message}, torch.device(place))
    except CommunicatorError as error:
        return str(error)
    return [int(position) for position in found]


@settings(max_examples=300)
@pytest.mark.parametrize("place", PLACES)
@given(numel=st.integers(0, 300), density=st.floats(0, 1), more=st.integers(-2, 2), seed=st.integers(0, 2**32 - 1))
def test_fuzz_whatever_a_map_holds_it_is_refused_alike(
    place: str, numel: int, density: float, more: int, seed: int
) -> None:
    """Bits beyond the last entry, more or fewer of them than told, more than agreed: the frame is in order."""
    generator = np.random.default_rng(seed)
    code = index_code(numel // 2 + 1, numel, "bitmap")
    message = torch.zeros(code.size, dtype=torch.uint8)
    bits = np.zeros(8 * code.position_bytes, np.uint8)
    end = bits.size if generator.integers(0, 2) else numel
    bits[:end] = generator.random(end) < density
    message[FRAME_BYTES + 8 :] = torch.from_numpy(np.packbits(bits, bitorder="little"))
    told = max(0, int(bits.sum()) + more)
    message[FRAME_BYTES : FRAME_BYTES + 8] = torch.tensor([told]).view(torch.uint8)
    seal(message, indices._CODES["bitmap"])
    expected = outcome(code, message, None)
    assert outcome(code, message, place) == expected
    lawful = told == bits.sum() <= code.count and not bits[numel:].any()
    assert isinstance(expected, list) == lawful


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_damage_is_found_alike(place: str, numel: int) -> None:
    code = index_code(numel, numel, "bitmap")
    good = code.encode(drawn(numel, 0.5, 0))
    for byte in range(good.numel()):
        message = good.clone()
        message[byte] ^= 1 + byte % 255
        expected = outcome(code, message, None)
        assert isinstance(expected, str) and outcome(code, message, place) == expected
    assert outcome(code, good[:-1], place) == outcome(code, good[:-1], None) != outcome(code, good, place)


def test_the_first_bad_map_is_named() -> None:
    code = index_code(3, 10, "bitmap")
    good = code.encode(torch.tensor([1, 2], dtype=torch.int32))
    bad = good.clone()
    bad[FRAME_BYTES] = 1
    seal(bad, indices._CODES["bitmap"])
    with pytest.raises(
        CommunicatorError, match="from rank 3: the indices proposed are not ascending positions below 10"
    ):
        code.decode_maps({"from rank 1": good, "from rank 3": bad, "from rank 0": bad}, CPU)
