"""``ringprune bench step``: what the wrapper adds to an optimizer's step, for the parameters of a model."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ringprune as rp
from ringprune.advise.known import MODELS, workload
from ringprune.bench import machine, table
from ringprune.bench.local_step import OPTIMIZERS, RECOMMENDED, policy_of, step_costs
from ringprune.comm.communicator import Communicator
from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.policies import Policy
from ringprune.readers import at_least, target
from ringprune.simulation.makers import POLICIES_HELP

__all__ = ["add_command"]

METHODS = ("dense", "iwp:density=0.01", RECOMMENDED)
REPETITIONS = 8

DESCRIPTION = """\
Measures what ringprune.DistributedOptimizer adds to a step of the optimizer it wraps, outside of communication: hooks,
accumulating, selecting, coding, and writing averages back. One simulated rank, that is a root at every step; gradients
are there already. Set it against what a step takes without any exchange, and what it saves on your links.
"""
EPILOG = f"""\
examples:
  ringprune bench step
  ringprune bench step --model bert_base --optimizer adamw --methods recommended
  ringprune bench step --methods iwp:density=0.01,values=bf16 dgc mipd --json rows.json

{POLICIES_HELP}
recommended is what policy="iwp" stands for. With local steps a time is the mean over the steps from one exchange to the
next. Known models: {", ".join(MODELS)}.
"""

COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("optimizer", lambda row: str(row["optimizer"])),
    ("method", lambda row: str(row["method"])),
    ("exchange", lambda row: "every step" if row["steps"] == 1 else f"every {row['steps']} steps"),
    ("plain ms", lambda row: f"{row['plain_step_ms']:.1f}"),
    ("wrapped ms", lambda row: f"{row['wrapped_step_ms']:.1f}"),
    ("communicator ms", lambda row: f"{row['communicator_ms']:.1f}"),
    ("adds ms", lambda row: f"{row['step_overhead_ms']:.1f}"),
    ("kept", lambda row: f"{row['steps_kept']}/{row['steps_of']}"),
)
LEGEND = """\
plain         a step of the optimizer alone, on the same gradients
wrapped       hooks and step() of the wrapper
communicator  of that, inside the communicator's calls and waits
adds          wrapped - plain - communicator
kept          times that count, of all: the process waited for a CPU for less than 3 % of each"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``step`` to ``ringprune bench``."""
    parser = commands.add_parser(
        "step",
        help="what the wrapper adds to a step of an optimizer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="resnet50", metavar="NAME", help="a known model, or a profile that ends in .json; resnet50")
    add("--methods", nargs="+", default=METHODS, metavar="M", help=f"policies with arguments; {' '.join(METHODS)}")
    add("--optimizer", nargs="+", default=["sgd"], choices=tuple(OPTIMIZERS), help="which to wrap; sgd, with momentum")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the parameters are; cpu")
    add("--threads", type=at_least(1), metavar="N", help="CPU threads; as many as there are cores")
    add("--repetitions", type=at_least(1), default=REPETITIONS, metavar="N", help=f"of what is timed; {REPETITIONS}")
    add("--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        rows, stopped = _rows(options)
    except RingPruneError as error:
        print(f"ringprune bench step: {error}", file=sys.stderr)
        return 2
    if options.json != "-" and rows:
        table.print_table(COLUMNS, rows)
        print(f"\n{LEGEND}")
    table.write_rows(rows, options.json)
    return table.told_of_interrupt(rows) if stopped else 0


def _rows(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure; the rows, and whether somebody stopped before all were there."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch finds no CUDA device here")
    device = torch.device(options.device)
    shapes = [shape for layer in workload(options.model).layers for shape in layer.shapes]
    chosen = [(optimizer, method, policy_of(method)) for optimizer in options.optimizer for method in options.methods]
    for optimizer, _, policy in chosen:  # before anything is timed
        rp.simulate(1, _can_wrap(OPTIMIZERS[optimizer], policy))
    torch.set_num_threads(options.threads or machine.cores())
    if options.json != "-":
        print(machine.describe(device), end="\n\n", flush=True)
    same = {"model": options.model, "device": device.type, "threads": torch.get_num_threads()} | machine.facts(device)
    rows: list[dict[str, Any]] = []
    try:
        with table.bar(len(chosen)) as show:
            for number, (optimizer, method, policy) in enumerate(chosen):
                show(f"{optimizer} {method}", number, 0.0)
                rows.append(same | _row(shapes, device, options.repetitions, optimizer, method, policy))
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def _can_wrap(
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    policy: Callable[[torch.optim.Optimizer], Policy],
) -> Callable[[Communicator], None]:
    """What fails on a rank where the two do not go together."""

    def rank(comm: Communicator) -> None:
        inner = optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        rp.DistributedOptimizer(inner, policy=policy(inner), comm=comm).close()

    return rank


def _row(
    shapes: list[tuple[int, ...]],
    device: torch.device,
    repetitions: int,
    optimizer: str,
    method: str,
    policy: Callable[[torch.optim.Optimizer], Policy],
) -> dict[str, Any]:
    make = OPTIMIZERS[optimizer]
    local = policy(make([torch.zeros(1, requires_grad=True)])).local_steps
    steps = 1 if local is None else local.count  # at a constant learning rate they do not grow
    costs = step_costs(shapes, device, repetitions, 0, policy, make, steps)
    costs["plain_step_ms"] = costs.pop("sgd_step_ms")
    return {"optimizer": optimizer, "method": method, "steps": steps, "n": sum(map(_numel, shapes))} | costs


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
