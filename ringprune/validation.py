"""Checks of single argument values; every message names argument, value and what is allowed."""

import difflib
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ringprune.errors import ArgumentTypeError, ConfigurationError

__all__ = ["as_int", "flag", "one_of", "real_number", "whole_number"]


def as_int(value: Any) -> Any:
    """A whole number of NumPy's as Python's, anything else as it is: sizes of tables come from data."""
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, Integral) else value


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number of at least ``least``, and at most ``most`` where that is given.

    Raises:
        ArgumentTypeError: it is no whole number.
        ConfigurationError: it is out of range.
    """
    allowed = f"a whole number of at least {least}" + (f" and at most {most}" if most is not None else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r}: {allowed}")
    if value < least or (most is not None and value > most):
        raise ConfigurationError(f"{name}={value}: {allowed}")
    return value


def real_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number within the bounds given; ``above`` and ``below`` are exclusive, the others inclusive.

    Raises:
        ArgumentTypeError: it is no number.
        ConfigurationError: it is not finite or out of range.
    """
    bounds = (("above", above), ("at least", least), ("at most", most), ("below", below))
    limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    allowed = f"a finite number {limits}".rstrip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name}={value!r}: {allowed}")
    inside = (
        math.isfinite(value)
        and (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if not inside:
        raise ConfigurationError(f"{name}={value!r}: {allowed}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r}: True or False")
    return value


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of the names allowed.

    Raises:
        ArgumentTypeError: it is no string.
        ConfigurationError: it is another one; the message suggests the nearest.
    """
    choices = f"one of {', '.join(map(repr, allowed))}"
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}={value!r}: {choices}")
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        raise ConfigurationError(f"{name}={value!r}: {choices}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return value
