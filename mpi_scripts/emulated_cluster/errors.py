"""What goes wrong with the emulated cluster.

These do not derive from RingPruneError: the cluster runs in any Python, and importing RingPrune imports torch.
"""

__all__ = ["CannotHere", "ClusterArgumentError", "ClusterError"]


class ClusterError(Exception):
    """The emulated cluster cannot do what was asked; the message is one line."""

    exit_status = 1


class ClusterArgumentError(ClusterError, ValueError):
    """A rate, a host or a number has a value that cannot work; the message says what is allowed."""

    exit_status = 2


class CannotHere(ClusterError):
    """This machine cannot hold an emulated cluster: no root, a tool is missing, or the kernel lacks a part.

    Callers may skip what they wanted to do.
    """

    exit_status = 3
