"""``ringprune bench``: what things cost on this machine; each module that adds a command is one benchmark."""

import argparse

from ringprune.bench import select, step, wire

__all__ = ["add_command"]


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``bench`` and its benchmarks to the command line."""
    parser = commands.add_parser(
        "bench",
        help="what things cost on this machine",
        description="Benchmarks. Each prints a table, and with --json FILE the same rows for programs.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="benchmark", title="benchmarks", required=True)
    select.add_command(benchmarks)
    step.add_command(benchmarks)
    wire.add_command(benchmarks)
