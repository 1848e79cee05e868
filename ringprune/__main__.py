"""The command line: ``ringprune <command>``, or ``python -m ringprune <command>``."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

import ringprune
from ringprune import advise, doctor, profiles, report, simulation
from ringprune.bench.command import add_command as add_bench

__all__ = ["main"]

EXAMPLES = """\
examples:
  ringprune doctor                what is built and found, and the command that mends what is missing
  ringprune doctor --json -       the same for programs
  ringprune bench select          what finding the most important entries costs
  ringprune bench step            what the wrapper adds to a step of the optimizer it wraps
  ringprune bench wire            what coding and decoding messages costs
  ringprune advise --model resnet50 --ranks 16 --rate 10gbit      whether compression would pay there
  ringprune simulate accuracy     what every method costs in accuracy within the same bytes: days; --quick: seconds
  ringprune report run.jsonl      what a run has sent, from the file that ringprune.StatsLog wrote
  ringprune profile train.py      how long each layer of a training script's model takes: the file a replay reads
"""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``ringprune``; None takes those of this process.

    Returns:
        The exit status: 0 when the command succeeded.
    """
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of users' own may have letters that it has not
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return int(options.run(options))
    except BrokenPipeError:  # who reads what is printed has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process, which flushes it
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"ringprune {options.command}: {error}: make room there, and run it again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ringprune: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringprune",
        description="Gradient compression for data-parallel PyTorch training with Horovod and MPI.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringprune {ringprune.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    doctor.add_command(commands)
    advise.add_command(commands)
    add_bench(commands)
    simulation.add_command(commands)
    profiles.add_command(commands)
    report.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
