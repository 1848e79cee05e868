"""The communicators of one table, which copies of it share."""

from typing import Any

import torch

from ringprune.comm.communicator import Communicator, Nodes
from ringprune.errors import ConfigurationError
from ringprune.sharding.fetching import RowMessages
from ringprune.sharding.nodes import NodeMessages
from ringprune.sharding.owners import Owners

__all__ = ["Wire"]

NAME = "embedding"


class Wire:
    """Who owns a table's rows, and what carries them.

    Args:
        comm: all ranks; nothing else uses it.
        divided: only the first rank of each node owns rows.
        device: where rows live.

    Attributes:
        comm: all ranks.
        owners: how many of them own rows.
        place: which of those this rank is; None where it is none.
    """

    def __init__(self, comm: Communicator, *, divided: bool, device: torch.device) -> None:
        self.comm, self.owners = comm, comm.size
        self.place: int | None = comm.rank
        self._nodes: Nodes | None = None
        if divided:
            self._nodes = nodes = comm.divide(device)
            self.owners, self.place = nodes.count, None if nodes.across is None else nodes.across.rank

    def rows(self, owners: Owners, dtype: torch.dtype) -> RowMessages | NodeMessages:
        """The messages of a table that is owned so, whose rows travel in ``dtype``."""
        nodes = self._nodes
        if nodes is None:
            return RowMessages(self.comm, owners, dtype, NAME)
        between = None if nodes.across is None else RowMessages(nodes.across, owners, dtype, NAME)
        return NodeMessages(self.comm, nodes, between, dtype, NAME)

    def bytes_sent(self) -> tuple[float, float]:
        """What this rank has sent to others, and inside its node where that is told apart."""
        if self._nodes is None:
            return self.comm.traffic.bytes_sent, 0.0
        across = self._nodes.across
        between = 0.0 if across is None else across.traffic.bytes_sent
        return self.comm.traffic.bytes_sent + between, self._nodes.local.traffic.bytes_sent

    def __deepcopy__(self, memo: dict[int, Any]) -> "Wire":
        return self

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a ShardedEmbedding cannot be pickled, it is connected to other ranks: save its state_dict()"
        )
