"""The methods that can be compared: a table of small entries, and why one of them cannot run."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exchanges import baselines, ours, peer
from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.exchange import Exchange
from exchanges.gradients import Gradients
from exchanges.job import Job, forced_ring
from ringprune.comm.choice import OPTIONS
from ringprune.policies import POLICIES

__all__ = ["DEFAULTS", "METHODS", "OURS", "Method", "Unknown", "named"]

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
        policy: name of RingPrune's policy; empty for the others.
        settings: of the policy, beside those of the command line.
    """

    name: str
    about: str
    build: Build
    carrier: str | None = None
    ring: bool = False
    policy: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

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
        if not (policy := self.policy):
            return
        if policy not in POLICIES:
            raise CannotRun(f"{self.name}: this RingPrune has no policy {policy!r}, only {', '.join(POLICIES)}")
        if choice.communicator not in OPTIONS:
            raise CannotRun(f"{self.name}: this RingPrune has no communicator {choice.communicator!r}")
        taken = inspect.signature(POLICIES[policy]).parameters
        for name in [*ours.formats(policy, choice), *self.settings]:
            if name not in taken:
                known = ", ".join(f"{each}=" for each in ("density", "values", "dense_values") if each in taken)
                raise CannotRun(f"{self.name}: policy {policy!r} of this RingPrune takes no {name}=, only {known}")

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


def _ours(policy: str, about: str, variant: str = "", **settings: Any) -> list[Method]:
    build = ours.policy(policy, settings)
    methods = _with_ring(f"{OURS}{policy}{variant}", about, build)
    return [replace(method, policy=policy, settings=settings) for method in methods]


_TABLE = [
    *_with_ring("horovod-fp32", "hvd.DistributedOptimizer as it is", baselines.horovod_fp32, "horovod"),
    *_with_ring("horovod-fp16", "the same with hvd.Compression.fp16", baselines.horovod_fp16, "horovod"),
    Method("gloo-fp32", "torch's DistributedDataParallel over Gloo", baselines.gloo_fp32, "torch"),
    Method("gloo-fp16", "the same with its fp16_compress_hook", baselines.gloo_fp16, "torch"),
    *_ours("dense", "ringprune.DistributedOptimizer, everything sent"),
    *_ours("iwp", "importance-weighted pruning, one index set for all ranks"),
    *_ours("iwp", "the same without momentum correction, as random_k", "-plain", correction="global"),
    *_ours("random_k", "entries drawn with the shared seed, no index is sent"),
    *_ours("random_k", "the same with momentum correction, as iwp", "-corrected", correction="local"),
    *_ours("dgc", "Deep Gradient Compression, every rank's own entries gathered, in float32"),
    *_ours("dgc", "the same, summed region by region", "-scattered", index_sets="scattered"),
    Method("peer", "the function that --peer names", peer.build, "mpi"),
]
METHODS = {method.name: method for method in _TABLE}
"""Every method by name."""

DEFAULTS = [name for name, method in METHODS.items() if name != "peer" and not (method.policy and method.ring)]
"""What is compared if nobody says: the ring only where Horovod's blocking allreduce would be another algorithm."""


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names; any ``ringprune:POLICY`` of this RingPrune's policies is one.

    Raises:
        Unknown: one is none; the message says which are allowed and suggests the nearest.
    """
    known = dict(METHODS)
    for name in POLICIES:
        for method in _ours(name, f"policy {name!r}"):
            known.setdefault(method.name, method)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Unknown(f"{name!r}: no such method{hint} (--list-methods shows which there are)")
    return [known[name] for name in dict.fromkeys(names)]
