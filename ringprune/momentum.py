"""The part of SGD's momentum that is equal on every rank: that of dense tensors and of weight decay.

With momentum correction the wrapper takes momentum, Nesterov and weight decay over from ``torch.optim.SGD``. What is
local, the velocity of packed tensors, enters the residual before the exchange (residual.py). What is the same on every
rank goes through one buffer per parameter after the exchange: ``buffer = m * buffer + source``, where the source is
``weight_decay * weight``, and for dense tensors the averaged gradient as well. By linearity both together are SGD's own
momentum of the averaged gradient.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ringprune.embedding import embedding_of
from ringprune.errors import ConfigurationError
from ringprune.packing import laid_out_as
from ringprune.plan import ParamSpec

__all__ = ["TakenOverMomentum", "takes_over"]

USED_UP = 1e-12
"""Share of a momentum buffer that is as good as nothing."""

_TAKEN_OVER = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}


def takes_over(optimizer: torch.optim.Optimizer, correction: str) -> bool:
    """Whether momentum correction applies: ``"local"``, plain ``torch.optim.SGD``, momentum in some param group.

    Raises:
        ConfigurationError: a param group uses dampening, for which momentum correction is not defined.
    """
    if correction != "local" or type(optimizer) is not torch.optim.SGD:
        return False
    if not any(group["momentum"] for group in optimizer.param_groups):
        return False
    for index, group in enumerate(optimizer.param_groups):
        if group["dampening"]:
            raise ConfigurationError(
                f"param group {index} has dampening={group['dampening']!r}: momentum correction is defined for "
                'dampening=0; use that, or IWP(correction="global")'
            )
    return True


class TakenOverMomentum:
    """Momentum and weight decay of a wrapped SGD, after the exchange.

    Args:
        optimizer: the wrapped SGD; its param groups are read at every step, so schedulers work.
        params: the parameters.
        specs: their facts.
        packed: whether each travels packed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        packed: Sequence[bool],
    ) -> None:
        self._optimizer = optimizer
        self._params, self._specs, self._packed = params, specs, packed
        self._groups = sorted({spec.group for spec in specs})
        self._adopted = False
        self._taken: set[str] = set()  # whose momentum SGD has no more, while it is being adopted
        self._buffers: dict[str, Tensor] = {}
        self._left: dict[str, float] = {}  # share that is left, at most, of what a packed tensor began with
        needed = [not is_packed or self._group(s)["weight_decay"] for s, is_packed in zip(specs, packed, strict=True)]
        self.allocate(spec.name for spec, need in zip(specs, needed, strict=True) if need)

    def _group(self, spec: ParamSpec) -> dict[str, Any]:
        return self._optimizer.param_groups[spec.group]

    def allocate(self, names: Iterable[str]) -> None:
        """Make buffers for these parameters, where there are none yet."""
        wanted = set(names)
        for param, spec in zip(self._params, self._specs, strict=True):
            if spec.name in wanted:
                self._buffer_of(param, spec)

    def resumed(self, names: set[str], step: int) -> None:
        """A checkpoint made after ``step`` exchanges was loaded, with momentum for the parameters ``names``."""
        for spec, packed in zip(self._specs, self._packed, strict=True):
            if packed and spec.name not in names:
                self._buffers.pop(spec.name, None)
        self._adopted = step > 0
        packed_names = {spec.name for spec, packed in zip(self._specs, self._packed, strict=True) if packed}
        self._left = dict.fromkeys(names & packed_names, 1.0)

    def give_back(self, velocities: Mapping[str, Tensor]) -> None:
        """Make all momentum SGD's own again: what is the same on every rank, and what the ranks have had on average.

        Args:
            velocities: by name, the mean velocity of packed parameters; used up.
        """
        for param, spec in zip(self._params, self._specs, strict=True):
            if not self._adopted and spec.name not in self._taken:
                continue  # no step was made: SGD has what it had
            shared, velocity, group = self._buffers.pop(spec.name, None), velocities.get(spec.name), self._group(spec)
            if not group["momentum"] or (shared is None and velocity is None):
                continue
            # SGD's buffer is of what is subtracted, a velocity of gradients. No new memory: it may be short.
            if velocity is not None and group["maximize"]:
                velocity.neg_()
            total = velocity if shared is None else shared if velocity is None else shared.add_(velocity)
            held = laid_out_as(param, cast(Tensor, total).to(param.dtype))
            self._optimizer.state[param]["momentum_buffer"] = held
        self._buffers, self._adopted = {}, False
        self._taken.clear()

    def adopt(self, only: Iterable[int] | None = None) -> None:
        """Before the first step, take over the momentum SGD has from before it was wrapped or was broadcast.

        Later ``hvd.broadcast_optimizer_state`` may make buffers again, of zeros; those are dropped.

        Args:
            only: after the first step, positions of the parameters that are looked at; None is all.
        """
        for i in range(len(self._params)) if only is None or not self._adopted else only:
            param, spec = self._params[i], self._specs[i]
            state = self._optimizer.state.get(param, {})
            buffer = state.get("momentum_buffer")
            if buffer is not None and not self._adopted:
                # Where memory is too short SGD has it still. Of sparse gradients it is sparse.
                self._buffer_of(param, spec).copy_(buffer.to_dense())
                self._taken.add(spec.name)
                if self._packed[i]:
                    self._left[spec.name] = 1.0
            state.pop("momentum_buffer", None)
        self._adopted = True
        self._taken.clear()

    @torch.no_grad()
    def apply(self, only: Collection[int] | None = None) -> None:
        """Turn every ``param.grad`` from the exchanged average into the whole update SGD is to make.

        Args:
            only: positions of the parameters that this is done for; None is all.
        """
        self.adopt(only)
        together: dict[tuple[int, bool], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for i in range(len(self._params)) if only is None else only:
            param, spec, packed = self._params[i], self._specs[i], self._packed[i]
            group, grad = self._group(spec), param.grad
            decay = float(group["weight_decay"])
            if grad is None or (packed and not decay and spec.name not in self._buffers):
                continue
            if _is_plain(param, grad, group):
                together.setdefault((spec.group, packed), []).append((param, grad, self._buffer_of(param, spec)))
                if packed:
                    self._use_up(spec.name, decay, float(group["momentum"]))
                continue
            # SGD subtracts the gradient, or with maximize adds it; decay is subtracted either way.
            sign = -1.0 if group["maximize"] else 1.0
            source = _zeros(param)
            if not packed:
                source.add_(grad, alpha=sign)
            if decay:
                source.add_(param, alpha=decay)
            update = sign * self._through_buffer(self._buffer_of(param, spec), source, group)
            if packed:
                grad.add_(update)
                self._use_up(spec.name, decay, float(group["momentum"]))
            elif grad.is_sparse:
                param.grad = update.to(grad.dtype).to_sparse(1)  # of the rows that move
            else:
                grad.copy_(update)
        for (number, packed), tensors in together.items():
            apply = _add_together if packed else _apply_together
            apply(*map(list, zip(*tensors, strict=True)), group=self._optimizer.param_groups[number])

    def _use_up(self, name: str, decay: float, momentum: float) -> None:
        """A packed tensor without weight decay adds nothing to what it began with: drop that when it is used up."""
        if name in self._left:
            self._left[name] = 1.0 if decay else self._left[name] * momentum
            if self._left[name] < USED_UP:
                del self._left[name], self._buffers[name]

    def _through_buffer(self, buffer: Tensor, source: Tensor, group: dict[str, Any]) -> Tensor:
        if not group["momentum"]:
            buffer.zero_()  # momentum that is switched on later begins anew
            return source
        buffer.mul_(group["momentum"]).add_(source)
        return source.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer

    def _buffer_of(self, param: Tensor, spec: ParamSpec) -> Tensor:
        """The buffer of a parameter, made where there is none yet: decay may be switched on after construction."""
        if spec.name not in self._buffers:
            self._buffers[spec.name] = _zeros(param)
        return self._buffers[spec.name]

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """While inside, the wrapped SGD applies neither momentum nor weight decay itself."""
        all_groups = self._optimizer.param_groups
        number = len(all_groups)
        groups = [all_groups[index] for index in self._groups]
        kept = [{key: group[key] for key in (*_TAKEN_OVER, "params")} for group in groups]
        for group in groups:
            # Tables of sharded embeddings keep what they have: for the time being in a group of their own.
            tables = [param for param in group["params"] if embedding_of(param) is not None]
            if tables:
                all_groups.append({**group, "params": tables})
                group["params"] = [param for param in group["params"] if embedding_of(param) is None]
            group.update(_TAKEN_OVER)
        try:
            yield
        finally:
            del all_groups[number:]
            for group, values in zip(groups, kept, strict=True):
                group.update(values)

    def state(self) -> dict[str, Tensor]:
        """The buffers by parameter name; equal on every rank."""
        return dict(self._buffers)

    def state_like(self, names: Collection[str], *, make: bool) -> dict[str, Tensor]:
        """The same, of packed parameters for just those of ``names``.

        Args:
            names: of parameters.
            make: make the buffers that there are not yet; else the parameters, which have their shapes, stand for them.
        """
        if make:
            self.allocate(names)
        named = zip(self._params, self._specs, self._packed, strict=True)
        wanted = {s.name: p for p, s, packed in named if s.name in (names if packed else self._buffers)}
        return {name: self._buffers.get(name, param) for name, param in wanted.items()}


def _zeros(param: Tensor) -> Tensor:
    """A buffer for ``param``, as exact as it needs."""
    return torch.zeros_like(param, dtype=_dtype(param), memory_format=torch.contiguous_format)


def _dtype(param: Tensor) -> torch.dtype:
    """Float64 for float64, otherwise float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _is_plain(param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a gradient can be turned into its update in place, together with others."""
    return not (grad.is_sparse or group["maximize"]) and grad.dtype == param.dtype == _dtype(param)


def _apply_together(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *, group: Mapping[str, Any]
) -> None:
    """What :meth:`TakenOverMomentum.apply` does one by one, to the bit; in a few launches on a GPU."""
    momentum, decay = float(group["momentum"]), float(group["weight_decay"])
    if decay:
        torch._foreach_add_(grads, params, alpha=decay)
    if not momentum:
        torch._foreach_zero_(buffers)  # momentum that is switched on later begins anew
        return
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, grads)
    if group["nesterov"]:
        torch._foreach_add_(grads, buffers, alpha=momentum)
    else:
        torch._foreach_copy_(grads, buffers)


def _add_together(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *, group: Mapping[str, Any]
) -> None:
    """The same of packed tensors, whose gradient has had its momentum before: what weight decay adds to it."""
    momentum, decay = float(group["momentum"]), float(group["weight_decay"])
    if decay and (group["nesterov"] or not momentum):
        torch._foreach_add_(grads, params, alpha=decay)
    if not momentum:
        torch._foreach_zero_(buffers)  # as above
        return
    torch._foreach_mul_(buffers, momentum)
    if decay:
        torch._foreach_add_(buffers, params, alpha=decay)
    torch._foreach_add_(grads, buffers, alpha=momentum if group["nesterov"] else 1.0)
