"""``examples/train_one_file.py FOLDER`` with ``EPOCHS`` epochs.

With ``die`` it ends before the last epoch's files replace those of the one before.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import horovod.torch as hvd


def replace_once(fresh: str, old: str) -> None:
    """Replace no file that is there already: end the process instead, as a node that is taken away does."""
    if os.path.exists(old):
        hvd.barrier()  # else the first to go ends the others before they have come here
        os._exit(1)
    really_replace(fresh, old)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    script = import_module("train_one_file")
    script.EPOCHS = int(sys.argv[2])
    really_replace = os.replace
    if sys.argv[3:] == ["die"]:
        os.replace = replace_once
    script.main(Path(sys.argv[1]))
