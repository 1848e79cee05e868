"""RingPrune: gradient exchange over MPI and Horovod that sends what matters and keeps the rest for later.

Importing it starts neither MPI nor Horovod.
"""

from ringprune.auto import Auto
from ringprune.broadcast import broadcast_parameters
from ringprune.comm import connect, simulate
from ringprune.ddp_hook import ddp_hook
from ringprune.embedding import ShardedEmbedding
from ringprune.errors import (
    ArgumentTypeError,
    CheckpointError,
    CollectiveMismatchError,
    CommunicatorError,
    ConfigurationError,
    DependencyError,
    IndexRangeError,
    NativeLibraryError,
    NonFiniteGradientError,
    RankMismatchError,
    RingPruneError,
    UsageError,
)
from ringprune.guard import Guard
from ringprune.local_steps import LocalSteps
from ringprune.optimizer import DistributedOptimizer
from ringprune.policies import DGC, IWP, MIPD, P3, Dense, OkTopk, Parallax, Policy, RandomK, ScaleCom, SlimDP
from ringprune.recommended import recommended
from ringprune.routing import Rows
from ringprune.schedule import LayerPriority
from ringprune.selection import Warmup
from ringprune.stats_log import StatsLog, scalars
from ringprune.tuning import search_partitions

__version__ = "0.1.0.dev0"

__all__ = [
    "DGC",
    "IWP",
    "MIPD",
    "P3",
    "ArgumentTypeError",
    "Auto",
    "CheckpointError",
    "CollectiveMismatchError",
    "CommunicatorError",
    "ConfigurationError",
    "Dense",
    "DependencyError",
    "DistributedOptimizer",
    "Guard",
    "IndexRangeError",
    "LayerPriority",
    "LocalSteps",
    "NativeLibraryError",
    "NonFiniteGradientError",
    "OkTopk",
    "Parallax",
    "Policy",
    "RandomK",
    "RankMismatchError",
    "RingPruneError",
    "Rows",
    "ScaleCom",
    "ShardedEmbedding",
    "SlimDP",
    "StatsLog",
    "UsageError",
    "Warmup",
    "broadcast_parameters",
    "connect",
    "ddp_hook",
    "recommended",
    "scalars",
    "search_partitions",
    "simulate",
]
