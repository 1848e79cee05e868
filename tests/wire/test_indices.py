"""Index sets come back as they were, in the bytes announced; anything else is refused, and read within its bounds."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune.bitmap import read_bitmap
from ringprune.errors import CommunicatorError, ConfigurationError
from ringprune.ops import PAD
from ringprune.wire import INDEX_FORMATS, elias_fano, index_code
from ringprune.wire.elias_fano import read_elias_fano
from ringprune.wire.indices import _CODES
from ringprune.wire.message import FRAME_BYTES, seal

CODINGS = [name for name in INDEX_FORMATS if name != "auto"]


@st.composite
def proposals(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Positions with pads in some places, the most there may be, and the entries of the bucket."""
    numel = draw(st.sampled_from([1, 5, 63, 64, 65, 1000, 10**6, 2**31 - 1]))
    entries = sorted(draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 200))))
    pads = draw(st.lists(st.integers(0, len(entries)), max_size=5))
    for place in sorted(pads, reverse=True):
        entries.insert(place, PAD)
    spare = draw(st.integers(0, min(3, numel - len(entries) + len(pads)) if numel > len(entries) else 0))
    return torch.tensor(entries, dtype=torch.int32), len(entries) + spare, numel


@pytest.mark.parametrize("coding", INDEX_FORMATS)
@given(proposal=proposals())
def test_positions_come_back(coding: str, proposal: tuple[Tensor, int, int]) -> None:
    positions, count, numel = proposal
    if coding == "bitmap" and numel > 10**6:
        numel = 10**6
        positions = positions[positions < numel]
    code = index_code(count, numel, coding)
    message = code.encode(positions)
    assert message.dtype == torch.uint8 and message.numel() == code.size
    decoded = code.decode(message, name="m")
    assert decoded.dtype == torch.int32
    assert decoded.tolist() == [p for p in positions.tolist() if p != PAD]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(elias_fano, "PARALLEL", 200)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("numel", [60_000, 500_000, 10**7])
@pytest.mark.parametrize("count", [20_000, 33_333, 50_001])
def test_two_threads_make_the_same_message(numel: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And two do: among so many positions there is a place where none of the words is shared."""
    shared, side_by_side = [], elias_fano.side_by_side

    def counted(tasks: Sequence[Callable[[], None]]) -> None:
        assert len(tasks) == 2
        shared.append(None)
        side_by_side(tasks)

    monkeypatch.setattr(elias_fano, "side_by_side", counted)
    drawn = np.random.default_rng(0).choice(numel, count, replace=False)
    positions = torch.from_numpy(np.sort(drawn).astype(np.int32))
    code = index_code(count, numel, "elias-fano")
    message = code.encode(positions)
    assert len(shared) == 1
    assert torch.equal(code.decode(message, name="m"), positions)
    assert len(shared) == 2
    monkeypatch.setattr(elias_fano, "PARALLEL", 10**9)
    assert torch.equal(code.encode(positions), message)
    assert torch.equal(code.decode(message, name="m"), positions)
    assert len(shared) == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("seed", range(200))
def test_fuzz_two_threads_find_what_one_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bits of a good code are flipped: the same verdict, and nothing is written beyond the positions."""
    generator = np.random.default_rng(seed)
    count, numel = 300, 4000
    code = index_code(count, numel, "elias-fano")
    good = np.sort(generator.permutation(numel)[:count]).astype(np.int32)
    words = code.encode(torch.from_numpy(good)).numpy()[FRAME_BYTES + 8 :].view(np.uint64).copy()
    for place in generator.integers(0, words.size, seed % 4):
        words[place] ^= np.uint64(1) << np.uint64(generator.integers(0, 64))
    verdicts = []
    for threshold in (200, 10**9):
        monkeypatch.setattr(elias_fano, "PARALLEL", threshold)
        guarded = np.full(count + 2, 77, np.int32)
        first, second = words[: code._first_words], words[code._first_words :]
        verdicts.append(read_elias_fano(first, second, code.width, numel, guarded[1:-1]))
        assert guarded[0] == guarded[-1] == 77
        assert not verdicts[-1] or seed % 4 or np.array_equal(guarded[1:-1], good)
    assert verdicts[0] == verdicts[1] and (verdicts[0] or seed % 4)


@given(st.integers(0, 3000), st.integers(1, 10**6))
def test_auto_is_the_shortest_and_elias_fano_near_the_bound(count: int, numel: int) -> None:
    count = min(count, numel)
    sizes = {coding: index_code(count, numel, coding).size for coding in CODINGS}
    assert index_code(count, numel).size == min(sizes.values())
    # Log2 of the number of sets, about count * (log2(numel / count) + 1.44), is what no code can go below; Elias-Fano
    # takes at most 2 + log2(numel / count) bits for each, and whole words for its two parts, count and frame.
    if 0 < count < numel:
        assert 8 * sizes["elias-fano"] <= count * (2 + np.log2(numel / count)) + 1 + 4 * 64 + 64


def test_what_travels_at_one_percent() -> None:
    assert 8 * index_code(10_000, 1_000_000).size / 10_000 < 8.6
    assert 8 * index_code(2_500, 1_000_000).size / 2_500 < 10.7


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'elias-fano'"):
        index_code(1, 2, "eliasfano")


@pytest.mark.parametrize("coding", CODINGS)
def test_more_indices_than_agreed_are_refused(coding: str) -> None:
    code = index_code(3, 100, coding)
    message = code.encode(torch.tensor([1, 2, 3], dtype=torch.int32))
    message[FRAME_BYTES] = 4
    with pytest.raises(CommunicatorError, match="m: 4 indices, more than the 3 agreed"):
        code.decode(seal(message, _CODES[coding]), name="m")


@pytest.mark.parametrize("bad", [[-2, 3], [3, 3], [5, 4], [3, 100], [-(2**31), 3], [2**31 - 1, -(2**31)]])
def test_a_list_that_is_no_set_is_refused(bad: list[int]) -> None:
    code = index_code(2, 100, "list")
    message = code.encode(torch.tensor([1, 2], dtype=torch.int32))
    message[FRAME_BYTES + 8 : FRAME_BYTES + 16] = torch.tensor(bad, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(CommunicatorError, match=r"bucket 7.*not ascending positions below 100"):
        code.decode(seal(message, _CODES["list"]), name="bucket 7")


@settings(max_examples=300)
@given(st.sampled_from(CODINGS), st.integers(0, 40), st.integers(1, 3000), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_fuzz_whatever_a_body_holds_a_set_comes_out_or_an_error(
    coding: str, count: int, numel: int, seed: int, ones: float
) -> None:
    """The frame is in order, the body is not: as from a program with an error in it."""
    count = min(count, numel)
    code = index_code(count, numel, coding)
    generator = np.random.default_rng(seed)
    message = torch.zeros(code.size, dtype=torch.uint8)
    bits = np.packbits(generator.random(8 * (code.size - FRAME_BYTES)) < ones)
    message[FRAME_BYTES:] = torch.from_numpy(bits)
    message[FRAME_BYTES : FRAME_BYTES + 8] = 0
    message[FRAME_BYTES] = int(generator.integers(0, count + 1))
    try:
        positions = code.decode(seal(message, _CODES[coding]), name="m")
    except CommunicatorError:
        return
    assert positions.numel() == message[FRAME_BYTES]
    assert bool((positions.diff() > 0).all()) and bool(((positions >= 0) & (positions < numel)).all())


@settings(max_examples=300)
@given(st.integers(0, 20), st.integers(0, 31), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_fuzz_loops_write_only_where_they_may(count: int, width: int, words: int, seed: int) -> None:
    """Arrays lie between guards; the loops are compiled without checks of bounds."""
    generator = np.random.default_rng(seed)
    highs = generator.integers(0, 2**64, words, dtype=np.uint64)
    lows = generator.integers(0, 2**64, -(-count * width // 64), dtype=np.uint64)
    guarded = np.full(count + 2, 77, np.int32)
    read_elias_fano(highs, lows, width, 2**31 - 1, guarded[1:-1])
    read_bitmap(highs, 64 * words - 5, guarded[1:-1])
    assert guarded[0] == guarded[-1] == 77


AT_THE_END = """
import atexit
import torch
from ringprune.wire import index_code

torch.set_num_threads(2)
positions = torch.arange(0, 400_000, 2, dtype=torch.int32)
code = index_code(len(positions), 400_000, "elias-fano")

def encode():
    assert torch.equal(code.decode(code.encode(positions), name="m"), positions)
    print("encoded")

encode()
atexit.register(encode)
"""


def test_long_messages_are_coded_at_the_end_of_a_process_too() -> None:
    """Python starts no work in its pools any more when exit handlers run: it raised on one rank, and others waited."""
    job = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120, check=True)
    assert job.stdout.split() == ["encoded", "encoded"], job.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_a_position_beyond_int32_is_refused(count: int) -> None:
    """It was cut to a negative one before it was compared with the bucket's size."""
    numel = 2**31 - 6
    code = index_code(count, numel, "elias-fano")
    highs, lows = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
    beyond = (1 << 31) >> code.width
    for i in range(count):
        bit = beyond + 2 * i
        highs[bit // 64] |= np.uint64(1) << np.uint64(bit % 64)
    assert not read_elias_fano(highs, lows, code.width, numel, np.zeros(count, np.int32))
