"""``ringprune simulate accuracy``: its options, and what it prints and writes."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringprune.bench.table import plain, write_rows
from ringprune.drawing import load_pyplot
from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.readers import at_least, folder, target
from ringprune.simulation import table
from ringprune.simulation.battery import Battery
from ringprune.simulation.cell import Record
from ringprune.simulation.document import document
from ringprune.simulation.figures import draw
from ringprune.simulation.log import log_page
from ringprune.simulation.makers import POLICIES_HELP
from ringprune.simulation.methods import BUDGETS, METHODS, budget_name, methods
from ringprune.simulation.progress import progress
from ringprune.simulation.rows import rows_of
from ringprune.simulation.run import add_shared
from ringprune.simulation.store import Store
from ringprune.simulation.study import Study
from ringprune.simulation.tasks import TASKS
from ringprune.simulation.workers import make_runs

__all__ = ["add_command"]

DESCRIPTION = """\
Trains every task with every method within every budget of bytes, and says what each costs in accuracy.

Every method goes the same way, dense too: the same data in the same order, the same steps, the same clipping of each
rank's gradient, the same grid of learning rates. All rates are run at seed 0; while the best is at an end of them, the
grid grows there by a factor of 2; the rate with the best mean gets the remaining seeds, and if then another rate's mean
is better, that one gets them too. Best is compared with best, over the same seeds.

A budget is a share of the bytes that dense fp32 sends in the whole run, with everything counted: warm-up, flush,
indices, headers, tensors that travel dense. A method's density is solved for, so that a run uses up 98 to 100 % of it.

Finished runs are kept in a store: what was stopped continues, and several processes may share one.
"""
EPILOG = """\
examples:
  ringprune simulate accuracy --task charlstm --policy dense iwp dgc --budget 1/50 --jobs 2
  ringprune simulate accuracy --jobs 2 --json accuracy.json --plots .      the whole table: days on two cores
  ringprune simulate accuracy --quick --task digits --policy dense iwp      seconds, to see that it works
  ringprune simulate accuracy --show                                       what the store has, without a run
"""


def add_command(simulations: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``accuracy`` to ``ringprune simulate``."""
    parser = simulations.add_parser(
        "accuracy",
        help="what every method costs in accuracy, within the same bytes",
        description=DESCRIPTION,
        epilog=EPILOG
        + "\nmethods:\n"
        + "".join(f"  {m.name:14} {m.says}\n" for m in METHODS if m.exists)
        + f"\n{POLICIES_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, metavar="TASK", help=f"{', '.join(TASKS)}; all")
    parser.add_argument(
        "--policy", nargs="+", metavar="METHOD", help="of those below, or policies with arguments, no density; all"
    )
    parser.add_argument("--budget", nargs="+", type=_budget, metavar="SHARE", help="1/50 1/150 1/300 1/600")
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help="seeds of the best rate; 3, for digits 5")
    parser.add_argument("--quick", action="store_true", help="16 steps, one rate, 2 seeds: figures that say nothing")
    parser.add_argument("--show", action="store_true", help="make no runs, show what the store has")
    parser.add_argument("--log", action="store_true", help="show all runs in the store as Markdown; makes none")
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output"
    )
    parser.add_argument("--plots", type=folder, metavar="DIR", help="write plots: loss and steps, best value and bytes")
    parser.add_argument(
        "--document", type=Path, metavar="DIR", help="write DIR/accuracy.md of all cells, rows and plots; makes no runs"
    )
    add_shared(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        _check_whole(options)
        if options.plots is not None:
            load_pyplot()  # or no run is made
        battery = Battery(
            [TASKS[name] for name in options.task or TASKS],
            methods(options.policy),
            options.budget or (BUDGETS[:1] if options.quick else BUDGETS),
            options.ranks,
            options.seeds,
            quick=options.quick,
        )
        store = Store(options.store)
        looking = options.show or options.log or options.document
        status = 0 if looking else progress(make_runs(battery.plan, store, options.jobs), options.jobs)
        records = store.records()
        if options.log:
            print(log_page(records.values(), probes=True))
        else:
            _give(battery.studies(records), records, options)
    except RingPruneError as error:
        print(f"ringprune simulate accuracy: {error}", file=sys.stderr)
        return 2
    return status


def _check_whole(options: argparse.Namespace) -> None:
    """A page of a part of the cells would take the others' place, and a log is all that is shown.

    Raises:
        ConfigurationError: it was asked for.
    """
    written = [name for name in ("json", "plots", "document") if getattr(options, name) is not None]
    if options.log and written:
        raise ConfigurationError(f"--log shows the runs in the store and nothing else: leave --{written[0]} away")
    partial = [name for name in ("task", "policy", "budget", "seeds", "quick") if getattr(options, name)]
    if options.document is not None and partial:
        raise ConfigurationError(
            f"--document writes the whole page, of all cells: leave --{' and --'.join(partial)} away; --plots and "
            "--json take a part of them"
        )


def _give(studies: Sequence[Study], records: Mapping[str, Record], options: argparse.Namespace) -> None:
    """What was asked for: tables, rows, plots, the page."""
    if options.json != "-":
        _show(studies, options.ranks)
    write_rows([row for study in studies for row in rows_of(study)], options.json)
    written = [] if options.plots is None else draw(studies, options.plots)
    written += [] if options.document is None else document(options.document, studies, records)
    if written and options.json != "-":
        print("", "wrote " + ", ".join(map(str, written)), sep="\n")


def _show(studies: Sequence[Study], ranks: int) -> None:
    for task in dict.fromkeys(study.cell.task for study in studies):
        own = [study for study in studies if study.cell.task is task]
        print(f"\n{task.name}: {task.metric}, {ranks} ranks, {own[0].cell.steps} steps\n")
        print(plain(*table.lines(own)))
        print("", *table.front(own), sep="\n")


def _budget(text: str) -> float:
    above, _, below = text.partition("/")
    try:
        share = float(above) / float(below or "1")
    except (ValueError, ZeroDivisionError):
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share of the bytes of dense, such as {budget_name(BUDGETS[0])}")
    return share
