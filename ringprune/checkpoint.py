"""What a checkpoint holds besides torch's own keys, and the strict check when it is loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ringprune.comm.communicator import CPU, Communicator
from ringprune.errors import CheckpointError
from ringprune.metrics import Metrics
from ringprune.plan import gather_texts
from ringprune.rank_words import by_rank

__all__ = [
    "FORMAT",
    "Origin",
    "check_origin",
    "check_tensors",
    "copy",
    "divide_sums",
    "opened",
    "refused_together",
    "save",
]

FORMAT = 2
KEPT = ("residual", "velocity", "rms", "core", "relevance", "estimate", "age", "guard", "empty")
"""What only ranks that keep something back have."""
ANEW = ("guard", "overlap", "pace", "empty")
"""What may be missing, and then begins anew, at zero."""
OF_SUMS = ("residual", "velocity", "estimate")
"""What a flushed checkpoint has as the ranks' mean: where they exchange sums, the sum over their number."""

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from.

    Attributes:
        rank: the rank that saved it.
        size: number of ranks.
        keepers: number of ranks that keep something back: all of them, or one on each node of a hierarchy.
        step: exchanges made before.
        local_steps: steps made since the last exchange, in update mode.
        flushed: whether nothing in it is private to the rank: it was saved after a flush, or nothing is kept back.
        findings: NaN and infinity that this rank has to tell the others of at the next exchange, in update mode.
        fault: a wrong call or a failure that it has to tell them of.
        highest: of the learning rates so far, by param group; 0 where it is not known.
        entries: what was saved, by :func:`_entries`; 0 where it is not known.
    """

    rank: int
    size: int
    keepers: int
    step: int
    local_steps: int
    flushed: bool
    findings: tuple[str, ...] = ()
    fault: str | None = None
    highest: tuple[float, ...] = ()
    entries: int = 0


def save(origin: Origin, state: Tensors, inner: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The checkpoint's entry: copies of every tensor, by parameter name and kind; ``inner`` as in _entries."""
    origin = replace(origin, entries=_entries(state, inner or {}))
    copies = {name: {kind: tensor.detach().clone() for kind, tensor in entry.items()} for name, entry in state.items()}
    return {"format": FORMAT, **asdict(origin), "parameters": copies}


_NOT_OURS = (
    "the checkpoint has no 'ringprune' entry, so it is not one of a ringprune.DistributedOptimizer; load it into the "
    "plain optimizer before wrapping it"
)
_NOT_A_HOOKS = "this is no state_dict() of a ringprune.ddp_hook: a dict with format, rank, size and parameters"
_FLUSH = (
    "call flush() before saving, after which any rank's checkpoint serves any number of ranks. "
    "Where neither was done, load the model alone, and wrap anew"
)
_LEAVE_OUT = "leave load_state_dict() out: training goes on without what was kept back"


def check_origin(saved: Any, rank: int, size: int, keepers: int, *, hook: bool = False) -> Origin:
    """Where a checkpoint's entry, or that of a ``hook`` of DDP, comes from, if this rank may continue from it.

    Raises:
        CheckpointError: there is no RingPrune entry, it is damaged or has another format, or it is of another rank or
            number of ranks or nodes.
    """
    if not isinstance(saved, Mapping) or (hook and "format" not in saved):
        raise CheckpointError(_NOT_A_HOOKS if hook else _NOT_OURS)
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has format {saved.get('format')!r}; this version reads {FORMAT}")
    names = [field.name for field in fields(Origin) if field.name in saved or field.default is MISSING]
    absent = [name for name in (*names, "parameters") if name not in saved]
    if absent:
        raise CheckpointError(f"the checkpoint's 'ringprune' entry is damaged: it lacks {', '.join(absent)}")
    if not isinstance(saved["parameters"], Mapping):
        raise CheckpointError("the checkpoint's 'ringprune' entry is damaged: its parameters are no table")
    for name, entry in saved["parameters"].items():
        if not isinstance(entry, Mapping) or not all(map(_is_plain, entry.values())):
            raise CheckpointError(f"the checkpoint's 'ringprune' entry is damaged at parameter {name!r}")
    if not isinstance(saved.get("auto", {}), Mapping):
        raise CheckpointError("the checkpoint's 'ringprune' entry is damaged: its auto is no table")
    origin = Origin(**{name: saved[name] for name in names})
    _check_facts(origin)
    if not origin.flushed and (origin.rank, origin.size) != (rank, size):
        raise CheckpointError(
            f"the checkpoint holds the residuals of rank {origin.rank} of {origin.size}, this is rank {rank} of "
            f"{size}: load each rank's own file with the same number of ranks, or {_LEAVE_OUT if hook else _FLUSH}"
        )
    if not origin.flushed and origin.keepers != keepers:
        raise CheckpointError(
            f"the checkpoint is of a run in which {origin.keepers} of {size} ranks keep residuals, here {keepers} do "
            "(hierarchical=True: one on each node): start with the same nodes and hierarchical, or call flush() before "
            "saving"
        )
    return origin


def _check_facts(origin: Origin) -> None:
    """Whether each is what :func:`save` writes."""
    counts = ("rank", "size", "keepers", "step", "local_steps", "entries")
    fits = {name: type(value := getattr(origin, name)) is int and value >= 0 for name in counts}
    fits |= {"flushed": isinstance(origin.flushed, bool), "fault": isinstance(origin.fault, str | None)}
    fits |= {"findings": _is_list_of(str, origin.findings), "highest": _is_list_of((int, float), origin.highest)}
    wrong = [f"{name}={getattr(origin, name)!r}" for name, fit in fits.items() if not fit]
    if wrong:
        raise CheckpointError(f"the checkpoint's 'ringprune' entry is damaged: {', '.join(wrong)}")


def _is_list_of(kind: Any, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor of numbers that can be copied from."""
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and not tensor.is_complex()


def opened(saved: Any, rank: int, size: int, keepers: int, *, keeps: bool) -> tuple[Origin, Tensors]:
    """Where a checkpoint's entry comes from, as :func:`check_origin`, and its tensors.

    Of a flushed one a rank that keeps nothing back gets those that are equal on all ranks.
    """
    origin = check_origin(saved, rank, size, keepers)
    if keeps or not origin.flushed:
        return origin, saved["parameters"]
    return origin, {
        name: {kind: t for kind, t in entry.items() if kind not in KEPT} for name, entry in saved["parameters"].items()
    }


@contextmanager
def refused_together(comm: Communicator, metrics: Metrics) -> Iterator[None]:
    """What one rank finds wrong inside all ranks raise, which all come here.

    For hierarchies, where a rank that keeps nothing back does not see what is missing of what others keep.

    Raises:
        CheckpointError: another rank has found something.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    with metrics.sending("headers"):
        told = "" if failure is None else str(failure) or type(failure).__name__
        texts = gather_texts(told, comm, CPU, name="checkpoint")
    if failure is not None:
        raise failure
    if any(texts):
        raise CheckpointError(f"nothing was loaded, since not all ranks can: {by_rank(texts)}")


def check_tensors(saved: Tensors, state: Tensors, whole: Mapping[str, Any] | None = None) -> None:
    """Whether a checkpoint's tensors fit ``state``; changes nothing.

    Args:
        saved: of the checkpoint's entry.
        state: where they go.
        whole: a wrapper's checkpoint, to see whether all is there that is made during training, such as momentum.

    Raises:
        CheckpointError: names are missing, unexpected or have other shapes, and which; a part was not loaded.
    """
    have, want = _flat(saved), _flat(state)
    missing = sorted(key for key in want.keys() - have.keys() if key.rpartition(".")[2] not in ANEW)
    unexpected = sorted(have.keys() - want.keys())
    misshaped = [
        f"{key} ({list(have[key].shape)} in the checkpoint, {list(want[key].shape)} here)"
        for key in sorted(want.keys() & have.keys())
        if have[key].shape != want[key].shape
    ]
    if missing or unexpected or misshaped:
        raise CheckpointError(
            "the checkpoint does not fit this model and policy; other policies, and other settings of one, keep other "
            "things: load it under that with which it was saved (with hierarchical, one of a node's first rank). "
            f"Missing: {_listed(missing)}. Unexpected: {_listed(unexpected)}. Other shape: {_listed(misshaped)}"
        )
    if whole is not None:
        _check_whole(whole)


def _check_whole(state_dict: Mapping[str, Any]) -> None:
    saved = state_dict["ringprune"]
    lacking = saved.get("entries", 0) - _entries(saved["parameters"], state_dict)
    if lacking > 0:
        raise CheckpointError(
            f"the checkpoint lacks {lacking} of the {saved['entries']} entries that were saved, such as momentum. "
            "torch.distributed.checkpoint leaves out what a new optimizer has not made yet: save and load "
            "optimizer.state_dict() by torch.save, in a file for each rank. If they are left out on "
            "purpose, delete state_dict['ringprune']['entries'] too"
        )


def _entries(state: Tensors, inner: Mapping[str, Any]) -> int:
    """How many tensors the wrapper has, and the parameters of which the wrapped optimizer, of ``inner``, has any."""
    kept = sum(kind not in ANEW for entry in state.values() for kind in entry)
    return kept + len(inner.get("state") or ())


def copy(saved: Tensors, state: Tensors) -> None:
    """Copy a checkpoint's tensors, which :func:`check_tensors` found to fit, into ``state``."""
    have = _flat(saved)
    with torch.no_grad():
        for key, tensor in _flat(state).items():
            tensor.copy_(have[key] if key in have else torch.zeros_like(tensor))


def divide_sums(state: Tensors, before: int, now: int) -> None:
    """What each of ``before`` ranks had of a sum, in place, to what each of ``now`` ranks has of it."""
    for entry in state.values():
        for kind in entry.keys() & set(OF_SUMS):
            entry[kind].mul_(before / now)


def _flat(state: Tensors) -> dict[str, Tensor]:
    return {f"{name}.{kind}": tensor for name, entry in state.items() for kind, tensor in entry.items()}


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
