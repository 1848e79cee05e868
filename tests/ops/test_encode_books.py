"""encode_books and decode_books: nothing is lost, and all who compute them make the same bytes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.ops.decode_books import _decode
from ringprune.ops.encode_books import _encode
from tests.ops.cases import INSTRUCTIONS, SEEDS, Arguments, Backend, BadCase, assert_same_bits

BLOCK = ops.BOOK_BLOCK
LEVELS = (4, 16)
COUNTS = st.one_of(st.integers(0, 40), st.sampled_from([511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
STYLES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, generator: x,
    "sparse": lambda x, generator: x * (torch.rand(x.numel(), generator=generator) > 0.7),
    "long tails": lambda x, generator: x / torch.rand(x.numel(), generator=generator) ** 3,
    "far from zero": lambda x, generator: x + 5 * x.sign(),
    "few numbers": lambda x, generator: (3 * x).round(),
    "all powers": lambda x, generator: x * torch.randint(-149, 127, (x.numel(),), generator=generator).float().exp2(),
    "tiny": lambda x, generator: x * 2.0**-103,
    "any bits": lambda x, generator: (
        torch.randint(-(2**31), 2**31, (x.numel(),), generator=generator, dtype=torch.int64).int().view(torch.float32)
    ),
}


def drawn(count: int, style: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return STYLES[style](torch.randn(count, generator=generator), generator)


def encoded(backend: Backend, values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Body and rest, on the CPU; the body held something else before."""
    there = values.to(backend.device)
    body = torch.full((ops.book_body_bytes(values.numel(), levels),), 0xA5, dtype=torch.uint8, device=backend.device)
    rest = torch.full_like(there, 7.0)
    backend.op("encode_books")(there, rest, body, levels=levels)
    assert_same_bits(there.cpu(), values)
    return body.cpu(), rest.cpu()


def decoded(backend: Backend, body: Tensor, before: Tensor, levels: int, *, add: bool) -> Tensor:
    """Values made of those before, on the CPU."""
    there = before.clone().to(backend.device)
    backend.op("decode_books")(body.to(backend.device), there, levels=levels, add=add)
    return there.cpu()


@pytest.mark.parametrize("levels", LEVELS)
@given(count=COUNTS, style=st.sampled_from(list(STYLES)), seed=SEEDS)
def test_value_is_level_and_rest(backend: Backend, levels: int, count: int, style: str, seed: int) -> None:
    """Exactly; a block that is not finite is NaN, the level and the rest."""
    values = drawn(count, style, seed)
    body, rest = encoded(backend, values, levels)
    level = decoded(backend, body, torch.ones(count), levels, add=False)
    for value, near, left in zip(*(tensor.double().split(BLOCK) for tensor in (values, level, rest)), strict=True):
        if bool(value.isfinite().all()):
            assert torch.equal(near + left, value)
            assert bool((near * value.sign() >= 0).all()) and bool((near.abs() <= 2 * value.abs()).all())
        else:
            assert bool(near.isnan().all()) and bool(left.isnan().all())


@pytest.mark.parametrize("levels", LEVELS)
@given(count=COUNTS, style=st.sampled_from(list(STYLES)), seed=SEEDS, add=st.booleans())
def test_the_bytes_are_those_of_the_reference(
    backend: Backend, levels: int, count: int, style: str, seed: int, add: bool
) -> None:
    values, reference = drawn(count, style, seed), Backend("reference")
    body, rest = encoded(backend, values, levels)
    for found, expected in zip((body, rest), encoded(reference, values, levels), strict=True):
        assert_same_bits(found, expected)
    noise = torch.randint(0, 256, body.shape, generator=torch.Generator().manual_seed(seed)).byte()
    for each in (body, noise):  # whatever arrives decodes to something, and nothing else is read or written
        found = decoded(backend, each, values, levels, add=add)
        assert_same_bits(found, decoded(reference, each, values, levels, add=add))


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("most", [most for most, _ in INSTRUCTIONS])
def test_instructions_threads_and_addresses_change_nothing(
    instructions: Callable[[int], str], threads: Callable[[int], None], most: int, levels: int
) -> None:
    count = 70 * BLOCK + 1_001
    room = drawn(count + 3, "long tails", 5)
    expected, rest = encoded(Backend("reference"), room[3:], levels)
    whole = decoded(Backend("reference"), expected, room[3:], levels, add=True)
    instructions(most)
    try:
        for number in (1, 3):
            threads(number)
            values, left, body = room.clone()[3:], torch.ones(count + 1)[1:], torch.ones_like(expected)
            ops.encode_books(values, left, body, levels=levels)
            ops.decode_books(body, values, levels=levels, add=True)
            for found, wanted in ((body, expected), (left, rest), (values, whole)):
                assert_same_bits(found, wanted)
    finally:
        instructions(2)


@pytest.mark.parametrize("levels", LEVELS)
def test_the_rest_may_overwrite_the_values(backend: Backend, levels: int) -> None:
    values = drawn(2 * BLOCK + 9, "normal", 1)
    expected, rest = encoded(backend, values, levels)
    there, body = values.clone().to(backend.device), expected.clone().to(backend.device)
    backend.op("encode_books")(there, there, body.zero_(), levels=levels)
    assert_same_bits(body.cpu(), expected)
    assert_same_bits(there.cpu(), rest)


@pytest.mark.parametrize("levels", LEVELS)
@given(count=COUNTS, style=st.sampled_from(list(STYLES)), seed=SEEDS, add=st.booleans())
def test_fuzz_references_write_only_where_they_may(levels: int, count: int, style: str, seed: int, add: bool) -> None:
    """Arrays lie between guards; numba's loops are compiled without checks of bounds."""
    generator = np.random.default_rng(seed)
    blocks, code_bytes = -(-count // BLOCK), -(-count * {16: 4, 4: 2}[levels] // 8)
    books = generator.integers(0, 2**16, (blocks + 2, levels)).astype(np.uint16)
    codes = generator.integers(0, 256, code_bytes + 2).astype(np.uint8)
    guarded = np.full(count + 2, np.float32(77))
    _decode(books[1:-1], codes[1:-1], guarded[1:-1], add)
    assert guarded[0] == guarded[-1] == 77
    before = codes[[0, -1]].copy(), books[[0, -1]].copy()
    codes[1:-1] = 0
    _encode(drawn(count, style, seed).numpy(), books[1:-1], codes[1:-1], guarded[1:-1])
    assert guarded[0] == guarded[-1] == 77
    assert np.array_equal(codes[[0, -1]], before[0]) and np.array_equal(books[[0, -1]], before[1])


def good(levels: int = 4, count: int = 9) -> Arguments:
    """Arguments of encode_books that work."""
    body = torch.zeros(ops.book_body_bytes(count, levels), dtype=torch.uint8)
    return {"values": torch.ones(count), "rest": torch.ones(count), "body": body, "levels": levels}


ROOM = torch.zeros(10)
BAD_VALUES: list[BadCase] = [
    ({"values": torch.ones(18)[::2]}, "values .*contiguous"),
    ({"values": torch.ones(3, 3)}, "values has shape"),
    ({"rest": torch.ones(8)}, "rest has 8 entries; 9 are needed"),
    ({"body": torch.zeros(17, dtype=torch.uint8)}, "body has 17 entries; 16 are needed"),
    ({"body": torch.ones(24, dtype=torch.uint8)[4:20]}, "body does not begin at a multiple of 8 bytes"),
    ({"levels": 8}, "levels is 8; 4 or 16 is needed"),
    ({"values": ROOM[1:], "rest": ROOM[:9]}, "rest shares memory with values"),
    ({"values": ROOM[:9], "body": ROOM[:4].view(torch.uint8)}, "body shares memory with values"),
    ({"rest": ROOM[:9], "body": ROOM[6:].view(torch.uint8)}, "body shares memory with rest"),
]
BAD_TYPES: list[BadCase] = [
    ({"values": torch.ones(9).half()}, "values is (float16|Half)"),
    ({"rest": torch.ones(9).double()}, "rest is (float64|Double)"),
    ({"body": torch.zeros(16).int()}, "body is (int32|Int)"),
]


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES] + [(*case, ArgumentTypeError) for case in BAD_TYPES],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = good() | {"body": torch.full((16,), 7, dtype=torch.uint8)} | change
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    with pytest.raises(error, match=f"encode_books: .*{message}"):
        ops.encode_books(**arguments)
    if "rest" not in change:  # decode_books takes the rest as the bytes and the values
        arguments.pop("rest")
        with pytest.raises(error, match=f"decode_books: .*({message}|values shares memory with body)"):
            ops.decode_books(**arguments, add=False)
    for name, value in before.items():
        assert_same_bits(arguments.get(name, value), value)


def test_no_values_are_no_bytes(backend: Backend) -> None:
    body, rest = encoded(backend, torch.empty(0), 4)
    assert body.numel() == rest.numel() == 0
    assert decoded(backend, body, torch.empty(0), 4, add=True).numel() == 0


@pytest.mark.parametrize("levels", LEVELS)
def test_opcheck(levels: int) -> None:
    given = good(levels, BLOCK + 5)
    numbers = {"levels": given.pop("levels")}
    torch.library.opcheck(torch.ops.ringprune.encode_books.default, tuple(given.values()), numbers)
    arguments = (given["body"], given["values"])
    torch.library.opcheck(torch.ops.ringprune.decode_books.default, arguments, {**numbers, "add": True})
