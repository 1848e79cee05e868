"""Words on the command lines of programs that run on the emulated cluster: lists, and rates of links."""

import argparse
from collections.abc import Callable

from emulated_cluster import bits_per_second

__all__ = ["link_rate", "listed", "slower"]


def listed(of: Callable[[str], object]) -> Callable[[str], list[object]]:
    """What reads words that are separated by commas, each by ``of``, and each once."""

    def read(text: str) -> list[object]:
        return [of(word.strip()) for word in dict.fromkeys(text.split(",")) if word.strip()] or [of(text)]

    return read


def link_rate(text: str) -> str:
    """A rate that links can be given; the word itself."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def slower(rate: str, scale: float) -> str:
    """The rate of links that are ``scale`` times slower."""
    bits = bits_per_second(rate)
    return "unlimited" if bits is None else f"{bits / scale / 1e6:g}mbit"
