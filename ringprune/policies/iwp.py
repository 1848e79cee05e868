"""IWP: importance-weighted pruning on ring allreduce, with one index set for all ranks."""

from typing import Literal

from ringprune.agreement import Roots
from ringprune.importance import Ratio
from ringprune.local_steps import LocalSteps, as_local_steps
from ringprune.policies.policy import Policy
from ringprune.residual import Clipping
from ringprune.routing import LargeMatrices
from ringprune.selection import Density, Warmup

__all__ = ["IWP"]


def IWP(
    density: float = 0.01,
    *,
    roots: int | Literal["all"] = 1,
    damping: float = 1.0,
    eps: float = 1e-8,
    explore: float = 0.0,
    refresh: int = 1,
    mask_velocity: bool = True,
    correction: Literal["local", "global"] = "local",
    min_numel: int = 2048,
    warmup: Warmup | None = None,
    clip_norm: float | None = None,
    clip_norm_per_tensor: float | None = None,
    values: str = "fp32",
    dense_values: str = "fp32",
    index_format: str = "auto",
    lookahead: bool = False,
    reduction: Literal["auto", "library", "ring"] = "auto",
    local_steps: int | LocalSteps | None = None,
) -> Policy:
    """Importance Weighted Pruning (Cheng and Xu, arXiv 1901.01544), as RingPrune defines it.

    Per step, bucket and rank, with residual ``v`` and velocity ``u``::

        u = m * u + g ;  v = v + u                        momentum correction (SGD), otherwise v = v + g
        score = |v| / (|w| + damping * rms(w) + eps)      on the roots of this bucket and step
        I = union of the roots' top ceil(k / roots)       k = max(1, round(density * numel)), per tensor
        X = mean over ranks of v[I]                       ring allreduce over the agreed indices
        v[I] = 0 ;  u[I] = 0                              on every rank

    Differs from the paper: only its abstract is public. Sourced from it are the ratio of gradient to weight and the
    random choice of the node that broadcasts indices. Damping, exact top-k instead of a threshold, accumulation with
    momentum correction and masking (from Deep Gradient Compression, arXiv 1712.01887) and all defaults are RingPrune's.

    Args:
        density: share of a packed tensor's entries sent per exchange, all roots together; above 0, at most 1.
        roots: ranks that propose indices per bucket and step, or ``"all"``: every rank proposes its share, which costs
            the same bytes and judges better when batches are small.
        damping: share of the tensor's root mean square added to every weight; 0 is the paper's raw ratio.
        eps: added to every weight.
        explore: share of the budget drawn with the shared seed instead; costs no index bytes.
        refresh: steps that an agreed index set serves, so that its indices travel once in so many (Slim-DP).
        mask_velocity: clear the velocity where a value was sent, unless its tensor was sent whole.
        correction: ``"local"``: SGD's momentum is accumulated before the exchange (momentum correction); ``"global"``:
            it stays in the wrapped SGD, after the exchange (error feedback).
        min_numel: smaller tensors, and those of one dimension, travel dense.
        warmup: from dense to ``density``; None starts at ``density``.
        clip_norm: bound of the norm of all of a rank's gradients, divided by sqrt(ranks); delays exchanges until
            backward is over.
        clip_norm_per_tensor: the same for each tensor alone; keeps the overlap. With both, tensors are clipped first.
        values: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"book4"`` or ``"book2"`` on the wire; what
            rounding drops is kept and sent later.
        dense_values: the same for tensors that travel dense.
        index_format: ``"auto"`` (the shortest), ``"list"``, ``"bitmap"`` or ``"elias-fano"``.
        lookahead: choose a step's index set right after the step before, by the residual alone: it travels during the
            forward pass, and agreement costs no time where that is long enough.
        reduction: who sums float32 values: the communicator's ``"library"``, our ``"ring"``, or ``"auto"``, the faster.
        local_steps: update mode: exchange what every so many steps of any optimizer have moved the weights by, instead
            of gradients; a number, or a :class:`~ringprune.LocalSteps`.

    Returns:
        The policy.

    Raises:
        ConfigurationError: an argument is out of range.
    """
    return Policy(
        name="iwp",
        routing=LargeMatrices(min_numel),
        density=Density(density, Warmup(steps=0) if warmup is None else warmup),
        score=Ratio(damping, eps),
        roots=Roots(roots),
        explore=explore,
        correction=correction,
        mask_velocity=mask_velocity,
        clipping=Clipping(clip_norm, clip_norm_per_tensor),
        values=values,
        dense_values=dense_values,
        index_format=index_format,
        lookahead=lookahead,
        refresh=refresh,
        reduction=reduction,
        local_steps=as_local_steps(local_steps),
    )
