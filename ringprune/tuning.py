"""Measures on the ranks as they are how many partitions a sharded embedding is best cut into."""

import time

import torch
from torch import Tensor

from ringprune.comm import connect
from ringprune.comm.communicator import Communicator
from ringprune.embedding import ShardedEmbedding
from ringprune.sharding import PartitionSearch, RowValues, search
from ringprune.validation import as_int, whole_number

__all__ = ["search_partitions"]

SPREAD = 4
"""At most so many partitions on each rank: more share nothing that ranks could do at the same time."""


def search_partitions(
    num_embeddings: int,
    embedding_dim: int,
    indices: Tensor,
    *,
    comm: Communicator | str | None = None,
    values: RowValues = "fp32",
    repetitions: int = 5,
    device: torch.device | str | None = None,
) -> PartitionSearch:
    """How many partitions to give :class:`ringprune.ShardedEmbedding`: Parallax's model and search (section 4.2).

    Times forward and backward passes of tables that are made for it, and let go of. All ranks call this, and get the
    same answer: a step takes as long as the slowest rank needs for it.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: entries of a row.
        indices: what this rank looks up in a step, int32 or int64 of any shape; an example of its batches.
        comm: as for the embedding.
        values: as for the embedding.
        repetitions: steps that are timed with each number of partitions; their median counts.
        device: where rows live.

    Returns:
        ``best``, the number of partitions, and the ``seconds`` of a step with each that was tried; alike on all ranks.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
        IndexRangeError: an index is no row of the table; on all ranks.
    """
    num_embeddings = whole_number("num_embeddings", as_int(num_embeddings), 1)
    whole_number("repetitions", repetitions, 1)
    communicator = connect(comm) if comm is None or isinstance(comm, str) else comm

    def measure(partitions: int) -> float:
        embedding = ShardedEmbedding(
            num_embeddings, embedding_dim, comm=communicator, partitions=partitions, values=values, device=device
        )
        _step(embedding, indices)  # warms up
        seconds = sorted(_step(embedding, indices) for _ in range(repetitions))
        own = torch.tensor([seconds[len(seconds) // 2]], dtype=torch.float64, device=embedding.weight.device)
        embedding.close()
        return float(communicator.allgather(own, name="seconds of a step").wait().max())

    start, most = min(communicator.size, num_embeddings), min(SPREAD * communicator.size, num_embeddings)
    found = search(measure, start, most)
    if communicator is not comm:
        communicator.close()
    return found


def _step(embedding: ShardedEmbedding, indices: Tensor) -> float:
    start = time.perf_counter()
    embedding(indices).sum().backward()
    if embedding.weight.is_cuda:
        torch.cuda.synchronize(embedding.weight.device)
    embedding.weight.grad = None
    return time.perf_counter() - start
