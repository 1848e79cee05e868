"""The methods that can be compared: a table of small entries, and why one of them cannot run."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exchanges import baselines, ours, peer
from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.exchange import Exchange
from exchanges.gradients import Gradients
from exchanges.job import Job, forced_ring
from ringprune.comm.choice import OPTIONS
from ringprune.policies import POLICIES

__all__ = ["DEFAULTS", "METHODS", "Method", "Unknown", "named"]

RING = "-ring"
OURS = "ringprune:"

Build = Callable[[Job, Gradients, Choice], Exchange]


class Unknown(ValueError):
    """No method has that name; the message suggests one."""


@dataclass(frozen=True)
class Method:
    """A way of exchanging gradients.

    Attributes:
        name: what tables call it.
        about: one line.
        build: makes the exchange on each rank.
        carrier: the communicator; None: the one that ``--communicator`` names.
        ring: Open MPI is told to allreduce along a ring.
    """

    name: str
    about: str
    build: Build
    carrier: str | None = None
    ring: bool = False

    def communicator(self, chosen: str) -> str:
        """What carries it, where ``--communicator`` says ``chosen``."""
        return self.carrier or chosen

    def launcher(self, chosen: str) -> str:
        """What has to start its job: ``"mpi"`` or ``"torch"``."""
        return "torch" if self.communicator(chosen) == "torch" else "mpi"

    def check(self, choice: Choice) -> None:
        """Check that it is there, before a job is started.

        Raises:
            CannotRun: it is not.
        """
        if not self.name.startswith(OURS):
            return
        policy = self.name.removeprefix(OURS).removesuffix(RING)
        if policy not in POLICIES:
            raise CannotRun(f"{self.name}: this RingPrune has no policy {policy!r}, only {', '.join(POLICIES)}")
        if choice.communicator not in OPTIONS:
            raise CannotRun(f"{self.name}: this RingPrune has no communicator {choice.communicator!r}")
        taken = inspect.signature(POLICIES[policy]).parameters
        for name in ("values", "dense_values"):
            if getattr(choice, name) is not None and name not in taken:
                raise CannotRun(f"{self.name}: policy {policy!r} takes no {name}=; leave --{name} out")

    def check_job(self, job: Job, choice: Choice) -> None:
        """Check that it can run in a job that is there.

        Raises:
            CannotRun: it needs another one.
        """
        self.check(choice)
        if job.kind == "torch" and self.launcher(choice.communicator) == "mpi":
            raise CannotRun(f"{self.name}: needs a job started by mpirun")
        if self.launcher(choice.communicator) == "mpi" and self.ring != job.ring:
            wanted = "along a ring" if self.ring else "as it likes"
            flags = " ".join(mca_flags(self.ring)) or "without those --mca"
            raise CannotRun(f"{self.name}: needs a job whose Open MPI allreduces {wanted}: mpirun {flags}")


def mca_flags(ring: bool) -> list[str]:
    """What ``mpirun`` is told for the ring."""
    rules = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"} if ring else {}
    assert forced_ring({f"OMPI_MCA_{key}": value for key, value in rules.items()}) is ring
    return [word for key, value in rules.items() for word in ("--mca", key, value)]


def _with_ring(name: str, about: str, build: Build, carrier: str | None = None) -> list[Method]:
    """A method with Open MPI's own choice of algorithm, and with the ring."""
    return [
        Method(name, about, build, carrier),
        Method(name + RING, f"{about}; Open MPI told to use the ring", build, carrier, ring=True),
    ]


_TABLE = [
    *_with_ring("horovod-fp32", "hvd.DistributedOptimizer as it is", baselines.horovod_fp32, "horovod"),
    *_with_ring("horovod-fp16", "the same with hvd.Compression.fp16", baselines.horovod_fp16, "horovod"),
    Method("gloo-fp32", "torch's DistributedDataParallel over Gloo", baselines.gloo_fp32, "torch"),
    Method("gloo-fp16", "the same with its fp16_compress_hook", baselines.gloo_fp16, "torch"),
    *_with_ring("ringprune:dense", "ringprune.DistributedOptimizer, everything sent", ours.policy("dense")),
    *_with_ring("ringprune:iwp", "importance-weighted pruning", ours.policy("iwp")),
    *_with_ring("ringprune:random_k", "entries drawn with the shared seed", ours.policy("random_k")),
    *_with_ring("ringprune:dgc", "Deep Gradient Compression", ours.policy("dgc")),
    Method("peer", "the function that --peer names", peer.build, "mpi"),
]
METHODS = {method.name: method for method in _TABLE}
"""Every method by name."""

DEFAULTS = [name for name, method in METHODS.items() if name != "peer" and not (name.startswith(OURS) and method.ring)]
"""What is compared if nobody says: the ring only where Horovod's blocking allreduce would be another algorithm."""


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names; any ``ringprune:POLICY`` of this RingPrune's policies is one.

    Raises:
        Unknown: one is none; the message says which are allowed and suggests the nearest.
    """
    known = dict(METHODS)
    for name in POLICIES:
        for method in _with_ring(OURS + name, f"policy {name!r}", ours.policy(name)):
            known.setdefault(method.name, method)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Unknown(f"{name!r}: no such method{hint} (--list-methods shows all)")
    return [known[name] for name in dict.fromkeys(names)]
