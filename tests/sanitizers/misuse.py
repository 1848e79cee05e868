"""Calls that the kernels must refuse: arguments that work, with one thing broken. Nothing is written then."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.sanitizers.calls import Arguments, check_bits, tensors_of
from tests.sanitizers.values import Values

__all__ = ["BREAKS", "refuse"]

Break: TypeAlias = Callable[[Values, str, Any], Any]
"""Given an argument's name and value, returns the value broken; None where this cannot be done to it."""

LISTS = ("grads", "weights", "outputs", "tensors", "averages", "elapsed", "momenta", "owns", "squares")
FREE_LENGTH = ("outputs", "tensors", "indices", "sent")  # one more or less may be another call that works
OPTIONAL = ("sent", "rest")
STILL_FITS = (
    ("take", "velocity", "missing"),
    ("give_back", "residual", "length"),
    ("gather", "residual", "length"),
    ("decode_books", "values", "length"),
)
NUMBERS = ("factors", "momentum", "parameters", "intervals", "decays", "roots", "epsilons")
# What is written, and what it must not share memory with.
APART = {
    "accumulate": (
        "residual_out residual",
        "residual_out velocity",
        "residual_out grads",
        "velocity_out residual",
        "residual_out sent",
        "velocity_out rest",
    ),
    "accumulate_select": (
        "residual_out weights",
        "velocity_out grads",
        "residual_out hints",
        "residual_out rest",
        "hints tally",
    ),
    "take": ("residual velocity", "residual indices", "velocity indices"),
    "give_back": ("residual indices", "residual values"),
    "put": ("outputs indices", "outputs values", "outputs outputs"),
    "encode_books": ("rest values", "body values", "body rest"),
    "decode_books": ("values body",),
    "share_momentum": (
        "elapsed averages",
        "momenta averages",
        "elapsed momenta",
        "momenta momenta",
        "elapsed elapsed",
        "elapsed weights",
        "momenta owns",
        "momenta squares",
    ),
}


def _tensor(change: Callable[[Values, str, Tensor], Tensor | None]) -> Break:
    """Changes a tensor, or one of a list."""

    def broken(values: Values, name: str, given: Any) -> Any:
        if isinstance(given, Tensor):
            return change(values, name, given)
        if name not in LISTS or not given:
            return None
        i = values.choice.randrange(len(given))
        changed = change(values, name, given[i])
        return None if changed is None else [*given[:i], changed, *given[i + 1 :]]

    return broken


def _length(values: Values, name: str, tensor: Tensor) -> Tensor | None:
    numel = max(0, tensor.numel() + values.choice.choice((-1, 1, 64, -tensor.numel())))
    same = name in FREE_LENGTH or numel == tensor.numel()
    return None if same else torch.ones(numel, dtype=tensor.dtype)


def _strided(values: Values, name: str, tensor: Tensor) -> Tensor | None:
    return None if tensor.numel() < 2 else tensor.reshape(-1).repeat_interleave(2)[::2]


def _freed(values: Values, name: str, tensor: Tensor) -> Tensor | None:
    """Its memory has been given back, in whole or in part, as sharding wrappers do between steps."""
    changed = tensor.clone()
    left = values.choice.choice((0, tensor.element_size() * max(0, tensor.numel() - 1)))
    changed.untyped_storage().resize_(left)
    return changed if tensor.numel() else None


def _dtype(values: Values, name: str, tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64 if tensor.dtype is torch.int32 else torch.complex64)


def _shape(values: Values, name: str, tensor: Tensor) -> Tensor | None:
    return None if name in (*LISTS, "hints") else tensor[:, None]


def _device(values: Values, name: str, tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _missing(values: Values, name: str, given: Any) -> Any:
    if not isinstance(given, Tensor) or name in OPTIONAL:
        return None
    return [None]  # in a list, for None says that nothing can be broken


def _lists(values: Values, name: str, given: Any) -> Any:
    if not isinstance(given, list) or not given or name in FREE_LENGTH:
        return None
    if name == "offsets":
        return values.choice.choice(([], [*given, given[-1] + 1], [1, *given], [-1, *given], [*given, 2**40]))
    return values.choice.choice((given[:-1], given + given[:1]))


def _numbers(values: Values, name: str, given: Any) -> Any:
    wrong = [float("nan"), float("inf"), -float("inf"), 1e39, 1e300] + [-1.0] * (name == "parameters")
    return _replaced(values, given, wrong) if name in NUMBERS and given else None


def _integers(values: Values, name: str, given: Any) -> Any:
    wrong = [-1, -(2**63), 2**63 - 1, 2**32, -(2**62)]
    return _replaced(values, given, wrong) if name in ("offsets", "counts") else None


def _replaced(values: Values, given: list[Any], wrong: list[Any]) -> list[Any]:
    i = values.choice.randrange(len(given))
    return [*given[:i], values.choice.choice(wrong), *given[i + 1 :]]


def _indices(values: Values, name: str, given: Any) -> Any:
    if name not in ("indices", "sent") or given.numel() == 0:
        return None
    broken = given.clone()
    i = values.choice.randrange(given.numel())
    broken[i] = values.choice.choice((-1, -(2**31), 2**31 - 1, *([int(given[i - 1])] if i else [])))
    return broken


def _score(values: Values, name: str, given: Any) -> Any:
    return values.choice.choice(("", "ratios", "Ratio", "\0", "x" * 10_000)) if name == "score" else None


BREAKS: dict[str, Break] = {
    "length": _tensor(_length),
    "strided": _tensor(_strided),
    "freed": _tensor(_freed),
    "dtype": _tensor(_dtype),
    "shape": _tensor(_shape),
    "device": _tensor(_device),
    "missing": _missing,
    "lists": _lists,
    "numbers": _numbers,
    "integers": _integers,
    "indices": _indices,
    "score": _score,
}


def _shared(values: Values, pair: list[str], arguments: Arguments) -> Arguments | None:
    """Two tensors that must lie apart get memory in common."""
    chosen = []
    for name in pair:
        tensors = [tensor for other, tensor in tensors_of(arguments) if other == name and tensor.numel()]
        chosen += [(name, values.choice.choice(tensors))] if tensors else []
    if len(chosen) < 2 or chosen[0][1] is chosen[1][1]:
        return None
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in chosen]
    room = torch.zeros(sum(sizes), dtype=torch.uint8)
    starts = [0, values.choice.randrange(0, sizes[0], 8)]
    if pair in (["residual_out", "residual"], ["rest", "values"]) and starts[1] == 0:
        return None  # in place
    views = {}
    for (_, tensor), size, start in zip(chosen, sizes, starts, strict=True):
        views[id(tensor)] = room[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def moved(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [moved(name, each) for each in value]
        return views.get(id(value), value) if name in pair else value

    return {name: moved(name, value) for name, value in arguments.items()}


def refuse(op: str, arguments: Arguments, values: Values, counter: Counter[str]) -> None:
    """Break the arguments in one way; the call is refused and writes nothing."""
    if values.choice.random() < 0.1:
        name, kind = values.choice.choice(APART.get(op, ("",))), "shared memory"
        changed = _shared(values, name.split(), arguments)
    else:
        name, kind = values.choice.choice(list(arguments)), values.choice.choice(list(BREAKS))
        broken = None if arguments[name] is None else BREAKS[kind](values, name, arguments[name])
        changed = None if broken is None else arguments | {name: None if kind == "missing" else broken}
        if (op, name, kind) in STILL_FITS:
            return
    if changed is None:
        return
    whole = [tensor for _, tensor in tensors_of(changed) if tensor.device.type == "cpu" and _has_memory(tensor)]
    before = [tensor.clone() for tensor in whole]
    try:
        getattr(torch.ops.ringprune, op)(**changed)
    except (ValueError, TypeError, RuntimeError):
        counter[f"{op} refused"] += 1
    else:  # what is on no device is computed without values
        assert kind == "device", f"{op} took what is broken: {kind} of {name}"
    for left, right in zip(whole, before, strict=True):
        check_bits(left, right)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
