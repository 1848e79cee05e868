"""An optimizer's state of sharded rows: whole in a checkpoint, each rank's share in memory."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringprune.embedding import ShardedEmbedding, embedding_of
from ringprune.errors import CheckpointError

__all__ = ["load", "save", "take_shares"]


def save(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict()``, in which state of rows is of the whole table; all ranks call this."""
    state: dict[str, Any] = optimizer.state_dict()
    kept = state.get("state", {})  # an optimizer around another one may have a format of its own
    for number, embedding in _sharded(optimizer):
        own, of_rows = _as_others(embedding, kept.get(number, {}))
        if own or number in kept:
            kept[number] = {
                kind: _gathered(embedding, value) if kind in of_rows else value
                for kind, value in sorted(own.items())  # in one order on all ranks, whoever lacked some of them
            }
    return state


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`save` made, on however many ranks: of whole tables, this rank's share.

    Raises:
        CheckpointError: it is not whole, or has state of a table of another shape; nothing was changed.
    """
    absent = [name for name in ("state", "param_groups") if name not in state]
    if absent and optimizer.state_dict().keys() & {*absent}:  # a format of its own may have neither
        raise CheckpointError(f"the checkpoint lacks {' and '.join(absent)}: save all of optimizer.state_dict()")
    kept = dict(state.get("state", {}))
    for number, embedding in _sharded(optimizer):
        if number not in kept:
            continue
        whole = (embedding.num_embeddings, embedding.embedding_dim)
        for kind, value in kept[number].items():
            if isinstance(value, Tensor) and not _fits(value, whole):
                raise CheckpointError(
                    f"the checkpoint does not fit this model: {kind!r} of parameter {number}, a ShardedEmbedding with "
                    f"{whole[0]:,} rows of {whole[1]}, has shape {list(value.shape)}"
                )
        kept[number] = {
            kind: _share(embedding, value) if _per_row(value, whole) else value for kind, value in kept[number].items()
        }
    optimizer.load_state_dict(state | ({"state": kept} if "state" in state else {}))


def take_shares(optimizer: torch.optim.Optimizer) -> None:
    """Of state that is of whole tables, as a checkpoint of plain training has it, keep this rank's; sends nothing."""
    for _, embedding in _sharded(optimizer):
        whole = (embedding.num_embeddings, embedding.embedding_dim)
        kept = optimizer.state.get(embedding.weight, {})
        if len(embedding.weight) < whole[0]:
            kept |= {kind: _share(embedding, value) for kind, value in kept.items() if _per_row(value, whole)}


def _per_row(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether it holds something for each entry, or for each row, of a table of that shape."""
    return isinstance(value, Tensor) and tuple(value.shape) in (tuple(shape), (shape[0], 1), (shape[0],))


def _fits(value: Tensor, whole: tuple[int, ...]) -> bool:
    """Whether it may be of a table of that shape: of entries, rows, columns, or the table."""
    return value.dim() != len(whole) or all(n in (1, m) for n, m in zip(value.shape, whole, strict=True))


def _gathered(embedding: ShardedEmbedding, own: Tensor) -> Tensor:
    """State of the whole table; sparse where torch keeps it so, as SGD's momentum."""
    return embedding.gather(own.to_dense()).to_sparse(1) if own.is_sparse else embedding.gather(own)


def _share(embedding: ShardedEmbedding, whole: Tensor) -> Tensor:
    return embedding.share_of(whole.to_dense()).to_sparse(1) if whole.is_sparse else embedding.share_of(whole)


def _as_others(embedding: ShardedEmbedding, own: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """This rank's state, and zeros for what others have and a rank whose steps were all left out has not.

    Besides, what of it is of rows. All ranks have to say so, to gather alike: one that owns as many rows as a row has
    entries cannot tell a number for each row from one for each column.
    """
    said = {kind: _described(value, embedding) for kind, value in own.items()}
    heard = [json.loads(text) for text in embedding.told(json.dumps(said))]
    known = {kind: told for each in reversed(heard) for kind, told in each.items()}
    of_rows = {kind for kind in known if all(each[kind][0].endswith("rows") for each in heard if kind in each)}
    missing = [kind for kind in known.keys() - said.keys() if kind in of_rows or known[kind][0] in ("number", "tensor")]
    return own | {kind: _made(embedding, *known[kind]) for kind in missing}, of_rows


def _described(value: Any, embedding: ShardedEmbedding) -> tuple[str, str, Any]:
    """What others need to know to make the like, as JSON: what it is, its dtype, and width or values."""
    if isinstance(value, int | float):
        return "number", "", value
    if not isinstance(value, Tensor):
        return "other", "", None
    dtype = str(value.dtype).removeprefix("torch.")
    if _per_row(value, embedding.weight.shape):
        return "sparse rows" if value.is_sparse else "rows", dtype, list(value.shape[1:])
    return ("tensor", dtype, value.tolist()) if value.dim() == 0 else ("other", "", None)


def _made(embedding: ShardedEmbedding, what: str, dtype: str, more: Any) -> Any:
    if what == "number":
        return more
    if what == "tensor":
        return torch.tensor(more, dtype=getattr(torch, dtype), device="cpu")
    rows = torch.zeros(len(embedding.weight), *more, dtype=getattr(torch, dtype), device=embedding.weight.device)
    return rows.to_sparse(1) if what == "sparse rows" else rows


def _sharded(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, ShardedEmbedding]]:
    """The sharded embeddings among what it steps on, by their number in its ``state_dict()``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        embedding = embedding_of(param)
        if embedding is not None:
            yield number, embedding
