"""Source text of the Python standard library as a corpus of characters; some files are held out for validation."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from data.errors import DataError

__all__ = ["SYMBOLS", "Corpus", "corpus", "windows"]

SYMBOLS = 97  # 0 is any other byte, 1 the end of a line, 2 to 96 are the printable ASCII characters
HELD_OUT_EVERY = 10  # every tenth file is never trained on


class Corpus(NamedTuple):
    """Characters as numbers below ``SYMBOLS``: of the training files, and of the files held out."""

    train: Tensor
    validation: Tensor


def corpus(folder: Path | None = None, train_bytes: int = 4_000_000, validation_bytes: int = 96_000) -> Corpus:
    """The ``*.py`` files directly in ``folder``, in the order of their names.

    Args:
        folder: where to look; None is the standard library of the Python that runs.
        train_bytes: stop after this many bytes of training text.
        validation_bytes: divided evenly among the files held out, so that all of them have a say.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if len(paths) < 2:
        raise DataError(folder, f"holds {len(paths)} files ending in .py", "at least 2 (one is held out)")
    held_out = paths[::HELD_OUT_EVERY]
    train = [path.read_bytes() for path in paths if path not in held_out]
    share = validation_bytes // len(held_out)
    validation = [path.read_bytes()[:share] for path in held_out]
    return Corpus(_encode(b"".join(train)[:train_bytes]), _encode(b"".join(validation)))


def windows(text: Tensor, length: int) -> Tensor:
    """``text`` cut into rows of ``length + 1`` characters; the last of a row is the first of the next one.

    Columns ``[:-1]`` are what the model reads, ``[1:]`` what it has to predict.
    """
    return text.unfold(0, length + 1, length)


def _encode(text: bytes) -> Tensor:
    numbers = numpy.zeros(256, dtype=numpy.uint8)
    numbers[ord("\n")] = 1
    numbers[32:127] = numpy.arange(2, SYMBOLS)
    return torch.from_numpy(numbers[numpy.frombuffer(text, dtype=numpy.uint8)])
