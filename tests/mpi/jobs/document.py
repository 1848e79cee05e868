"""Runs Python blocks of a document: ``python -m tests.mpi.jobs.document FILE FOLDER LINE,LINE LINE ...``.

Every argument after the folder is a run: the blocks that begin at these lines, one after the other in names of their
own. What they write goes into the folder.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.documents import blocks
from tests.mpi.inside import watchdog


def main(document: Path, folder: Path, *runs: Sequence[int]) -> None:
    """Run the runs."""
    by_line = {block.line: block for block in blocks(document, "python")}
    os.chdir(folder)
    for lines in runs:
        names: dict[str, Any] = {"__name__": "__main__"}
        for line in lines:
            # Under the document's name and line numbers, so that tracebacks show its lines.
            exec(compile(by_line[line].padded, str(document), "exec"), names)


if __name__ == "__main__":
    watchdog()
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), *([int(n) for n in run.split(",")] for run in sys.argv[3:]))
