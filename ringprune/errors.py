"""Every error RingPrune raises on purpose.

::

    RingPruneError
    |-- ConfigurationError      (ValueError)    an argument has a value that cannot work
    |-- ArgumentTypeError       (TypeError)     an argument has a type that cannot work
    |-- UsageError              (RuntimeError)  calls came in an order that cannot work
    |-- CheckpointError         (ValueError)    a checkpoint does not fit this model or these ranks
    |-- IndexRangeError         (IndexError)    an index looked up in a sharded embedding is no row, or no whole number
    |-- RankMismatchError       (RuntimeError)  the ranks built different things
    |-- NonFiniteGradientError  (ArithmeticError)  a gradient holds NaN or infinity
    |-- CommunicatorError       (RuntimeError)  a collective failed, timed out, or a rank is gone
    |   `-- CollectiveMismatchError             ranks called different collectives
    |-- DependencyError         (ImportError)   an optional package is missing
    `-- NativeLibraryError      (ImportError)   the compiled library does not load, or was asked for and is not there
"""

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "CollectiveMismatchError",
    "CommunicatorError",
    "ConfigurationError",
    "DependencyError",
    "IndexRangeError",
    "NativeLibraryError",
    "NonFiniteGradientError",
    "RankMismatchError",
    "RingPruneError",
    "UsageError",
]


class RingPruneError(Exception):
    """Base of every error raised by RingPrune."""


class ConfigurationError(RingPruneError, ValueError):
    """An argument has a value that cannot work; the message names argument, value and what is allowed."""


class ArgumentTypeError(RingPruneError, TypeError):
    """An argument has a type that cannot work; the message names argument, type and what is expected."""


class UsageError(RingPruneError, RuntimeError):
    """Calls came in an order that cannot work, for example ``step()`` before ``backward()``."""


class CheckpointError(RingPruneError, ValueError):
    """A checkpoint does not fit; the message lists missing, unexpected and mis-shaped names."""


class IndexRangeError(RingPruneError, IndexError):
    """An index looked up in a sharded embedding is no row, or neither int32 nor int64; on all ranks, naming both."""


class RankMismatchError(RingPruneError, RuntimeError):
    """The ranks built different models, policies or seeds; raised on all of them, naming the first difference."""


class NonFiniteGradientError(RingPruneError, ArithmeticError):
    """A gradient holds NaN or infinity; raised on all ranks, naming parameter and rank."""


class CommunicatorError(RingPruneError, RuntimeError):
    """A collective failed or timed out; the message names the collective and what it was for.

    Attributes:
        alone: this rank may be the only one that has met it, and others may wait for its messages; where it is False
            all ranks that took part raise.
    """

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class CollectiveMismatchError(CommunicatorError):
    """Ranks called different collectives; the message names both calls."""

    def __init__(self, message: str) -> None:
        super().__init__(message, alone=True)


class DependencyError(RingPruneError, ImportError):
    """An optional package is missing; the message says what to install."""


class NativeLibraryError(RingPruneError, ImportError):
    """The compiled library is there and does not load, or is not there and was asked for; says how to rebuild it."""
