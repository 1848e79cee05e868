"""``ringprune simulate run``: single runs of chosen methods, rates and seeds, added to a store."""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ringprune.bench.table import plain
from ringprune.errors import RingPruneError
from ringprune.readers import above_zero, at_least, file
from ringprune.simulation.log import log
from ringprune.simulation.makers import POLICIES_HELP
from ringprune.simulation.progress import progress
from ringprune.simulation.spec import Spec, parse
from ringprune.simulation.store import Key, Store
from ringprune.simulation.tasks import TASKS
from ringprune.simulation.workers import Ahead, make_runs, version_of

__all__ = ["add_command", "add_shared"]

DESCRIPTION = """\
Trains every task given with every policy, learning rate and seed given, and adds each run to a store as it ends. What
the store has is not run again. A table of these runs comes last; that of all in the store is shown by
ringprune simulate accuracy --log.

One more argument of policies is the simulation's own: flush=1 sends all residuals before the model is judged.
"""
EPILOG = f"""\
{POLICIES_HELP}
A store knows runs by what policies are called: give a function of your own another name, or another --store, once it
makes another policy.

examples:
  ringprune simulate run --task charlstm --policy dense iwp:density=0.01,roots=all --rate 3 6 12
  ringprune simulate run --task digits --policy dgc --rate 0.05 --seed 0 1 2 --jobs 2 --store try.jsonl
  ringprune simulate run --task digits --policy mine:policy iwp --rate 0.05 --steps 200 --store try.jsonl
"""


def add_command(simulations: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``run`` to ``ringprune simulate``."""
    parser = simulations.add_parser(
        "run",
        help="single runs of chosen policies, learning rates and seeds",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--policy", nargs="+", required=True, metavar="SPEC", help="policies, see below")
    parser.add_argument("--rate", nargs="+", type=above_zero, required=True, metavar="RATE", help="learning rates")
    parser.add_argument("--seed", nargs="+", type=at_least(0), default=[0], metavar="N", help="seeds; 0")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="steps of each run; the task's own")
    add_shared(parser)
    parser.set_defaults(run=_run)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Options that all simulations have."""
    parser.add_argument("--ranks", type=at_least(2), default=8, metavar="N", help="how many ranks are simulated; 8")
    parser.add_argument(
        "--jobs", type=at_least(0), default=1, metavar="N", help="runs at a time, each on one core; 0: in this process"
    )
    parser.add_argument(
        "--store",
        type=file,
        default=Path("accuracy_runs.jsonl"),
        metavar="FILE",
        help="where runs are kept; %(default)s",
    )


def _run(options: argparse.Namespace) -> int:
    try:
        return _make(options)
    except RingPruneError as error:
        print(f"ringprune simulate run: {error}", file=sys.stderr)
        return 2


def _make(options: argparse.Namespace) -> int:
    specs = [parse(text) for text in options.policy]
    chosen = itertools.product(options.task, specs, options.rate, options.seed)
    keys = [_key(options, *choice) for choice in chosen]
    store = Store(options.store)
    status = progress(make_runs(partial(_plan, keys), store, options.jobs), options.jobs)
    records = store.records()
    made = [records[key.digest] for key in dict.fromkeys(keys) if key.digest in records]
    if made:
        print(plain(*log(made, probes=True)))
    return status


def _plan(keys: Sequence[Key], records: Mapping[str, Any]) -> tuple[Sequence[Key], Ahead]:
    """All of them, as they stand."""
    left = [key for key in keys if key.digest not in records]
    steps = Counter[str]()
    for key in left:
        steps[key.task] += key.steps
    return keys, Ahead(len(left), steps)


def _key(options: argparse.Namespace, name: str, spec: Spec, rate: float, seed: int) -> Key:
    task: Any = TASKS[name]
    steps = options.steps or task.steps
    return Key(name, version_of(task), spec.resolved, options.ranks, rate, seed, steps)
