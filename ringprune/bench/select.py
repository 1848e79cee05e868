"""``ringprune bench select``: its options, and what it prints."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ringprune import ops
from ringprune.bench import machine, table
from ringprune.bench.bucket import Case
from ringprune.bench.measure import DENSITIES, SIZES, Budget, cases, measure
from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.readers import above_zero, at_least, share, target

__all__ = ["add_command"]

CASES = ("flat", "cold", "resnet50")


REFERENCE = "the torch reference computes, not compiled kernels: these figures say nothing about RingPrune's speed"

DESCRIPTION = """\
Measures what finding the most important entries of gradients costs on this machine: the fused step of RingPrune
against the same pass over memory without selection, against torch.topk, and against the sampled threshold of Deep
Gradient Compression. All of them take turns on the same data, after 12 steps of training with error feedback.

  flat      one tensor, at every size and density
  cold      the same at 1 %, with nothing remembered of the step before
  resnet50  the 161 tensors of ResNet-50 as one bucket, at every density; also what the optimizer adds to a step
"""
EPILOG = """\
examples:
  ringprune bench select                                     everything, on all cores: some 4 minutes on 2 that are idle
  ringprune bench select --cases flat --sizes 1e6 1e7 --densities 0.01 --threads 1
  ringprune bench select --quick --json -                    seconds, to see that it works: not figures to quote

A time counts only if the process waited for a CPU for less than 3 % of it, for machines are shared; medians of those
are shown. Compare ratios between machines and days; times only within a run. docs/benchmarks.md says what they mean.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``select`` to ``ringprune bench``."""
    parser = commands.add_parser(
        "select",
        help="what finding the most important entries costs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute; cpu")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads; as many as there are cores")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="which of them; all")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=at_least(1, 2**31, " and below 2**31, such as 1000000 or 1e6"),
        metavar="N",
        help="entries of flat and cold; 1e5 1e6 1e7 2.5e7",
    )
    parser.add_argument(
        "--densities", nargs="+", type=share, metavar="D", help="shares selected; 0.001 0.01 0.05 (cold: 0.01)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--repetitions", type=at_least(1), metavar="N", help="repetitions of each case, slow calls too")
    length.add_argument("--seconds", type=above_zero, metavar="S", help="seconds of repetitions in each case; 6")
    length.add_argument(
        "--quick", action="store_true", help="1e5 entries at 1 %%, 5 repetitions, no resnet50 unless named"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of weights, gradients and order; 0")
    parser.add_argument(
        "--allow-reference", action="store_true", help="measure even where the ops run in torch, not compiled"
    )
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        rows, stopped = _rows(options)
    except RingPruneError as error:
        print(f"ringprune bench select: {error}", file=sys.stderr)
        return 2
    table.write_rows(rows, options.json)
    if stopped:
        return table.told_of_interrupt(rows)
    return 0 if all(row["exact"] for row in rows) else 1


def _rows(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure, and show the table unless standard output belongs to a program.

    Returns:
        The rows, and whether somebody stopped before all were there.
    """
    device = _device(options)
    torch.set_num_threads(options.threads or machine.cores())
    people = options.json != "-"
    if people:
        print(machine.describe(device), end="\n\n", flush=True)
    same = {"device": device.type, "threads": torch.get_num_threads()} | machine.facts(device)
    rows, stopped = [], False
    try:
        for row in _measured(_cases(options), device, options, same):
            rows.append(row)
    except KeyboardInterrupt:
        stopped = True
    if people and rows:
        table.show(rows)
    return rows, stopped


def _measured(
    chosen: list[Case], device: torch.device, options: argparse.Namespace, same: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    with table.bar(len(chosen)) as move:
        for number, case in enumerate(chosen):
            what = {"case": case.name, "n": case.numel, "density": case.density}
            show = partial(move, str(case), number)
            yield what | same | measure(case, device, _budget(options), options.seed, show)


def _cases(options: argparse.Namespace) -> list[Case]:
    quick = options.quick
    names = options.cases or (("flat", "cold") if quick else CASES)
    sizes = options.sizes or (SIZES[:1] if quick else SIZES)
    return list(cases(names, sizes, options.densities or ((0.01,) if quick else DENSITIES)))


def _budget(options: argparse.Namespace) -> Budget:
    if options.quick:
        return Budget(repetitions=5, memory=4_000_000)
    default = Budget()
    return replace(default, repetitions=options.repetitions, seconds=options.seconds or default.seconds)


def _device(options: argparse.Namespace) -> torch.device:
    """Where to compute.

    Raises:
        ConfigurationError: there is no such device, or figures from there would mislead.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch finds no CUDA device here")
    compiled = ops.backend() == "native+cuda" if options.device == "cuda" else ops.backend() != "reference"
    if not compiled and not options.allow_reference:
        raise ConfigurationError(
            f"no compiled {options.device} kernels are in use (not built, or RINGPRUNE_NATIVE=off), the ops would run "
            "in torch and the figures mislead: see ringprune doctor, or pass --allow-reference"
        )
    if not compiled:
        print(f"{REFERENCE} ({options.device})", file=sys.stderr)
    return torch.device(options.device)
