"""Starting all ranks from one rank's weights, over any communicator."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ringprune.comm import connect
from ringprune.comm.communicator import Communicator, is_communicator
from ringprune.embedding import embedding_of
from ringprune.errors import ArgumentTypeError

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    root_rank: int = 0,
    comm: Communicator | str | None = None,
) -> None:
    """Overwrite tensors on every rank with those of rank ``root_rank``; all ranks call this.

    The same as ``hvd.broadcast_parameters``, for jobs that do not use Horovod.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``, alike on all ranks, any shapes and dtypes. Rows
            of a :class:`ringprune.ShardedEmbedding` stay each rank's own.
        root_rank: the rank whose values are taken.
        comm: a communicator, the name of one, or None for the default of :func:`ringprune.connect`. A rank outside the
            group that it is of does nothing.

    Raises:
        ArgumentTypeError: ``params`` are neither of these, or a value is no tensor.
        ConfigurationError: there is no rank ``root_rank``.
    """
    own = comm is None or isinstance(comm, str)
    communicator = connect(comm) if comm is None or isinstance(comm, str) else comm
    if not is_communicator(communicator):
        raise ArgumentTypeError(f"comm={comm!r}: a communicator, its kind as a string, or None")
    if communicator.size == 0:
        return
    for name, tensor in _pairs(params):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"broadcast_parameters: {name!r} is {type(tensor).__name__}, not a tensor")
        if embedding_of(tensor) is not None:
            continue  # each rank's own rows
        with torch.no_grad():
            # As bytes: every dtype travels, those a communicator cannot sum included.
            message = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            received = communicator.broadcast(message, root_rank, name=f"parameter {name}").wait()
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))
    if own:
        communicator.close()


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    pairs = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        found = type(params).__name__
        raise ArgumentTypeError(f"broadcast_parameters: model.state_dict() or model.named_parameters(), not a {found}")
    return pairs
