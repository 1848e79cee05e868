"""Readers of words on a command line: each makes a value of a word, or says what is allowed."""

import argparse
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from ringprune.drawing import load_pyplot
from ringprune.errors import DependencyError

__all__ = ["above_zero", "at_least", "file", "folder", "picture", "rate", "share", "target", "written_rate"]

UNLIMITED = "unlimited"
PICTURES = (".png", ".pdf", ".svg")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK", "RANK")
LONGEST_NAME = 251
"""Bytes; file systems take 255, and a file is written beside with .new behind its name."""

FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def at_least(least: int, below: float = math.inf, such_as: str = "") -> Callable[[str], int]:
    """What reads a whole number of at least ``least`` and below ``below``, also as 1e6."""
    allowed = f"a whole number of at least {least}{such_as}"

    def read(text: str) -> int:
        number = _number(text)
        if not (least <= number < below and number.is_integer()):
            raise argparse.ArgumentTypeError(f"{text!r}: {allowed}")
        return int(number)

    return read


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return number


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 and at most 1, such as 0.01")
    return number


def rate(text: str) -> float:
    """Bits per second of a link, such as 100mbit, 2.5gbit, or unlimited, which is infinity."""
    word = text.strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit(?:/s)?", word)
    bits = math.inf if word == UNLIMITED else float(match[1]) * FACTORS[match[2]] if match else 0.0
    if not bits:
        raise argparse.ArgumentTypeError(f'{text!r}: a rate such as "100mbit", "2.5gbit" or "unlimited"')
    return bits


def written_rate(bits: float) -> str:
    """A rate as :func:`rate` reads it, in three digits."""
    if bits == math.inf:
        return UNLIMITED
    letter = next((letter for letter in "tgmk" if bits >= FACTORS[letter]), "")
    return f"{float(f'{bits / FACTORS[letter]:.3g}'):g}{letter}bit"


def target(text: str) -> str:
    """A file that can be written, or ``-``."""
    if text != "-" and not _can_be_written(Path(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: a file in a folder that exists and can be written to, or -")
    return text


def file(text: str) -> Path:
    """A file that can be written."""
    if not _can_be_written(Path(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: a file in a folder that exists and can be written to")
    return Path(text)


def folder(text: str) -> Path:
    """A folder that files can be written to, or that can be made in one that exists."""
    path = Path(text)
    if not _takes_files(path if path.exists() else path.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: a folder that can be written to, or made in one that exists")
    return path


def _other_rank() -> bool:
    """Whether rank 0 writes, maybe on another machine."""
    return any(os.environ.get(name, "0") != "0" for name in RANKS)


def _can_be_written(path: Path) -> bool:
    if _other_rank():
        return True
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        return False
    if path.exists() and not path.is_file():  # a pipe or a device is written to, and what else there is, replaced
        return not path.is_dir() and os.access(path, os.W_OK)
    there = path.resolve()
    return _takes_files(there.parent) and (not there.exists() or os.access(there, os.W_OK))


def _takes_files(folder: Path) -> bool:
    """By trying: access() allows root all of /proc, and does not tell a file from a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def picture(text: str) -> Path:
    """A file that can be written, for a picture, and what draws it: not missed when all it shows has been measured."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: a file whose name ends in {', '.join(PICTURES)}")
    path = file(text)
    if not _other_rank():
        try:
            load_pyplot()
        except DependencyError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
