"""What was sent leaves with the next pass: to the bit as if take and give_back had let it leave before."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.ops.accumulate import check_accumulation
from tests.ops.cases import (
    INSTRUCTIONS,
    Arguments,
    Backend,
    BadCase,
    assert_same_bits,
    fill,
    flat_tensors,
    index_sets,
    moved,
    tensor_lists,
)

Sent = ops.Sent
DRAWN = st.sampled_from([1.0, 1 / 3, 0.0, -2.5])


def arguments_of(backend: Backend, sent: Sent | None) -> Arguments:
    """As the public function takes it, or the reference."""
    if backend.name != "reference":
        return {"sent": sent}
    return {} if sent is None else {"sent": sent.indices, "rest": sent.rest, "masks": sent.masks}


def left(residual: Tensor, velocity: Tensor | None, sent: Sent, offsets: list[int]) -> tuple[Tensor, Tensor | None]:
    """Copies of the state that what was sent has left, by the ops that do it at once."""
    residual, velocity = residual.clone(), None if velocity is None else velocity.clone()
    ops.take(residual, velocity if sent.masks else None, sent.indices, offsets)
    if sent.rest is not None:
        ops.give_back(residual, sent.indices, sent.rest)
    return residual, velocity


def shifted(like: Tensor, entries: int) -> Tensor:
    """A tensor to write to, of which the first entries lie in a line of memory with others."""
    return torch.full((like.numel() + entries,), 7.0, device=like.device)[entries:]


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def check(
    backend: Backend,
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    sent: Sent,
    *,
    in_place: bool,
    select: Arguments | None = None,
    **numbers: list[Any],
) -> None:
    """Make the pass with what was sent, and without on a state that it has left: results are the same."""
    op = backend.op("accumulate_select" if select is not None else "accumulate")
    to = backend.device
    grads, residual, velocity = [grad.to(to) for grad in grads], residual.to(to), _to(velocity, to)
    sent = Sent(sent.indices.to(to), _to(sent.rest, to), sent.masks)

    def made(residual: Tensor, velocity: Tensor | None, sent: Sent | None) -> list[Tensor]:
        before = residual.clone(), None if velocity is None else velocity.clone()
        out, velocity_out = residual, velocity
        if not in_place:  # anywhere between two lines of memory
            out, velocity_out = shifted(residual, 5), None if velocity is None else shifted(velocity, 13)
        weights, more = [], {}
        if select is not None:
            hints = ops.Hints.none(len(grads), residual.device)
            hints.keys.copy_(select["hints"])
            more = {key: value for key, value in select.items() if key not in ("weights", "hints")}
            more |= {"hints": hints.keys, "tally": hints.tally} if backend.name == "reference" else {"hints": hints}
            weights = [[weight.to(to) for weight in select["weights"]]]
        given = {"residual_out": out, "velocity_out": velocity_out} | numbers | more | arguments_of(backend, sent)
        result = op(grads, residual, velocity, *weights, **given)
        if not in_place:
            assert_same_bits(residual, before[0])
            if velocity is not None:
                assert_same_bits(velocity, before[1])
        results = list(result) if isinstance(result, tuple) else [result]
        return [*results, out, *([] if velocity_out is None else [velocity_out])]

    offsets = [0, *accumulate(grad.numel() for grad in grads)]
    wanted = made(*left(residual, velocity, sent, offsets), None)
    found = made(residual.clone(), None if velocity is None else velocity.clone(), sent)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@st.composite
def sets(draw: st.DrawFn, grads: list[Tensor]) -> Sent:
    """What may have been sent of tensors: some of them whole, with a rest or without."""
    offsets = [0, *accumulate(grad.numel() for grad in grads)]
    indices = draw(index_sets(offsets[-1]))
    for start, end in pairwise(offsets):
        if draw(st.booleans()):
            indices = torch.cat([indices, torch.arange(start, end).int()]).unique()
    return Sent(indices, draw(st.none() | flat_tensors(indices.numel())), draw(st.booleans()))


@pytest.mark.parametrize("selecting", [False, True])
@given(data=st.data())
def test_small_buckets(backend: Backend, selecting: bool, data: st.DataObject) -> None:
    grads = data.draw(tensor_lists())
    tensors, numel = len(grads), sum(grad.numel() for grad in grads)
    several = {"min_size": tensors, "max_size": tensors}
    select = None
    if selecting:
        select = {
            "weights": [fill(tuple(grad.shape), torch.float32, "normal", i) for i, grad in enumerate(grads)],
            "score": data.draw(st.sampled_from(["ratio", "magnitude", "sum", "product"])),
            "parameters": data.draw(st.lists(st.sampled_from([0.0, 0.1]), **several)),
            "counts": [data.draw(st.integers(0, grad.numel())) for grad in grads],
            "hints": torch.zeros(tensors, 2, dtype=torch.int32),
        }
    check(
        backend,
        grads,
        data.draw(flat_tensors(numel)),
        data.draw(st.none() | flat_tensors(numel)),
        data.draw(sets(grads)),
        in_place=data.draw(st.booleans()),
        select=select,
        factors=data.draw(st.lists(DRAWN, **several)),
        momentum=data.draw(st.lists(DRAWN, **several)),
        nesterov=data.draw(st.lists(st.booleans(), **several)),
    )


FEW, MANY = [50_003, 2, 61, 0, 40_001], [1_000_003, 2, 61, 0, 3_300_001]
"""Entries of tensors: together so many that the CPU's kernels write results apart from the inputs past the caches."""


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.0001, 0.01, 0.7])
def test_large_buckets(
    backend: Backend, density: float, nesterov: bool, in_place: bool, threads: Callable[[int], None]
) -> None:
    """Runs begin and end anywhere between entries that were sent, on any number of threads, with a hint or without."""
    generator = torch.Generator().manual_seed(0)
    numels = MANY if backend.name == "native" and not in_place else FEW
    numel = sum(numels)
    grads = [torch.randn(n, generator=generator) for n in numels]
    state = torch.randn(numel, generator=generator)
    indices = (torch.rand(numel, generator=generator) < density).nonzero().reshape(-1).int()
    indices = torch.cat([indices, torch.arange(numels[0], numels[0] + 63, dtype=torch.int32)]).unique()  # two whole
    sent = Sent(indices, torch.randn(indices.numel(), generator=generator), masks=True)
    count = len(numels)
    numbers = {"factors": [0.5] * count, "momentum": [0.9] * count, "nesterov": [nesterov] * count}
    select = {
        "weights": [torch.randn(n, generator=generator) for n in numels],
        "score": "ratio",
        "parameters": [0.05] * count,
        "counts": [n // 100 for n in numels],
        "hints": torch.zeros(count, 2, dtype=torch.int32),
    }
    for number in (1,) if backend.has_cuda_kernels else (1, 3):
        threads(number)
        check(backend, grads, state, state.flip(0), sent, in_place=in_place, **numbers)
        check(backend, grads, state, state.flip(0), sent, in_place=in_place, select=select, **numbers)
        if backend.name == "native":  # what the call has remembered of these scores fits the same call
            hints = ops.Hints.none(count, state.device)
            remembered = {key: value for key, value in select.items() if key != "hints"}
            outs = {"residual_out": torch.empty_like(state), "velocity_out": torch.empty_like(state)}
            ops.accumulate_select(grads, state, state.flip(0), **remembered, **outs, **numbers, hints=hints, sent=sent)
            select["hints"] = hints.keys


@pytest.mark.parametrize(("most", "name"), INSTRUCTIONS)
@pytest.mark.parametrize(("with_velocity", "masks"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("with_rest", [False, True])
def test_what_was_sent_of_results_that_go_past_the_caches(
    instructions: Callable[[int], str], most: int, name: str, with_velocity: bool, masks: bool, with_rest: bool
) -> None:
    """They are made in pieces on every instruction set; what is gone of a piece is mended before it is stored."""
    if instructions(most) != name:
        pytest.skip(f"this processor has no {name}")
    generator = torch.Generator().manual_seed(1)
    numels = MANY
    grads = [torch.randn(n, generator=generator) for n in numels]
    grads[0], grads[-1] = grads[0].half(), grads[-1].bfloat16()  # widened block by block
    state = torch.randn(sum(numels), generator=generator)
    indices = (torch.rand(state.numel(), generator=generator) < 0.02).nonzero().reshape(-1).int()
    rest = torch.randn(indices.numel(), generator=generator) if with_rest else None
    numbers = {"factors": [0.5] * 5, "momentum": [0.9] * 5, "nesterov": [True, False, True, False, True]}
    velocity = state.flip(0) if with_velocity else None
    check(Backend("native"), grads, state, velocity, Sent(indices, rest, masks), in_place=False, **numbers)


def good() -> Arguments:
    """Arguments that work: two tensors of 2 and 3 entries."""
    return {
        "grads": [torch.ones(2), torch.ones(3)],
        "residual": torch.ones(5),
        "velocity": torch.ones(5),
        "residual_out": torch.ones(5),
        "velocity_out": torch.ones(5),
        "factors": [1.0, 1.0],
        "momentum": [0.9, 0.9],
        "nesterov": [False, True],
    }


def at(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


MEMORY = torch.ones(16)
BAD_FOR_HOSTS: list[BadCase] = [
    ({"sent": at(0, 5)}, r"sent\[1\] = 5 is not in \[0, 5\)"),
    ({"sent": at(-1)}, r"sent\[0\] = -1 is not in \[0, 5\)"),
    ({"sent": at(1, 3, 3)}, r"sent\[2\] = 3 is not above sent\[1\] = 3"),
]
BAD_VALUES: list[BadCase] = [
    ({"sent": at(1, 3)[None]}, "sent has shape"),
    ({"sent": at(1, 2, 3, 4)[::2]}, "sent .*contiguous"),
    ({"sent": at(1, 3), "rest": torch.ones(3)}, "rest has 3 entries; 2 are needed"),
    ({"rest": torch.ones(3)}, "rest is what is left where something was sent; sent is None"),
    ({"sent": MEMORY[:2].view(torch.int32), "residual_out": MEMORY[:5]}, "residual_out shares memory with sent"),
    ({"sent": at(0), "rest": MEMORY[4:5], "velocity_out": MEMORY[:5]}, "velocity_out shares memory with rest"),
]
BAD_TYPES: list[BadCase] = [
    ({"sent": at(1, 3).long()}, "sent is (int64|Long)"),
    ({"sent": at(1, 3), "rest": torch.ones(2).double()}, "rest is (float64|Double)"),
]


def assert_refused(backend: Backend, change: Arguments, message: str, errors: tuple[type[Exception], ...]) -> None:
    """The arguments with this change are refused in these words, and nothing is written."""
    MEMORY.fill_(1.0)
    MEMORY[:2].view(torch.int32).copy_(at(0, 1))  # positions that would do, but for where they lie
    arguments = moved(good() | change, backend.device)
    written = arguments["residual_out"], arguments["velocity_out"]
    before = [tensor.clone() for tensor in written]
    if backend.name == "reference":
        with pytest.raises(errors, match=message):
            check_accumulation("accumulate", **arguments)
            backend.op("accumulate")(**arguments)
    else:
        with pytest.raises(errors, match=f"accumulate: {message}"):
            torch.ops.ringprune.accumulate(**arguments)
    for tensor, old in zip(written, before, strict=True):
        assert_same_bits(tensor, old)


@pytest.mark.parametrize(
    ("change", "message", "errors"),
    [(*case, (ConfigurationError, ValueError)) for case in BAD_VALUES]
    + [(*case, (ArgumentTypeError, TypeError)) for case in BAD_TYPES],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    backend: Backend, change: Arguments, message: str, errors: tuple[type[Exception], ...]
) -> None:
    assert_refused(backend, change, message, errors)


@pytest.mark.parametrize(("change", "message"), BAD_FOR_HOSTS)
def test_bad_indices_are_named_and_nothing_is_written(host: Backend, change: Arguments, message: str) -> None:
    assert_refused(host, change, message, (ConfigurationError, ValueError))


@pytest.mark.parametrize("selecting", [False, True])
def test_opcheck(selecting: bool) -> None:
    arguments = good() | {"sent": at(1, 2), "rest": torch.ones(2), "masks": True}
    positional = [arguments.pop(name) for name in ("grads", "residual", "velocity")]
    op = torch.ops.ringprune.accumulate.default
    if selecting:
        op = torch.ops.ringprune.accumulate_select.default
        positional.append([torch.ones(2), torch.ones(3)])
        arguments |= {"score": "ratio", "parameters": [0.1, 0.1], "counts": [1, 1]}
        arguments |= {"hints": torch.zeros(2, 2, dtype=torch.int32), "tally": torch.zeros(4, dtype=torch.int64)}
    torch.library.opcheck(op, positional, arguments)
