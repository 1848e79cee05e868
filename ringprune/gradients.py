"""The gradients of the parameters: what of them goes into an exchange, and where their averages are written."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringprune.memory import overlapping
from ringprune.packing import no_rows
from ringprune.plan import ParamSpec

__all__ = ["Gradients", "entries"]


class Gradients:
    """What is in ``param.grad``, as an exchange takes it and gives it back.

    Args:
        params: whose.
        specs: of the same parameters; sparse where rows travel.
        note_fault: told what a caller did that cannot work.
    """

    def __init__(self, params: Sequence[Tensor], specs: Sequence[ParamSpec], note_fault: Callable[[str], None]) -> None:
        self._params, self._specs, self._note_fault = params, specs, note_fault

    def of(self, members: Sequence[int]) -> list[Tensor]:
        """The gradients to exchange; zeros where this rank has none, as with Horovod.

        Dense and contiguous, or coalesced and sparse where rows travel.
        """
        grads = []
        for i in members:
            param = self._params[i]
            if self._specs[i].sparse:
                grads.append(self._rows(i))
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.is_sparse:
                param.grad = param.grad.to_dense()
            # .data has a version of its own: what the exchange writes is no change of the caller's.
            grad = param.grad.data.contiguous()
            if param.dtype != self._specs[i].dtype:  # converted since; the step is refused later, by all ranks
                grad = grad.to(self._specs[i].dtype)
            grads.append(grad)
        return grads

    def _rows(self, index: int) -> Tensor:
        """A coalesced sparse gradient; float32 of 16-bit ones, since equal rows are added here."""
        param, spec = self._params[index], self._specs[index]
        grad = param.grad
        if grad is not None and not (grad.is_sparse and grad.sparse_dim() == 1):
            self._note_fault(
                f"the gradient of {spec.name!r} is not one of sparse rows, and rows of it are exchanged since a module "
                "with sparse=True has it: use it in such modules only, or wrap with rows=None"
            )
            grad = None
        if grad is None:
            return no_rows(param)
        exact = grad.detach().to(torch.float64 if spec.dtype == torch.float64 else torch.float32)
        # The caller may change a gradient while its rows are being sent: what is coalesced already is not copied else.
        return exact.clone() if exact.is_coalesced() else exact.coalesce()

    def outputs(self) -> list[Tensor]:
        """Where averages are written, of all parameters: the gradients themselves where that can be.

        No two of them share memory: autograd leaves parameters that were added to each other with one gradient.
        """
        outputs = []
        for param, spec in zip(self._params, self._specs, strict=True):
            grad = param.grad  # None where somebody dropped it after backward: the average comes all the same
            if spec.sparse:
                grad = no_rows(param)
            elif grad is None or not grad.is_contiguous() or grad.dtype != param.dtype or grad.requires_grad:
                grad = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            outputs.append(grad)
        for i in overlapping(outputs):
            outputs[i] = torch.empty_like(outputs[i])
        return outputs


def entries(grads: Sequence[Tensor]) -> list[Tensor]:
    """The entries that gradients have: all of dense ones, the rows of sparse ones."""
    return [grad.values().contiguous() if grad.is_sparse else grad for grad in grads]
