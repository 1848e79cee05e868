"""Every instruction set gives the bits of the torch references; test_accumulate_select has that op's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprune import ops
from tests.ops.cases import FLOATS, FLOATS_AND_DOUBLE, INSTRUCTIONS, STYLES, Backend, assert_same_bits, fill
from tests.ops.definitions import SCORES

NUMELS = (2_600, 1, 0, 513, 64)
STREAMED = (1_000_003, 7, 0, 3_300_001, 1_000)
"""So many entries that results go past the caches; tensors start anywhere in a cache line."""


def tensors(style: str, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """Blocks of 512 and parts of them, in every dtype."""
    return [fill((numel,), dtype, style, i) for i, dtype in enumerate(dtypes) for numel in NUMELS]


def accumulated(op: Callable[..., Tensor], style: str, grads: list[Tensor]) -> list[Tensor]:
    numel, count = sum(grad.numel() for grad in grads), len(grads)
    residual, velocity, residual_out, velocity_out = (fill((numel,), torch.float32, style, i) for i in range(4))
    numbers = {"factors": [1 / 3] * count, "momentum": [0.9] * count, "nesterov": [i % 2 == 0 for i in range(count)]}
    nonfinite = op(grads, residual, velocity, residual_out=residual_out, velocity_out=velocity_out, **numbers)
    return [nonfinite, residual_out, velocity_out]


def accumulate(op: Callable[..., Tensor], style: str) -> list[Tensor]:
    return accumulated(op, style, tensors(style, FLOATS))


def accumulate_past_the_caches(op: Callable[..., Tensor], style: str) -> list[Tensor]:
    return accumulated(op, style, [fill((numel,), torch.float32, style, 4) for numel in STREAMED])


def importance(op: Callable[..., Tensor], style: str) -> list[Tensor]:
    weights = tensors(style, FLOATS)
    residual = fill((sum(weight.numel() for weight in weights),), torch.float32, style, 7)
    parameters = [0.0, 1e-8, 0.1] * len(NUMELS)
    return [op(residual, weights, score=score, parameters=parameters) for score in SCORES]


def of_tensors(op: Callable[..., Tensor], style: str) -> list[Tensor]:
    return [op(tensors(style, FLOATS_AND_DOUBLE))]


def select(op: Callable[..., Tensor], style: str) -> list[Tensor]:
    scores = fill((40_000,), torch.float32, style, 1)
    return [op(scores, [0, 600, 600, 7_000, 40_000], [count, 0, 10 * count, 50 * count]) for count in (1, 7, 300)]


def put(op: Callable[..., None], style: str) -> list[Tensor]:
    outputs = tensors(style, FLOATS)
    indices = torch.arange(0, sum(output.numel() for output in outputs), 3, dtype=torch.int32)
    op(outputs, indices, fill((indices.numel(),), torch.float32, style, 1))
    return outputs


def put_past_the_caches(op: Callable[..., None], style: str) -> list[Tensor]:
    outputs = [torch.full((numel,), 7.0) for numel in STREAMED]
    indices = torch.arange(0, sum(STREAMED), 31, dtype=torch.int32)
    op(outputs, indices, fill((indices.numel(),), torch.float32, style, 1))
    return outputs


CALLS: dict[str, Callable[[Callable[..., Any], str], list[Tensor]]] = {
    "accumulate": accumulate,
    "accumulate past the caches": accumulate_past_the_caches,
    "importance": importance,
    "square_sum": of_tensors,
    "count_nonfinite": of_tensors,
    "select": select,
    "put": put,
    "put past the caches": put_past_the_caches,
}


@pytest.mark.parametrize(("most", "name"), INSTRUCTIONS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("style", STYLES)
def test_every_instruction_set_gives_the_bits_of_the_reference(
    instructions: Callable[[int], str], most: int, name: str, call: str, style: str
) -> None:
    if instructions(most) != name:
        pytest.skip(f"this processor has no {name}")
    op = call.split()[0]
    found = CALLS[call](getattr(ops, op), style)
    for got, wanted in zip(found, CALLS[call](Backend("reference").op(op), style), strict=True):
        assert_same_bits(got, wanted)
