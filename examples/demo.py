"""Horovod, Horovod with fp16 and RingPrune side by side on two tasks: a table for each and two figures at the end."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import draw
from jobs import Job, JobError, horovodrun
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rows import method_of, row_of, table_of

from ringprune.readers import above_zero, at_least

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
POLICIES = ("horovod-fp32", "horovod-fp16", "iwp", "recommended")


@dataclass(frozen=True)
class Task:
    """A training script, its options, and the learning rate of each policy."""

    script: str
    options: tuple[str, ...]
    learning_rates: dict[str, float]


# Each policy has the best learning rate of its grid (2 ranks, seed 1). digits: 0.05, 0.1, 0.2; 0.2 is too high for iwp.
# charlm, loss at 400 steps: Horovod at 3, 6, 12: 1.89, 1.84, 1.87;
# iwp at 3, 6, 8, 12, 24: 2.20, 2.03, 1.99, 1.96, 2.05; at 500 steps recommended at 3, 6, 12: 1.87, 1.80, 1.79.
TASKS = {
    "digits": Task("train_digits.py", ("--epochs", "20"), dict.fromkeys(POLICIES, 0.1)),
    "charlm": Task(
        "train_charlm.py", ("--steps", "500"), {"horovod-fp32": 6, "horovod-fp16": 6, "iwp": 12, "recommended": 12}
    ),
}
# All ranks propose their share of the entries: the bytes of one root, and a better choice (charlm: 1.96, not 2.04).
IWP = ("--density", "0.01", "--roots", "all")


def main() -> int:
    """Run all jobs, show the table, write results and figures; the exit status says whether all went well."""
    args = arguments()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    for old in ("results.json", "loss_vs_steps.png", "loss_vs_bytes.png"):
        (args.out / old).unlink(missing_ok=True)  # nobody should take an earlier run for this one
    shutil.rmtree(args.out / "runs", ignore_errors=True)
    started = time.perf_counter()
    try:
        records = run_all(args, console)
    except (JobError, FileNotFoundError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    rows = [row_of(record) for record in records]
    for task in args.tasks:
        console.print(table_of([row for row in rows if row["task"] == task]))
    console.print("kB are sent per rank and step, warm-up included; ratios compare with dense fp32.")
    figures = draw(records, args.out)
    write(args.out / "results.json", rows)
    console.print(f"{time.perf_counter() - started:.0f} s; wrote {args.out / 'results.json'}", *figures, soft_wrap=True)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="N", help="seeds 1 to N (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="all of them unless given")
    parser.add_argument(
        "--steps", type=at_least(1), metavar="N", help="cut every run to this many steps, to try things"
    )
    parser.add_argument("--time-limit", type=above_zero, default=300, metavar="S", help="seconds of each run (300)")
    parser.add_argument("--out", type=Path, default=BUILD / "demo", metavar="DIR", help="for results (build/demo)")
    parser.add_argument("--logs", type=Path, default=BUILD / "logs", metavar="DIR", help="for logs (build/logs)")
    return parser.parse_args()


def run_all(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Run every task with every policy and seed, one after the other; returns what the scripts wrote."""
    records = []
    with bars(console) as progress:
        for task in args.tasks:
            for policy in POLICIES:
                for seed in range(1, args.seeds + 1):
                    records.append(run_one(args, console, progress, task, policy, seed))
    return records


def run_one(
    args: argparse.Namespace, console: Console, progress: Progress, task: str, policy: str, seed: int
) -> dict[str, Any]:
    """Run one job with a bar of its own and return what it wrote."""
    name = f"{task} {method_of(policy)} seed {seed}"
    written = args.out / "runs" / f"{task}-{policy}-seed{seed}.json"
    options = [*TASKS[task].options] if args.steps is None else ["--steps", str(args.steps)]
    options += ["--policy", policy, "--lr", str(TASKS[task].learning_rates[policy]), "--seed", str(seed)]
    options += IWP if policy == "iwp" else ()
    command = horovodrun(args.np, HERE / TASKS[task].script, *options, "--log-file", str(written))
    bar = progress.add_task(name, total=None)
    job = Job(name, command, args.logs / f"demo-{written.stem}.log", args.time_limit)
    job.run(lambda step, steps: progress.update(bar, completed=step, total=steps))
    record: dict[str, Any] = json.loads(written.read_text())
    if not console.is_terminal:
        console.print(f"{name}: {record['metric']} {record['value']:.4f}, {record['steps_per_second']:.1f} steps/s")
    return record


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """A progress bar per job on a terminal; where there is none the jobs are named as they end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows, all or nothing."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(rows, indent=1) + "\n")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
