"""Whether a step is made: each rank notes what it saw, all ranks decide alike.

Costs one allreduce of 12 bytes per step, of some more in update mode; only when something is wrong are the details
gathered.
"""

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ringprune.comm.communicator import CPU, Communicator, Handle
from ringprune.errors import ConfigurationError, NonFiniteGradientError, UsageError
from ringprune.metrics import Metrics
from ringprune.plan import ParamSpec, gather_texts
from ringprune.rank_words import by_rank

__all__ = ["NonFinite", "Verdict", "shortened"]

NonFinite = Literal["raise", "skip"]

SHOWN = 3
"""Parameters that an error names; where one gradient is bad, often all are."""

_NOT_MADE = (
    'The step was not made and nothing of it was kept; pass nonfinite="skip" to skip such steps, or scaler= with a '
    "GradScaler"
)

_LOST = "The optimizer does not recover from that: go back to a checkpoint, with a lower learning rate"

_log = logging.getLogger("ringprune")


class Verdict:
    """Collects one step's findings on this rank and settles it with the others.

    Args:
        comm: the communicator.
        params: of the Plan; what is counted is told by their names.
        metrics: counts the bytes as headers.
        nonfinite: what to do when a gradient holds NaN or infinity: raise, or skip the step; on all ranks.
        expected: skipped steps are no news, since a GradScaler looks for the largest scale that works.
    """

    def __init__(
        self, comm: Communicator, params: Sequence[ParamSpec], metrics: Metrics, nonfinite: str, *, expected: bool
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ConfigurationError(f'nonfinite={nonfinite!r}: "raise" or "skip"')
        self._comm, self._params, self._metrics = comm, params, metrics
        self._raise = nonfinite == "raise"
        self._level = logging.DEBUG if expected else logging.WARNING
        self._handle: Handle | None = None
        self.clear()

    def clear(self, fault: str | None = None) -> None:
        """Forget the findings; a new step begins, of which ``fault`` is known already."""
        self.saw_gradient = False
        self.more: list[int] = []
        self._counted: list[tuple[Sequence[int], Tensor]] = []
        self._nonfinite: list[str] = []
        self.fault = fault

    def resumed(self, findings: Sequence[str], fault: str | None) -> None:
        """What was found in the run that is left behind is forgotten; that of a checkpoint is told, if it is to be."""
        self.clear(fault)
        self._nonfinite = list(findings) if self._raise else []

    def count(self, params: Sequence[int], counts: Tensor | None) -> None:
        """How many entries of each of ``params`` are NaN or infinite, int64; read together, by :meth:`read`."""
        assert counts is not None, "entries were to be counted"
        self._counted.append((params, counts))

    def read(self, what: str = "gradient") -> list[str]:
        """A finding for each ``what`` that was counted to have such entries; the first waits for the device."""
        params = [param for members, _ in self._counted for param in members]
        counts = torch.cat([counts for _, counts in self._counted]).tolist() if self._counted else []
        self._counted = []
        specs = [self._params[param] for param in params]
        return [
            f"the {what} of {spec.name!r} has {count} of {spec.numel} entries NaN or infinite"
            for spec, count in zip(specs, counts, strict=True)
            if count
        ]

    def note_counted(self) -> None:
        """Read what was counted of gradients, and note what is found."""
        self._nonfinite += self.read()

    def note_nonfinite(self, finding: str) -> None:
        """A gradient of this rank holds NaN or infinity."""
        self._nonfinite.append(finding)

    @property
    def findings(self) -> tuple[str, ...]:
        """What was noted of NaN and infinity, and not told yet."""
        return tuple(self._nonfinite)

    def note_fault(self, finding: str) -> None:
        """The caller of this rank did something that cannot work; the first is kept."""
        self.fault = self.fault or finding

    def start(self, *more: int, wide: bool = False) -> None:
        """Send this rank's findings, and ``more`` whose sums over the ranks the caller asks for.

        Numbers have 4 bytes, ``wide`` ones 8.
        """
        counts = [bool(self._nonfinite), self.fault is not None, self.saw_gradient, *more]
        with self._metrics.sending("headers"):
            dtype = torch.int64 if wide else torch.int32
            message = torch.tensor(counts, dtype=dtype, device=CPU)
            self._handle = self._comm.allreduce(message, name="verdict")

    def done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._handle is None or self._handle.done()

    def wait(self) -> bool:
        """Whether the step can be made: no rank found anything. The same on every rank."""
        assert self._handle is not None, "wait() before start()"
        counts: list[int] = self._handle.wait().tolist()
        self._nonfinite_ranks, self.faulty_ranks, self._ranks_with_gradient, *self.more = counts
        self._handle = None
        return not self._nonfinite_ranks and not self.faulty_ranks and bool(self._ranks_with_gradient)

    def raise_or_skip(self, *, always: bool = False, late: str | None = None) -> None:
        """After a refusal, once nothing is under way: raise on all ranks together, or return where it is a skip.

        Args:
            always: raise, whatever ``nonfinite`` says; the same on all ranks.
            late: what has come to pass before this could be known; None is nothing.

        Raises:
            UsageError: a rank called things in the wrong order.
            NonFiniteGradientError: a gradient holds NaN or infinity and ``nonfinite="raise"``.
        """
        if self.faulty_ranks:
            raise UsageError(self._gather(self.fault) + (f". {late}" if late else ""))
        if not self._ranks_with_gradient:
            raise UsageError(
                "step() or synchronize() before backward(): no parameter has received a gradient since the last one, "
                "or the model has others than those that were wrapped (load_state_dict(assign=True), to_empty()), or "
                "gradients were assigned by hand: torch.autograd.backward(parameters, gradients) hands them over"
                + (f". {late}" if late else "")
            )
        if self._raise or always:
            then = late or (_LOST if always else _NOT_MADE)
            raise NonFiniteGradientError(f"{self._gather(shortened(self._nonfinite))}. {then}")
        if self._nonfinite:
            _log.log(self._level, "rank %d: step skipped on all ranks: %s", self._comm.rank, shortened(self._nonfinite))

    def _gather(self, finding: str | None) -> str:
        with self._metrics.sending("headers"):
            texts = gather_texts(finding or "", self._comm, CPU, name="verdict details")
        return by_rank(texts)


def shortened(findings: Sequence[str]) -> str:
    """The first findings, and how many there are more; of parameters, one each."""
    more = len(findings) - SHOWN
    return "; ".join(findings[:SHOWN]) + (f"; and those of {more} more parameters" if more > 0 else "")
