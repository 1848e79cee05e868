"""``ringprune bench wire``: what coding and decoding messages costs, against the selection that makes them."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringprune import ops, wire
from ringprune.bench import machine, table
from ringprune.bench.stopwatch import Times, stopwatch
from ringprune.readers import at_least, target

__all__ = ["add_command", "rows"]

DESCRIPTION = """\
Measures what messages cost on this machine: coding and decoding index sets in each format, and values in each. Beside
the values stands the fused step (accumulate, score and select) on the gradient that they were taken from.
"""
INDICES = 1_000_000
ENTRIES = 25_000_000
DENSITY = 0.01
REPETITIONS = 31
UNIVERSES = (1 / 0.01, 1 / 0.0025)
"""Entries per index: densities of 1 % and 0.25 %."""

COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("what", lambda row: str(row["what"])),
    ("format", lambda row: str(row["format"])),
    ("items", lambda row: f"{row['count']:,}"),
    ("of entries", lambda row: f"{row['n']:,}"),
    ("bits/item", lambda row: f"{row['bits_per_item']:.2f}"),
    ("encode ms", lambda row: f"{row['encode_ms']:.2f}"),
    ("decode ms", lambda row: f"{row['decode_ms']:.2f}"),
    ("/ fused", lambda row: "" if row["ratio_to_fused"] is None else f"{row['ratio_to_fused']:.3f}"),
    ("kept", lambda row: f"{row['kept']}/{row['of']}{'*' if row['disturbed'] else ''}"),
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``wire`` to ``ringprune bench``."""
    parser = commands.add_parser("wire", help="what coding and decoding messages costs", description=DESCRIPTION)
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads; as many as there are cores")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the items: to see that it works")
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads or machine.cores())
    people = options.json != "-"
    if people:
        print(machine.describe(torch.device("cpu")), end="\n\n", flush=True)
    same = {"threads": torch.get_num_threads()} | machine.facts(torch.device("cpu"))
    measured, stopped = [], False
    try:
        for row in rows(100 if options.quick else 1):
            measured.append(row | same)
    except KeyboardInterrupt:
        stopped = True
    if people and measured:
        table.print_table(COLUMNS, measured)
        print("\n/ fused  encode and decode over the fused step on all entries; * too few undisturbed times")
    table.write_rows(measured, options.json)
    return table.told_of_interrupt(measured) if stopped else 0


def rows(divide: int = 1) -> Iterator[dict[str, Any]]:
    """Measure; ``divide`` makes everything that much smaller."""
    for universe in UNIVERSES:
        numel, count = int(INDICES * universe) // divide, INDICES // divide
        for name in wire.INDEX_FORMATS[1:]:
            yield _index_row(numel, count, name)
    entries = ENTRIES // divide
    fused = _fused(entries)
    for name in wire.VALUE_FORMATS[1:]:
        yield _value_row(entries, name, fused)


def _index_row(numel: int, count: int, name: str) -> dict[str, Any]:
    stride = numel // count
    positions = (torch.arange(count) * stride + torch.randint(0, stride, (count,))).int()
    code = wire.index_code(count, numel, name)
    message = code.encode(positions)
    encode, decode = _times(lambda: code.encode(positions), lambda: code.decode(message, name="m"))
    assert torch.equal(code.decode(message, name="m"), positions)
    return _row("indices", name, numel, count, code.size, encode, decode, None)


def _value_row(entries: int, name: str, fused: Times) -> dict[str, Any]:
    count = int(entries * DENSITY)
    code = wire.value_code(name)
    assert code is not None
    values, rest, into = torch.randn(count), torch.empty(count), torch.empty(count)
    message = code.encode(values, rest)
    encode, decode = _times(lambda: code.encode(values, rest), lambda: code.decode(message, into, name="m"))
    return _row("values", name, entries, count, code.size(count), encode, decode, fused)


def _fused(entries: int) -> Times:
    """Accumulating, scoring and selecting, with hints of the step before."""
    grad, weight = torch.randn(entries), torch.randn(entries)
    residual, velocity = torch.zeros(entries), torch.zeros(entries)
    hints = ops.Hints.none(1, grad.device)

    def step() -> tuple[Tensor, Tensor]:
        return ops.accumulate_select(
            [grad],
            residual,
            velocity,
            [weight],
            residual_out=residual,
            velocity_out=velocity,
            factors=[1.0],
            momentum=[0.9],
            nesterov=[False],
            score="ratio",
            parameters=[1.0],
            counts=[int(entries * DENSITY)],
            hints=hints,
        )

    for _ in range(3):
        step()
    return _times(step)[0]


def _times(*calls: Callable[[], Any]) -> list[Times]:
    """Times of some calls, taken in turns."""
    clock, times = stopwatch(torch.device("cpu")), [Times() for _ in calls]
    for _ in range(REPETITIONS):
        for call, taken in zip(calls, times, strict=True):
            taken.samples.append(clock.time(call)[0])
    return times


def _row(
    what: str, name: str, numel: int, count: int, size: int, encode: Times, decode: Times, fused: Times | None
) -> dict[str, Any]:
    return {
        "what": what,
        "format": name,
        "n": numel,
        "count": count,
        "bits_per_item": 8 * size / count,
        "encode_ms": 1e3 * encode.seconds,
        "decode_ms": 1e3 * decode.seconds,
        "ratio_to_fused": None if fused is None else (encode.seconds + decode.seconds) / fused.seconds,
        "fused_ms": None if fused is None else 1e3 * fused.seconds,
        "kept": min(encode.kept, decode.kept),
        "of": encode.of,
        "disturbed": encode.disturbed or decode.disturbed,
    }
