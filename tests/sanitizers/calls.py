"""Random calls that the kernels must take, each compared with the torch reference."""

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ringprune.ops import book_body_bytes
from tests.ops.cases import assert_same_bits, bits
from tests.sanitizers.values import FLOATS, STREAMED, Values

__all__ = ["GENERATORS", "Arguments", "check_bits", "compare", "tensors_of"]

Arguments: TypeAlias = dict[str, Any]
SCORES = ("ratio", "magnitude", "sum", "product")
REMEMBERED = ("hints", "tally")  # the references leave them alone


def accumulate(values: Values, large: float, streamed: float = 0.02) -> Iterator[Arguments]:
    """Gradients, residual, velocity."""
    choice = values.choice
    grads = _tensors(values, large, streamed=streamed)
    count, numel = len(grads), sum(grad.numel() for grad in grads)
    residual = values.tensor(numel)
    velocity = values.tensor(numel) if choice.random() < 0.6 else None
    in_place = choice.random() < 0.5
    yield {
        "grads": grads,
        "residual": residual,
        "velocity": velocity,
        "residual_out": residual if in_place else values.tensor(numel),
        "velocity_out": velocity if in_place or velocity is None else values.tensor(numel),
        "factors": [choice.choice((1.0, 1 / 3, 0.0, -2.0, 1e30, 1e-30)) for _ in grads],
        "momentum": [choice.choice((0.9, 1.0, 0.0, 1 / 3)) for _ in range(count)],
        "nesterov": [choice.random() < 0.5 for _ in range(count)],
    } | _sent(values, grads)


def _sent(values: Values, grads: list[Tensor]) -> Arguments:
    """Perhaps something was sent of the state before; some tensors whole."""
    if values.choice.random() < 0.5:
        return {}
    offsets = [0, *itertools.accumulate(grad.numel() for grad in grads)]
    sent = _some_whole(values, values.ascending(offsets[-1]), offsets)
    rest = values.tensor(sent.numel()) if values.choice.random() < 0.6 else None
    return {"sent": sent, "rest": rest, "masks": values.choice.random() < 0.6}


def accumulate_select(values: Values, large: float) -> Iterator[Arguments]:
    """One to six steps that remember hints; scores grow and shrink, and hints are damaged, in between."""
    choice = values.choice
    given = next(accumulate(values, large, 0.001))
    grads, residual, velocity = given["grads"], given["residual_out"], given["velocity_out"]
    numels = [grad.numel() for grad in grads]
    given |= {
        "weights": [values.tensor(n, choice.choice(FLOATS), shaped=True) for n in numels],
        "score": choice.choice(SCORES),
        "parameters": [choice.choice((0.0, 1e-8, 0.1, 1e30)) for _ in grads],
        "counts": values.counts(numels),
        "hints": values.place(torch.zeros(2 * len(grads), dtype=torch.int32)),
        "tally": values.place(torch.zeros(4, dtype=torch.int64)),
    }
    growth = choice.choice((1.0, 1.0, 1.1, 0.5, 3.0, 1e-3, 1e3))
    for _ in range(choice.randint(1, 6)):
        if choice.random() < 0.2:
            given["hints"].copy_(values.bits(2 * len(grads)))
        if choice.random() < 0.1:
            given["counts"] = values.counts(numels)
        shape = (len(grads), 2) if choice.random() < 0.5 else (-1,)
        yield given | {"hints": given["hints"].view(shape)}
        if choice.random() < 0.5:
            given |= {"residual": residual, "velocity": velocity}  # in place from now on
        if choice.random() < 0.7:
            residual[residual.abs() > residual.abs().nanmean()] = 0.0
        for grad in grads:
            grad.mul_(growth)


def importance(values: Values, large: float) -> Iterator[Arguments]:
    """Residual and weights."""
    weights = _tensors(values, large)
    parameters = [values.choice.choice((0.0, 1e-8, 0.1, 1e30)) for _ in weights]
    residual = values.tensor(sum(weight.numel() for weight in weights))
    yield {"residual": residual, "weights": weights, "score": values.choice.choice(SCORES), "parameters": parameters}


def select(values: Values, large: float) -> Iterator[Arguments]:
    """Scores of either sign."""
    offsets = values.offsets(values.numel(large))
    counts = values.counts(end - start for start, end in pairwise(offsets))
    yield {"scores": values.tensor(offsets[-1]), "offsets": offsets, "counts": counts}


def take(values: Values, large: float) -> Iterator[Arguments]:
    """Some tensors are taken whole."""
    offsets = values.offsets(values.numel(large))
    numel = offsets[-1]
    indices = _some_whole(values, values.ascending(numel), offsets)
    velocity = values.tensor(numel) if values.choice.random() < 0.5 else None
    yield {"residual": values.tensor(numel), "velocity": velocity, "indices": indices, "offsets": offsets}


def _some_whole(values: Values, indices: Tensor, offsets: list[int]) -> Tensor:
    """The same indices, and all of some tensors besides."""
    for start, end in pairwise(offsets):
        if values.choice.random() < 0.2:
            indices = values.place(torch.cat([indices, torch.arange(start, end).int()]).unique())
    return indices


def gather(values: Values, large: float) -> Iterator[Arguments]:
    """Some indices, or none."""
    residual = values.tensor(values.numel(large))
    yield {"residual": residual, "indices": values.ascending(residual.numel())}


def give_back(values: Values, large: float) -> Iterator[Arguments]:
    """Values at some indices."""
    residual = values.tensor(values.numel(large))
    indices = values.ascending(residual.numel())
    yield {"residual": residual, "indices": indices, "values": values.tensor(indices.numel())}


def put(values: Values, large: float) -> Iterator[Arguments]:
    """Outputs hold anything before."""
    outputs = _tensors(values, large, streamed=0.02)
    indices = values.ascending(sum(output.numel() for output in outputs))
    yield {"outputs": outputs, "indices": indices, "values": values.tensor(indices.numel())}


def share_momentum(values: Values, large: float) -> Iterator[Arguments]:
    """Averages that are mostly zero, of SGD or Adam."""
    averages = [average.mul_(values.normal(average.numel()) > 0.5) for average in _floats(values, large)]
    numels = [average.numel() for average in averages]
    adams = numels if values.choice.random() < 0.6 else []

    def numbers(*some: float) -> list[float]:
        return [values.choice.choice(some) for _ in adams]

    yield {
        "averages": averages,
        "elapsed": [values.tensor(n, shaped=True) for n in numels],
        "momenta": [values.tensor(n, values.choice.choice(FLOATS), shaped=True) for n in numels],
        "weights": [values.tensor(n, shaped=True) for n in numels],
        "owns": [values.tensor(n, shaped=True) for n in numels],
        "intervals": [values.choice.choice((0.1, 0.0, 1e-30, 1e30, -1.0)) for _ in numels],
        "times": [values.choice.choice((0.1, 0.0, 1e-30, 1e30, -1.0)) for _ in numels],
        "keeps": [values.choice.choice((1.0, 0.0, 0.3, 1e30)) for _ in numels],
        "whole": [values.choice.random() < 0.3 for _ in numels],
        "squares": [values.tensor(n, values.choice.choice(FLOATS), shaped=True) for n in adams],
        "decays": numbers(0.0, 0.01, -1.0, 1e30),
        "roots": numbers(0.03, 1.0, 0.0),
        "epsilons": numbers(1e-8, 0.0, 1e30),
        "factors": numbers(0.1, 1.0, 0.0),
    }


def _floats(values: Values, large: float) -> list[Tensor]:
    """One to six float32 tensors of one dimension."""
    return [tensor.reshape(-1) for tensor in _tensors(values, large, (torch.float32,))]


def encode_books(values: Values, large: float) -> Iterator[Arguments]:
    """Values of any size, whose rest may overwrite them."""
    numbers, levels = values.tensor(values.numel(large)), values.choice.choice((4, 16))
    rest = numbers if values.choice.random() < 0.3 else values.tensor(numbers.numel())
    yield {"values": numbers, "rest": rest, "body": _body(values, numbers.numel(), levels), "levels": levels}


def decode_books(values: Values, large: float) -> Iterator[Arguments]:
    """Any bytes."""
    numbers, levels = values.tensor(values.numel(large)), values.choice.choice((4, 16))
    body = _body(values, numbers.numel(), levels)
    yield {"body": body, "values": numbers, "levels": levels, "add": values.choice.random() < 0.5}


def _body(values: Values, count: int, levels: int) -> Tensor:
    words = values.place(
        torch.randint(-(2**62), 2**62, (book_body_bytes(count, levels) // 8,), generator=values.generator)
    )
    return words.view(torch.uint8)


def tensors_alone(values: Values, large: float) -> Iterator[Arguments]:
    """What square_sum and count_nonfinite take."""
    yield {"tensors": _tensors(values, large, (*FLOATS, torch.float64))}


GENERATORS: dict[str, Callable[[Values, float], Iterator[Arguments]]] = {
    "accumulate": accumulate,
    "accumulate_select": accumulate_select,
    "importance": importance,
    "select": select,
    "take": take,
    "gather": gather,
    "give_back": give_back,
    "put": put,
    "share_momentum": share_momentum,
    "encode_books": encode_books,
    "decode_books": decode_books,
    "square_sum": tensors_alone,
    "count_nonfinite": tensors_alone,
}


def _tensors(
    values: Values, large: float, dtypes: tuple[torch.dtype, ...] = FLOATS, streamed: float = 0.0
) -> list[Tensor]:
    """One to six tensors of mixed dtypes; with probability ``streamed`` so many entries that they pass the caches."""
    number = values.choice.randint(1, 6)
    sizes = [values.numel(large / number) for _ in range(number)]
    if values.choice.random() < streamed:
        sizes[0] = STREAMED + values.choice.randint(-1, 1000)
    return [values.tensor(n, values.choice.choice(dtypes), shaped=True) for n in sizes]


def tensors_of(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments, with its name."""
    for name, value in arguments.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Tensor):
                yield name, each


def _copied(arguments: Arguments) -> Arguments:
    """Copies of all tensors; what was one tensor is one again."""
    copies = {id(tensor): tensor.clone() for _, tensor in tensors_of(arguments)}

    def copy(value: object) -> Any:
        return [copy(each) for each in value] if isinstance(value, list) else copies.get(id(value), value)

    return {name: copy(value) for name, value in arguments.items()}


def compare(op: str, arguments: Arguments, threads: int, counter: Counter[str]) -> None:
    """Make the call; results, and all that was or was not written, are those of the reference."""
    expected = _copied(arguments)
    torch.set_num_threads(threads)
    found = getattr(torch.ops.ringprune, op)(**arguments)
    torch.set_num_threads(1)  # for the reference
    counter[op] += 1
    wanted = getattr(importlib.import_module(f"ringprune.ops.{op}"), f"{op}_reference")(**expected)
    for left, right in zip(_sequence(found), _sequence(wanted), strict=True):
        check_bits(left, right)
    for (name, left), (_, right) in zip(tensors_of(arguments), tensors_of(expected), strict=True):
        if name not in REMEMBERED:
            check_bits(left, right)


def check_bits(left: Tensor, right: Tensor) -> None:
    """As :func:`assert_same_bits`, which is slow, where they differ; and fast where they are the same."""
    if left.dtype != right.dtype or left.shape != right.shape or not np.array_equal(bits(left), bits(right)):
        assert_same_bits(left, right)


def _sequence(results: object) -> tuple[Any, ...]:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)
