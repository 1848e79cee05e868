"""``examples/train_one_file.py FOLDER`` with ``EPOCHS`` epochs.

With ``die`` it ends before the last epoch's files replace those of the one before, with ``tear`` after rank 0's has.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import horovod.torch as hvd


def replace_once(fresh: str, old: str) -> None:
    """Replace no file that is there already, or one: end the process instead, as a node that is taken away does."""
    if os.path.exists(old):
        if sys.argv[3] == "tear" and hvd.rank() == 0:
            really_replace(fresh, old)
        hvd.barrier()  # else the first to go ends the others before they have come here
        os._exit(1)
    really_replace(fresh, old)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    script = import_module("train_one_file")
    script.EPOCHS = int(sys.argv[2])
    really_replace = os.replace
    if sys.argv[3:]:
        os.replace = replace_once
    script.main(Path(sys.argv[1]))
