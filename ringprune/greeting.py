"""At construction all ranks tell one another what they build, and whether they could."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ringprune.comm.communicator import CPU, Communicator
from ringprune.errors import RingPruneError
from ringprune.plan import shake_hands

__all__ = ["Greeting"]


class Greeting:
    """The hand-shakes of one wrapper's construction.

    Args:
        comm: with whom.

    Attributes:
        device: where messages live.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.device = comm, CPU

    def lives_with(self, groups: Sequence[dict[str, list[torch.Tensor]]]) -> None:
        """Messages live where the first parameter of an optimizer's param groups does."""
        self.device = next((p.device for group in groups for p in group["params"] if not p.is_meta), CPU)

    def check(self, facts: Sequence[str], failure: str | None = None) -> None:
        """Whether all ranks have the same facts, and none has a failure to tell.

        Raises:
            RankMismatchError: on all ranks, naming the first difference, or the failure.
        """
        shake_hands(facts, self._comm, self.device, failure)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, an error of this rank is told to the others, which would wait for it."""
        try:
            yield
        except Exception as error:
            with suppress(RingPruneError):
                self.check(["nothing"], f"{type(error).__name__}: {error}")
            raise
