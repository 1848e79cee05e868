"""What ``policy="iwp"`` means for an optimizer: of the settings tried, those that cost the least accuracy so far."""

from typing import Literal

import torch

from ringprune.errors import ArgumentTypeError
from ringprune.local_steps import LocalSteps
from ringprune.policies import IWP, Policy
from ringprune.shared_momentum import SharedMomentum

__all__ = ["recommended"]

LOCAL_STEPS = 4
GROWING = 2  # steps at the highest learning rate, of intervals that grow as it falls
GROWTH = 1.3  # with half a cosine an exchange every 4.1 steps, so a 64th of the bytes


def recommended(optimizer: torch.optim.Optimizer) -> Policy:
    """IWP for an optimizer: the best of the settings tried at about 1/64 of dense float32 bytes.

    They did best on two small tasks (docs/accuracy.md), at 0.02 to 0.03 nats over dense with SGD and 0.04 with AdamW
    (0.005 and 0.014 after four and eight times as many steps; AdamW after a quarter of the steps 0.2); its table says
    where other methods beat them.

    With SGD ranks make four local steps, then exchange the most important three tenths of what the weights have moved
    by. With any other optimizer they exchange everything, in 2 bits: Adam's steps are alike in size, so the largest
    hold little. They do so every second step at the highest learning rate, and more rarely as it falls: with half a
    cosine that is a 64th of the bytes, at a constant rate a 31st. Optimizers other than SGD and AdamW were not
    measured, and are taken to be like Adam. Momentum is shared where it can be.

    Args:
        optimizer: the optimizer to wrap, for its kind alone.

    Returns:
        The policy; ``dataclasses.replace`` changes its slots.

    Raises:
        ArgumentTypeError: it is no torch optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"recommended() takes the optimizer to wrap, not a {type(optimizer).__name__}")
    momentum: Literal["own", "shared"] = "shared" if SharedMomentum.serves(optimizer) else "own"
    if isinstance(optimizer, torch.optim.SGD):
        steps = LocalSteps(LOCAL_STEPS, momentum=momentum)
        return IWP(0.3, roots="all", values="book4", dense_values="int8", local_steps=steps)
    steps = LocalSteps(GROWING, momentum=momentum, growth=GROWTH)
    return IWP(1.0, values="book2", dense_values="book2", local_steps=steps)
