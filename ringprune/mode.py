"""What gradient mode and update mode have in common: the wrapped optimizer, the exchange, what ranks find out."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringprune.backward import Backward
from ringprune.checkpoint import Origin
from ringprune.drift import Drift
from ringprune.errors import UsageError
from ringprune.exchange import Exchange
from ringprune.metrics import Metrics
from ringprune.ops.checks import FLOATS_AND_DOUBLE
from ringprune.other_wrappers import Others
from ringprune.parts import Parts
from ringprune.strangers import MOVED, Strangers
from ringprune.verdict import Verdict

__all__ = ["Mode"]

_LEFT_OUT = (
    "; to leave a batch out, decide before backward(), and call zero_grad() and step() without it; after an error in "
    "backward() call synchronize() first, on all ranks"
)

_OWN_GRADIENTS = (
    "call step(), or zero_grad() of the wrapper, which with local_steps throws a backward pass away, as a GAN's other "
    "loss"
)

_log = logging.getLogger("ringprune")


class Mode(ABC):
    """Exchanges for one wrapped optimizer and makes its steps.

    Args:
        parts: what it is built from.
        weights: what the exchange scores by: the weights that are equal on all ranks, in the Plan's order.
        velocity: accumulate a velocity (momentum correction).
        spare: keep what taking an exchange back needs.

    Attributes:
        embeddings: sharded embeddings among what is wrapped, by name.
        nodes: the ranks divided by node; None where they are not.
        backward: which parameters have had their gradients.
        others: who else averages the gradients.
        strangers: parameters that were not there.
        loaded_own: a checkpoint of weights and moments that are this rank's own, and no flush since.
    """

    loaded_own = False

    def __init__(self, parts: Parts, weights: Sequence[Tensor], *, velocity: bool, spare: bool) -> None:
        comm, plan, settings, nodes = parts.comm, parts.plan, parts.settings, parts.nodes
        self.nodes = nodes
        self.plan, self.params, self.scale = plan, parts.params, parts.scale
        self._inner, self._policy, self._comm = parts.inner, parts.policy, comm
        self.embeddings = parts.embeddings
        self._highest = parts.highest
        self._initialised = False  # in a broadcast of Horovod that is under way
        self._velocity = velocity  # then momentum, Nesterov and weight decay are ours, by a parameter's first group
        self.others = parts.others or Others(parts.params)
        self.strangers = parts.strangers or Strangers(
            parts.inner, parts.params, parts.specs, [table.weight for table in parts.embeddings.values()], parts.model
        )
        self.metrics = parts.metrics or Metrics(comm.traffic, plan.numel, nodes)
        self._verdict = Verdict(comm, plan.params, self.metrics, settings.nonfinite, expected=parts.scale.enabled)
        self.exchange = Exchange(
            plan,
            parts.policy,
            comm,
            self.metrics,
            weights,
            seed=settings.seed,
            mean=settings.mean,
            velocity=velocity,
            spare=spare,
            nodes=nodes,
            guard=settings.guard,
            first=parts.first,
            besides=tuple if parts.policy.local_steps else partial(_held, parts.inner, parts.params),
        )
        self._drift = Drift(settings.check_every, comm, self.metrics)
        self._open = False
        self._parts = parts
        self.watch(settings.passes)

    def watch(self, passes: int) -> None:
        """Watch the parameters, of which nobody else does; a step is made of so many backward passes."""
        parts = self._parts
        self.backward = Backward(
            [spec.name for spec in parts.specs],
            parts.params,
            [parts.members(bucket) for bucket in self.plan.buckets],
            passes,
            full=self._bucket_full,
            passed=self._gradient_passed,
            excess=self._excess,
            also={name: embedding.weight for name, embedding in self.embeddings.items()},
            in_order=parts.sliced is None,
        )

    @abstractmethod
    def _bucket_full(self, index: int) -> None:
        """All gradients of a bucket, and of those before it, are there."""

    @abstractmethod
    def _gradient_passed(self) -> None:
        """A gradient is there; a bucket that it has filled was reported before."""

    @abstractmethod
    def _excess(self, name: str) -> None:
        """A parameter got another gradient after its last pass."""

    @abstractmethod
    def flush(self) -> None:
        """Send all that is kept back, whole; afterwards nothing is private to a rank.

        Raises:
            UsageError: an exchange is under way, or what was held back would be lost.
        """

    @abstractmethod
    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the parameters are those that all ranks share."""

    def settle(self) -> bool:
        """Make what is left of a step; whether ``synchronize()`` has nothing to do beyond that."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether this rank may keep something back: in a hierarchy only the first of a node does."""
        return self.nodes is None or self.nodes.across is not None

    @property
    def local_steps(self) -> int:
        """Steps made since the last exchange, by this rank alone."""
        return 0

    def close(self, *, flushed: bool = False) -> None:
        """Let go of the parameters, and of the exchange's state; ``flushed``: nothing has happened since :meth:`flush`.

        Whoever still has the mode, as a pilot does, has no residuals by it.
        """
        self.backward.close()
        self.exchange.forget()
        self.exchange.drop()

    def stats(self) -> dict[str, Any]:
        """All that is counted, as plain numbers."""
        embeddings = {name: embedding.stats() for name, embedding in self.embeddings.items()}
        return self.metrics.stats() | self.exchange.accounts.stats() | {"embeddings": embeddings, "auto": {}}

    @property
    def updated(self) -> list[Tensor]:
        """Everything whose gradient the wrapped optimizer steps on: what is exchanged, and this rank's own rows."""
        return [*self.params, *(embedding.weight for embedding in self.embeddings.values())]

    def _stepped(self) -> None:
        """A step is made: count it, and note how high the learning rates are."""
        self.metrics.steps += 1
        if said := self.others.averaging():
            self.note_fault(said)
        for number, group in enumerate(self._inner.param_groups):
            if isinstance(rate := group.get("lr"), int | float):  # what is a tensor may be on a GPU, to be waited for
                self._highest[number] = max(self._highest.get(number, 0.0), float(rate))

    # -- findings -----------------------------------------------------------------------------------------------------

    def note_fault(self, finding: str) -> None:
        """The caller did something that cannot work: the next exchange raises UsageError on all ranks."""
        self._verdict.note_fault(finding)

    @property
    def fault(self) -> str | None:
        """What was noted so, and not told yet."""
        return self._verdict.fault

    def _note_strangers(self) -> None:
        """Parameters that were frozen, not there, or of another dtype or group when the ranks agreed on the plan."""
        for said in self.strangers.in_optimizer(grouped=self._velocity):
            self._verdict.note_fault(said)
        if (of_model := self.strangers.in_model()) is not None:
            self._verdict.note_fault(of_model)

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """What fails inside, after the ranks have agreed on a step, all of them raise at the next exchange."""
        try:
            yield
        except Exception as error:
            self.note_fault(
                f"{type(error).__name__} in step() of the wrapped optimizer: {error}. This rank's weights lack that "
                "step: go back to a checkpoint on all ranks"
            )
            raise

    def _bad_rows(self) -> list[str]:
        """Which gradients of this rank's own rows hold NaN or infinity."""
        held = [(name, embedding.weight.grad) for name, embedding in self.embeddings.items()]
        entries = {name: _entries(grad) for name, grad in held if grad is not None}
        counts = {name: int((~values.isfinite()).sum()) for name, values in entries.items()}
        return [f"the gradient of rows of {name!r} has {n} entries NaN or infinite" for name, n in counts.items() if n]

    def _unscale_rows(self, scale: float) -> None:
        """Bring the gradients of this rank's own rows to unscaled units."""
        if scale != 1.0:
            self.scale.multiply([embedding.weight for embedding in self.embeddings.values()], 1 / scale)

    def _compare(self, what: str, tensors: Sequence[Tensor]) -> None:
        """After an exchange, where it is time for it: whether all ranks hold the same.

        Raises:
            RankMismatchError: they do not; on all ranks.
        """
        if self._drift.due(self.exchange.step):
            named = {f"{what} {spec.name!r}": t for spec, t in zip(self.plan.params, tensors, strict=True)}
            self._drift.compare(self.exchange.step, named, self.exchange.agreed())

    # -- the wrapped optimizer ----------------------------------------------------------------------------------------

    def _group(self, param: int) -> dict[str, Any]:
        groups, spec = self._inner.param_groups, self.plan.params[param]
        if spec.group >= len(groups):
            raise UsageError(MOVED.format(spec.name, spec.group, "none"))
        return groups[spec.group]

    def initialise(self) -> None:
        """Create the wrapped optimizer's state by a step on zero gradients, and without decay, that moves no weight.

        At its learning rate, which some keep in their state (Rprop, ASGD).
        """
        self._initialised = True
        groups = self._inner.param_groups
        decays = [group.get("weight_decay") for group in groups]
        weights = [(param, param.detach().clone()) for group in groups for param in group["params"]]
        for group, decay in zip(groups, decays, strict=True):
            group.update({} if decay is None else {"weight_decay": 0.0})
        try:
            self._inner.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group.update({} if decay is None else {"weight_decay": decay})
            with torch.no_grad():
                for param, weight in weights:
                    param.copy_(weight)

    def prepare_saving(self, *, for_horovod: bool) -> None:
        """Settle; and where Horovod broadcasts the state, on all ranks, see that these are at one step: it would hang.

        It asks again on ranks that had to :meth:`initialise` theirs, which may not be all.
        """
        self.settle()
        again, self._initialised = self._initialised, False
        if for_horovod and not again:
            self.exchange.check_place(loaded=self.loaded_own)

    def idle(self, call: str) -> None:
        """Check that no exchange is under way.

        Raises:
            UsageError: one is, or was broken off; names ``call``.
        """
        if self.backward.touched or self._open:
            self.exchange.damage.check_together()  # then nothing that the hints advise helps
            if self._policy.local_steps is not None and not self._open:
                raise UsageError(f"{call} after backward() and before step(): {_OWN_GRADIENTS}")
            hint = _LEFT_OUT if call.startswith("zero_grad") else ""
            raise UsageError(
                f"{call} after backward() and before step() or synchronize(): an exchange is under way{hint}"
            )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def keeps_something(self) -> bool:
        """Whether an exchange may leave something for later ones, on any rank, so that a checkpoint is one rank's."""
        return bool(self.exchange.groups_kept_back())

    def made(self) -> dict[str, Any]:
        """How far it has come, for a checkpoint's ``Origin``; raises where nothing whole can be saved."""
        self.exchange.damage.check_whole()
        highest = tuple(self._highest.get(number, 0.0) for number in range(len(self._inner.param_groups)))
        return {"step": self.exchange.step, "local_steps": self.local_steps, "highest": highest}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a checkpoint must hold besides the wrapped optimizer's state, as views by parameter name."""
        return self.exchange.state()

    @abstractmethod
    def state_like(self, saved: Mapping[str, Mapping[str, Tensor]], *, make: bool) -> dict[str, dict[str, Tensor]]:
        """:meth:`state`, with what is there at some times only where ``saved`` has it.

        Args:
            saved: of a checkpoint, by parameter name.
            make: to be overwritten: make what there is not yet; else shapes alone count, and nothing is changed.
        """

    def resumed(self, saved: Mapping[str, Mapping[str, Tensor]], origin: Origin) -> None:
        """The state was overwritten from the checkpoint that ``origin`` tells about."""
        self._highest.update(enumerate(origin.highest))
        self._verdict.resumed(origin.findings, origin.fault)
        self.exchange.resumed(origin.step, flushed=origin.flushed)


def _entries(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad  # not coalesced: NaN is NaN in any order


def _held(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """What an optimizer keeps of ``params``: steps on averages are the same on all ranks only if that is."""
    states = [optimizer.state.get(param, {}) for param in params]
    held = [state[name] for state in states for name in sorted(state, key=str)]
    return [each for each in held if torch.is_tensor(each) and _is_summed(each, params[0].device)]


def _is_summed(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.layout == torch.strided and tensor.dtype in FLOATS_AND_DOUBLE
