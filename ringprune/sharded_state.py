"""An optimizer's state of sharded rows: whole in a checkpoint, each rank's share in memory."""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from ringprune.embedding import ShardedEmbedding, embedding_of
from ringprune.errors import CheckpointError

__all__ = ["load", "save"]


def save(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict()``, in which state of rows is of the whole table; all ranks call this."""
    state: dict[str, Any] = optimizer.state_dict()
    kept = state["state"]
    for number, embedding in _sharded(optimizer, kept):
        kept[number] = {
            kind: _gathered(embedding, value) if _per_row(value, embedding.weight.shape) else value
            for kind, value in kept[number].items()
        }
    return state


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`save` made, on however many ranks: of whole tables, this rank's share.

    Raises:
        CheckpointError: it has state of a table of another shape; nothing was changed.
    """
    kept = dict(state["state"])
    for number, embedding in _sharded(optimizer, kept):
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
    optimizer.load_state_dict(state | {"state": kept})


def _per_row(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether it holds something for each entry, or for each row, of a table of that shape."""
    return isinstance(value, Tensor) and tuple(value.shape) in (tuple(shape), (shape[0], 1))


def _fits(value: Tensor, whole: tuple[int, ...]) -> bool:
    """Whether it may be of a table of that shape: of entries, rows, columns, or the table."""
    return value.dim() != len(whole) or all(n in (1, m) for n, m in zip(value.shape, whole, strict=True))


def _gathered(embedding: ShardedEmbedding, own: Tensor) -> Tensor:
    """State of the whole table; sparse where torch keeps it so, as SGD's momentum."""
    return embedding.gather(own.to_dense()).to_sparse(1) if own.is_sparse else embedding.gather(own)


def _share(embedding: ShardedEmbedding, whole: Tensor) -> Tensor:
    return embedding.share_of(whole.to_dense()).to_sparse(1) if whole.is_sparse else embedding.share_of(whole)


def _sharded(optimizer: torch.optim.Optimizer, kept: Container[int]) -> Iterator[tuple[int, ShardedEmbedding]]:
    """The sharded embeddings whose rows the optimizer has state of, by their number in its ``state_dict()``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        embedding = embedding_of(param)
        if embedding is not None and number in kept:
            yield number, embedding
