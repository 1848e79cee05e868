"""A small cluster of hosts on one Linux machine; ``mpi_scripts/cluster --help`` and ``docs/clusters.md`` tell more.

::

    with Cluster.temporary(4, "1gbit") as cluster:
        job = mpirun(cluster, 4, ["python", "train.py"], timeout=60, output="capture")
        sent = {host: counters.tx_bytes for host, counters in cluster.counters().items()}
        cluster.rate("100mbit", host="h2", direction="up")
"""

from .cluster import Cluster, Direction, take_down
from .counters import Counters, own_bytes
from .errors import CannotHere, ClusterArgumentError, ClusterError
from .hosts import Host
from .jobs import TIMED_OUT, Job, launch, mpirun
from .prerequisites import why_not_here
from .processes import Process
from .rates import bits_per_second
from .state import default_folder

__all__ = [
    "TIMED_OUT",
    "CannotHere",
    "Cluster",
    "ClusterArgumentError",
    "ClusterError",
    "Counters",
    "Direction",
    "Host",
    "Job",
    "Process",
    "bits_per_second",
    "default_folder",
    "launch",
    "mpirun",
    "own_bytes",
    "take_down",
    "why_not_here",
]
