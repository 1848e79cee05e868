"""What ``policy="iwp"`` means for an optimizer: of the settings tried, those that cost the least accuracy so far."""

import torch

from ringprune.local_steps import LocalSteps
from ringprune.policies import IWP, Policy
from ringprune.shared_momentum import SharedMomentum

__all__ = ["recommended"]

LOCAL_STEPS = 4


def recommended(optimizer: torch.optim.Optimizer) -> Policy:
    """IWP for an optimizer: the best of the settings tried at about 1/64 of dense float32 bytes.

    They did best in single runs on two small tasks (docs/accuracy.md, "What we have found"), at 0.017 nats over dense
    with SGD and 0.067 with AdamW (0.023 after four times as many steps); its table says where other methods beat them.

    Four local steps, then what the weights have moved by is exchanged: by SGD the most important three tenths, by any
    other optimizer everything, in 2 bits. Adam's steps are alike in size, so the largest hold little; optimizers other
    than SGD and AdamW were not measured, and are taken to be like Adam. Momentum is shared where it can be.

    Args:
        optimizer: the optimizer to wrap, for its kind alone.

    Returns:
        The policy; ``dataclasses.replace`` changes its slots.
    """
    steps = LocalSteps(LOCAL_STEPS, momentum="shared" if SharedMomentum.serves(optimizer) else "own")
    if isinstance(optimizer, torch.optim.SGD):
        return IWP(0.3, roots="all", values="book4", dense_values="int8", local_steps=steps)
    return IWP(1.0, values="book2", dense_values="book2", local_steps=steps)
