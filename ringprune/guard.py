"""The convergence guard's choices: how often it looks, and when a tensor is better sent whole."""

from dataclasses import dataclass

from ringprune.validation import real_number, whole_number

__all__ = ["Guard"]


@dataclass(frozen=True)
class Guard:
    """Look at what is kept back every so often; send a tensor whole from then on if it grows without bound.

    At a check, of a tensor of which a share ``density`` is sent, its own budget over its entries, with ``P`` ranks::

        residual   mean over the ranks of the norm of what each could have sent
        exchanged  norm of the average that was exchanged
        ratio      residual / (exchanged * sqrt(P / density))
        cosine     of the average exchanged and the average of all that could have been sent

    The ratio is 1 for a random choice where ranks have nothing in common; a choice by magnitude gives less. The tensor
    is sent whole once its residual has grown at ``growths`` checks in a row and the ratio is above ``bound``: what is
    sent of it then is, for its number of entries, far too small for what is kept back.

    A check costs one dense allreduce of the packed tensors. All ranks decide alike, by numbers that all have.

    Args:
        every: exchanges from one check to the next. Where an index set serves several exchanges, those are looked at
            that choose it anew.
        bound: largest ratio of a tensor that grows.
        growths: checks in a row at which it has to have grown.

    Raises:
        ConfigurationError, ArgumentTypeError: one of them is no number, or not above 0.
    """

    every: int = 100
    bound: float = 3.0
    growths: int = 3

    def __post_init__(self) -> None:
        whole_number("Guard.every", self.every, 1)
        real_number("Guard.bound", self.bound, above=0)
        whole_number("Guard.growths", self.growths, 1)

    def due(self, step: int, refresh: int = 1) -> bool:
        """Whether exchange ``step``, counted from 0, is looked at; ``refresh`` exchanges share an index set."""
        latest = step // self.every * self.every
        return latest > 0 and step % refresh == 0 and step - latest < refresh
