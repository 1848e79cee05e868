"""A flush makes one step of all that was kept back: at which learning rates that is far larger than others."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["tell_of_rates"]

HARMLESS = 0.1
"""Share of its first learning rate at which a step of all that was kept back has cost nothing (docs/sharp-bits.md)."""

_log = logging.getLogger("ringprune")


def tell_of_rates(groups: Iterable[Mapping[str, Any]], highest: Iterable[float]) -> None:
    """Warn where ``groups`` are about to make a step of all that was kept back at a rate as high as in training.

    Args:
        groups: param groups.
        highest: the highest rate that each has stepped with; 0 where nobody knows.
    """
    seen = zip(groups, highest, strict=True)
    rates = [(float(group["lr"]), group, most) for group, most in seen if group.get("lr") is not None]
    high = [rate for rate, group, most in rates if rate > HARMLESS * max(most, float(group.get("initial_lr", rate)))]
    if high:
        _log.warning(
            "flush() makes one step of all that was kept back, at learning rate %g. Unless the rate has fallen far "
            "below its highest, to a tenth or less, that step is far larger than others and can cost accuracy: compare "
            "before and after. Running statistics, of a BatchNorm where there is one, are those of before it",
            max(high),
        )
