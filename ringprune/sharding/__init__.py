"""A table's rows, each on the rank that owns it: who owns what, and how rows travel to users and gradients back."""

from ringprune.sharding.fetching import RowMessages, RowValues, dtype_of
from ringprune.sharding.nodes import NodeMessages
from ringprune.sharding.owners import Owners
from ringprune.sharding.search import PartitionCost, PartitionSearch, fit, search
from ringprune.sharding.wire import Wire

__all__ = [
    "NodeMessages",
    "Owners",
    "PartitionCost",
    "PartitionSearch",
    "RowMessages",
    "RowValues",
    "Wire",
    "dtype_of",
    "fit",
    "search",
]
