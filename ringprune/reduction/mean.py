"""Stage 6: sum packed values over the ranks; the only place that divides by their number."""

from dataclasses import dataclass

from torch import Tensor

from ringprune.comm.communicator import Communicator, Handle

__all__ = ["Mean", "Reduction"]


@dataclass(frozen=True)
class Mean:
    """What is made of the ranks' values.

    Args:
        average: divide the sum by the number of ranks (Horovod's ``op=Average``), or leave it (``op=Sum``).
        predivide: divide by this before the sum and multiply after it (Horovod's ``gradient_predivide_factor``).
    """

    average: bool = True
    predivide: float = 1.0

    def start(self, comm: Communicator, values: Tensor, *, name: str) -> "Reduction":
        """[6] Start the reduction of ``values``, in place."""
        if self.predivide != 1.0:
            values.mul_(1.0 / self.predivide)
        # Horovod multiplies by the reciprocal, rounded to the values' dtype; the same here gives the same bits.
        factor = self.predivide / comm.size if self.average else self.predivide
        return Reduction(comm.allreduce(values, name=name), factor)


class Reduction:
    """A reduction under way.

    Args:
        handle: the allreduce.
        factor: what the sum is multiplied by.
    """

    def __init__(self, handle: Handle, factor: float) -> None:
        self._handle = handle
        self._factor = factor

    def wait(self) -> Tensor:
        """The reduced values, the same bytes on every rank."""
        values = self._handle.wait()
        return values if self._factor == 1.0 else values.mul_(self._factor)

    def drain(self) -> None:
        """Wait and forget: the step is not made."""
        self._handle.wait()
