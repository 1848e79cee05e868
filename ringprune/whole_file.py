"""Writing a file that nobody sees half written."""

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["write_json", "write_whole"]


def write_json(what: Any, to: str | Path | None) -> None:
    """Give programs ``what``: in a file, by ``-`` on standard output, by None nowhere."""
    if to is None:
        return
    text = json.dumps(what, indent=1)
    if to == "-":
        print(text)
    else:
        write_whole(text + "\n", to)


def write_whole(text: str, to: str | Path) -> None:
    """Put ``text`` in place of what a file holds, all at once.

    Links are followed, and a file keeps its mode. What is no regular file, such as a pipe or a device, is written to.
    """
    path = Path(to)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    there = path.resolve()
    new = there.with_name(f"{there.name}.new")
    with new.open("w") as file:
        try:
            file.write(text)
            file.close()  # what is buffered may find no room
            if there.exists():
                shutil.copymode(there, new)
            new.replace(there)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
