"""What a loader raises when a file is missing or damaged."""

from pathlib import Path

__all__ = ["DataError"]


class DataError(ValueError):
    """A file or folder is not what the loader expects; the message gives its path, what was found and expected."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(f"{path}: {found}; expected {expected}")
        self.path = path
