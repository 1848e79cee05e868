"""Communicators: one protocol, and the libraries it can stand on.

Importing this package imports neither Horovod nor mpi4py and starts no MPI; :func:`connect` does.
"""

from ringprune.comm.choice import connect
from ringprune.comm.communicator import Ability, Communicator, Handle, Nodes, Traffic
from ringprune.comm.simulated import simulate

__all__ = ["Ability", "Communicator", "Handle", "Nodes", "Traffic", "connect", "simulate"]
