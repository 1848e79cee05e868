"""Dense: every gradient is sent whole, as plain Horovod does; the reference for everything else."""

from ringprune.agreement import Roots
from ringprune.importance import Ratio
from ringprune.local_steps import LocalSteps, as_local_steps
from ringprune.policies.policy import Policy
from ringprune.residual import Clipping
from ringprune.routing import AllDense
from ringprune.selection import Density
from ringprune.validation import one_of
from ringprune.wire import VALUE_FORMATS

__all__ = ["Dense"]


def Dense(values: str = "fp32", *, local_steps: int | LocalSteps | None = None) -> Policy:
    """Send every gradient whole, in float32 (float64 for float64 parameters), and average.

    Momentum stays with the wrapped optimizer. Float32 and float64 parameters are those of ``hvd.DistributedOptimizer``
    to the bit wherever the communicator sums in the same order; Horovod sums 16-bit gradients in 16 bits, RingPrune in
    float32.

    Args:
        values: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"book4"`` or ``"book2"`` on the wire. What
            rounding drops is kept and sent later (error feedback); float64 parameters stay as they are.
        local_steps: average the weights every so many steps, instead of gradients at each (local SGD); a number, or a
            :class:`~ringprune.LocalSteps`.

    Returns:
        The policy.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
    """
    one_of("values", values, VALUE_FORMATS)  # here it is not called dense_values
    return Policy(
        name="dense",
        routing=AllDense(),
        density=Density(1.0),
        score=Ratio(),
        roots=Roots(),
        explore=0.0,
        correction="global",
        mask_velocity=False,
        clipping=Clipping(),
        dense_values=values,
        reduction="library",
        local_steps=as_local_steps(local_steps),
    )
