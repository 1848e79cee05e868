"""What users of Horovod bring: arguments of its optimizer, its process sets, its broadcast of an optimizer's state."""

import sys
from typing import Any

from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.reduction import Mean
from ringprune.validation import flag, real_number

__all__ = ["called_by_broadcast", "is_outside", "mean_of"]

_FRAMES = 12
"""How far up its caller may be: torch and schedulers wrap ``step`` in functions of their own."""


def is_outside(process_set: Any) -> bool:
    """Whether this rank is outside a Horovod process set.

    Raises:
        ArgumentTypeError: it is no process set.
    """
    if process_set is None:
        return False
    if not hasattr(process_set, "included"):
        raise ArgumentTypeError(f"process_set={process_set!r}: a horovod.torch.ProcessSet, or None")
    return not process_set.included()


def called_by_broadcast() -> bool:
    """Whether the caller, ``step()`` or ``state_dict()``, was called by ``hvd.broadcast_optimizer_state``.

    It makes optimizers without state step on zero gradients, on some ranks only, so that step must not be exchanged.
    Zero gradients can as well be those of a rank without a batch; who called is the one sure sign.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "broadcast_optimizer_state":
            return str(frame.f_globals.get("__name__", "")).startswith("horovod.")
    return False


def mean_of(
    op: Any, compression: Any, groups: Any, num_groups: int, sparse_as_dense: bool, gradient_predivide_factor: float
) -> Mean:
    """Horovod's arguments of the same names, as the reduction they ask for.

    Raises:
        ConfigurationError: one of them cannot work here; the message says why and what to use.
    """
    if compression is not None and getattr(compression, "__name__", type(compression).__name__) != "NoneCompressor":
        raise ConfigurationError(
            f"compression={compression!r}: the policy decides what is sent; leave compression out (or Compression.none)"
            '. What Compression.fp16 does is policy=ringprune.Dense("fp16")'
        )
    for name, value in (("groups", groups), ("num_groups", num_groups)):
        if value:
            shown = repr(value) if isinstance(value, int) else "[...]"  # lists of tensors would fill pages
            raise ConfigurationError(f"{name}={shown}: tensors are grouped into buckets; set bucket_bytes instead")
    flag("sparse_as_dense", sparse_as_dense)
    factor = real_number("gradient_predivide_factor", gradient_predivide_factor, above=0)
    average = _is_average(op)
    if not average and factor != 1.0:
        raise ConfigurationError(f"gradient_predivide_factor={factor!r} goes with op=Average only, as in Horovod")
    return Mean(average=average, predivide=factor)


def _is_average(op: Any) -> bool:
    hvd: Any = sys.modules.get("horovod.torch")
    if op is None:
        name = "Average"
    elif isinstance(op, str):
        name = op.capitalize()
    else:
        known = [n for n in ("Average", "Sum", "Adasum", "Min", "Max", "Product") if hvd is not None]
        name = next((n for n in known if isinstance(op, int) and getattr(hvd, n) == op), repr(op))
    if name in ("Average", "Sum"):
        return name == "Average"
    why = "Adasum needs the dense gradient of every layer" if name == "Adasum" else "gradients are averaged or summed"
    given = op if isinstance(op, str) else name
    raise ConfigurationError(f'op={given}: {why}; use hvd.Average, hvd.Sum, "average" or "sum"')
