"""Score every entry of a bucket: stage 2 of the exchange."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError
from ringprune.ops.checks import FLOATS, check_flat, check_numbers, check_tensors, offsets_of
from ringprune.ops.library import call, define

__all__ = ["SCORES", "check_score", "importance"]

SCHEMA = "importance(Tensor residual, Tensor[] weights, *, str score, float[] parameters) -> Tensor"

SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ratio": lambda v, w, p: v.abs() / (w.abs() + p),
    "magnitude": lambda v, w, p: v.abs(),
    "sum": lambda v, w, p: w.abs() + v.abs() * p,
    "product": lambda v, w, p: w.abs() * v.abs(),
}
"""Every score by name: a function of residual, weight and the tensor's parameter, all float32."""


def importance(residual: Tensor, weights: Sequence[Tensor], *, score: str, parameters: Sequence[float]) -> Tensor:
    """Importance of every residual entry.

    Entry by entry of tensor i, each operation rounded to float32, with v the residual, w = float32(weight) and
    p = float32(parameters[i])::

        ratio       |v| / (|w| + p)      Importance Weighted Pruning (arXiv 1901.01544), damped by p
        magnitude   |v|                  Deep Gradient Compression (arXiv 1712.01887); p is not used
        sum         |w| + |v| * p        Slim-DP (arXiv 1709.09393)
        product     |w| * |v|            first-order relevance, MIPD; p is not used

    Args:
        residual: float32 [N].
        weights: T contiguous tensors of any shape, float32, float16 or bfloat16; N entries together.
        score: one of the names above.
        parameters: T finite numbers >= 0.

    Returns:
        Scores, float32 [N].

    Raises:
        ConfigurationError: a shape, device, length, number or the name does not fit.
        ArgumentTypeError: a dtype does not fit.
    """
    scores: Tensor = call(_importance, residual, weights, score=score, parameters=parameters)
    return scores


def check_score(op: str, score: str) -> None:
    """Refuse what is not the name of a score."""
    if score not in SCORES:
        raise ConfigurationError(f"{op}: score is {score!r}; one of {', '.join(SCORES)} is needed")


def check_importance(residual: Tensor, weights: Sequence[Tensor], *, score: str, parameters: Sequence[float]) -> None:
    """Refuse arguments of :func:`importance` that do not fit."""
    check_flat("importance", "residual", residual, torch.float32)
    check_tensors("importance", "weights", weights, FLOATS, device=residual.device, numel=residual.numel())
    check_score("importance", score)
    check_numbers("importance", "parameters", parameters, len(weights), low=0.0)


def importance_reference(
    residual: Tensor, weights: Sequence[Tensor], *, score: str, parameters: Sequence[float]
) -> Tensor:
    """:func:`importance` in torch."""
    # 0-dim float32 tensors: the rounding of the numbers is then this line's, not a kernel's.
    parameters32 = torch.tensor(parameters, dtype=torch.float32, device="cpu")
    scores = torch.empty_like(residual)
    offsets = offsets_of(weights)
    for i, weight in enumerate(weights):
        part = slice(offsets[i], offsets[i + 1])
        scores[part] = SCORES[score](residual[part], weight.detach().reshape(-1).float(), parameters32[i])
    return scores


def _importance_fake(residual: Tensor, weights: Sequence[Tensor], *, score: str, parameters: Sequence[float]) -> Tensor:
    return torch.empty_like(residual)


_importance = define(SCHEMA, check_importance, importance_reference, _importance_fake)
