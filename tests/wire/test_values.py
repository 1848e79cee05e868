"""Values come back rounded, in the bytes announced, and nothing of them is lost: value = decoded + rest."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from ringprune.errors import CommunicatorError, ConfigurationError
from ringprune.threads import FEWEST
from ringprune.wire import VALUE_FORMATS, ValueCode, on_device, value_code
from ringprune.wire.message import FRAME_BYTES, seal
from ringprune.wire.quantise import BLOCK
from ringprune.wire.values import _CODES
from tests.ops.cases import assert_same_bits

CODINGS = [name for name in VALUE_FORMATS if name != "fp32"]
# Half a unit of the format, relative to the largest value of a block (int8, int4) or to the value itself. Of a book's
# levels, how far apart they are depends on the values; a value is at most lost whole.
HALF_UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "int4": 0.5 / 7, "book4": 1, "book2": 1}

finite = arrays(
    np.float32,
    st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 600, 2047, 2049])),
    elements=st.floats(-(2.0**127), 2.0**127, width=32),
    fill=st.just(np.float32(0.1)),
)


def code_named(coding: str) -> ValueCode:
    code = value_code(coding)
    assert code is not None
    return code


def round_trip(code: ValueCode, values: Tensor) -> tuple[Tensor, Tensor]:
    rest = torch.full_like(values, torch.nan)
    message = code.encode(values, rest)
    assert message.dtype == torch.uint8 and message.numel() == code.size(values.numel())
    return code.decode(message, torch.empty_like(values), name="m"), rest


@pytest.mark.parametrize("coding", CODINGS)
@given(values=finite)
def test_nothing_is_lost(coding: str, values: np.ndarray) -> None:
    """Exactly, to the last bit: float64 holds both and their sum."""
    decoded, rest = round_trip(code_named(coding), torch.from_numpy(values.copy()))
    assert torch.equal(decoded.double() + rest.double(), torch.from_numpy(values).double())


ANY_BITS = arrays(
    np.uint32,
    st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 600])),
    elements=st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFFC00001])),
    fill=st.just(np.uint32(0x3DCCCCCD)),
)


@pytest.mark.parametrize("coding", ["bf16", "fp16", "int8", "int4"])
@given(bits=ANY_BITS, spread=st.booleans())
@example(bits=np.full(300, 0x7F7FFFFF, np.uint32), spread=False)
@example(bits=np.full(3, 0x00000001, np.uint32), spread=False)
@example(bits=np.array([0x7F800000, 0x47C35012, 0xC7C37FFF, 0x477FF000], np.uint32), spread=True)
def test_the_bytes_are_the_same_on_a_device(coding: str, bits: np.ndarray, spread: bool) -> None:
    """By torch's operations, which are here asked for tensors of the host; NaN counts as NaN, whatever its bits."""
    values = torch.from_numpy(bits.view(np.float32).copy())
    if not spread:
        values = torch.where(values.isfinite(), values.sign() * values.abs().clamp(1e-30, 1e30).log(), values)
    code, count = code_named(coding), values.numel()
    rest, there = torch.ones(count), torch.ones(count)
    message = code.encode(values, rest)
    body = torch.zeros_like(message[FRAME_BYTES:])
    scales, codes = code._parts(body, count)
    on_device.encode(coding, values, there, scales, codes)
    found = on_device.decoded(coding, scales, codes, count)
    expected = code.decode(message, torch.empty(count), name="m")
    assert_same_bits(there, rest)
    assert_same_bits(found, expected)
    if bool(values.isfinite().all()):
        assert torch.equal(body, message[FRAME_BYTES:])
    assert_same_bits(on_device.decoded(coding, *code._parts(message[FRAME_BYTES:], count), count), expected)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("count", [2 * FEWEST - 1, 3 * FEWEST + 2049])
def test_thread_count_changes_nothing(coding: str, count: int) -> None:
    code, values = code_named(coding), torch.randn(count, generator=torch.Generator().manual_seed(1)).exp()
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            rest = torch.empty_like(values)
            message = code.encode(values, rest)
            added = code.decode(message, torch.ones_like(values), add=True, name="m")
            found.append((message, rest, code.decode(message, torch.empty_like(values), name="m"), added))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], other, strict=True))


@pytest.mark.parametrize("coding", CODINGS)
@given(values=finite)
def test_decoded_values_can_be_added(coding: str, values: np.ndarray) -> None:
    code, tensor = code_named(coding), torch.from_numpy(values.copy())
    message = code.encode(tensor, torch.empty_like(tensor))
    before = torch.ones_like(tensor)
    decoded = code.decode(message, torch.empty_like(tensor), name="m")
    assert torch.equal(code.decode(message, before.clone(), add=True, name="m"), before + decoded)


@pytest.mark.parametrize("coding", ["bf16", "fp16"])
@given(values=finite)
@example(values=np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 1.0], np.float32))
def test_rounding_is_that_of_torch(coding: str, values: np.ndarray) -> None:
    """To nearest, ties to even, but that what is finite stays finite; float16 once took the largest up to infinity."""
    tensor = torch.from_numpy(values.copy())
    decoded, _ = round_trip(code_named(coding), tensor)
    if coding == "bf16":
        largest = torch.finfo(torch.bfloat16).max
        expected = tensor.bfloat16().float().clamp(-largest, largest)
    else:
        exponent = torch.frexp(tensor.abs().amax()).exponent if tensor.any() else torch.tensor(15)
        scale = 2.0 ** max(-126, min(126, 15 - int(exponent)))
        largest = (2.0**15 - 2.0**4) / scale if scale == 2.0**-113 else torch.inf
        expected = ((tensor * scale).half().float() / scale).clamp(-largest, largest)
    assert torch.equal(decoded, expected)


@given(codes=arrays(np.uint16, st.integers(1, 50)))
def test_any_sixteen_bits_are_read_as_torch_reads_them(codes: np.ndarray) -> None:
    for coding, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        message = code_named(coding).encode(torch.ones(codes.size), torch.empty(codes.size))
        begin = FRAME_BYTES + 8 * (coding == "fp16")
        message[begin : begin + 2 * codes.size] = torch.from_numpy(codes.copy()).view(torch.uint8)
        decoded = code_named(coding).decode(seal(message, _CODES[coding]), torch.empty(codes.size), name="m")
        scale = 2.0**-14 if coding == "fp16" else 1.0
        expected = torch.from_numpy(codes.copy()).view(dtype).float() * scale
        assert torch.equal(decoded.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@pytest.mark.parametrize("coding", CODINGS)
@given(values=finite)
def test_little_is_dropped(coding: str, values: np.ndarray) -> None:
    _, rest = round_trip(code_named(coding), torch.from_numpy(values.copy()))
    for start in range(0, len(values), 256):
        block = np.abs(values[start : start + 256]).astype(np.float64)
        dropped = np.abs(rest[start : start + 256].double().numpy())
        # int: a bfloat16 scale is up to 2^-7 too large, and the reciprocal it is multiplied by is off by 2^-23.
        reach = block.max(initial=0) * (1 + 2.0**-6) if coding.startswith("int") else block
        # What is far below the largest value of a message is rounded to the last bit of a denormal.
        floor = np.abs(values).max(initial=0) * (2.0**-38 if coding == "fp16" else 2.0**-133)
        assert np.all(dropped <= HALF_UNIT[coding] * reach + max(floor, 2.0**-126))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("largest", [1e-35, 1e-36, 1e-37, 1e-38, 1e-40, 1.4e-45])
def test_tiny_values_stay_values(coding: str, largest: float) -> None:
    """A layer without gradients: its residual shrinks from step to step. The scale's reciprocal was infinite once."""
    values = torch.tensor([largest, 0.0, -largest / 2, 0.0] * 100)
    decoded, rest = round_trip(code_named(coding), values)
    assert torch.equal(decoded.double() + rest.double(), values.double())


@pytest.mark.parametrize("coding", CODINGS)
def test_rest_may_be_the_values_themselves(coding: str) -> None:
    values = torch.randn(700, generator=torch.Generator().manual_seed(0))
    apart = torch.empty(700)
    code = code_named(coding)
    message, kept = code.encode(values, apart), values.clone()
    assert torch.equal(code.encode(kept, kept), message) and torch.equal(kept, apart)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45])
def test_strange_values_make_no_trouble(coding: str, strange: float) -> None:
    """A step with NaN or infinity is not made, but they stay what they are: 8 and 4 bits made 0 of a NaN once."""
    decoded, rest = round_trip(code_named(coding), torch.tensor([1.0, strange, 2.0] * 100))
    assert decoded.numel() == 300
    if np.isfinite(strange):
        assert bool(torch.isfinite(decoded).all())
    elif coding in ("bf16", "fp16"):
        assert not bool(torch.isfinite(decoded[1::3]).any())
        assert bool(decoded[1::3].isnan().all()) is bool(np.isnan(strange))
    else:
        assert bool(decoded.isnan().all()) and bool(rest.isnan().all()), "all of a block that has one"


@pytest.mark.parametrize("coding", ["int8", "int4"])
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
def test_what_is_not_finite_spoils_its_own_block_alone(coding: str, bits: int) -> None:
    values = torch.linspace(-1, 1, 3 * BLOCK)
    clean, clean_rest = round_trip(code_named(coding), values)
    values.view(torch.int32)[BLOCK + 7] = bits - (1 << 32 if bits >> 31 else 0)
    decoded, rest = round_trip(code_named(coding), values)
    for found, expected in ((decoded, clean), (rest, clean_rest)):
        assert bool(found[BLOCK : 2 * BLOCK].isnan().all())
        for part in (slice(0, BLOCK), slice(2 * BLOCK, None)):
            assert torch.equal(found[part], expected[part])


@pytest.mark.parametrize("coding", CODINGS)
@given(count=st.integers(0, 600), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_damage_is_found(coding: str, count: int, seed: int, data: st.DataObject) -> None:
    code = code_named(coding)
    message = code.encode(torch.randn(count, generator=torch.Generator().manual_seed(seed)), torch.empty(count))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CommunicatorError, match="values of bucket 2"):
        code.decode(message, torch.empty(count), name="values of bucket 2")


@pytest.mark.parametrize("coding", CODINGS)
@given(count=st.integers(0, 600), seed=st.integers(0, 2**32 - 1))
def test_fuzz_any_body_decodes_to_as_many_values(coding: str, count: int, seed: int) -> None:
    code = code_named(coding)
    message = torch.randint(
        0, 256, (code.size(count),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    assert code.decode(seal(message, _CODES[coding]), torch.empty(count), name="m").numel() == count


def test_sizes() -> None:
    sizes = {coding: code_named(coding).size(10_000) - FRAME_BYTES for coding in CODINGS}
    exact = {"bf16": 20_000, "fp16": 20_008, "int8": 10_080, "int4": 5_080, "book4": 5_160, "book2": 2_544}
    assert sizes == exact


def test_fp32_is_no_code_and_others_are_refused() -> None:
    assert value_code("fp32") is None
    with pytest.raises(ConfigurationError, match="did you mean 'int8'"):
        value_code("int88")
