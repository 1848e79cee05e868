"""``ringprune advise``: its options, and what it prints and writes."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch

from ringprune.advise.figure import RATES, draw
from ringprune.advise.job import Job, Over, likely, measure_job
from ringprune.advise.known import MODELS, of_entries, workload
from ringprune.advise.overheads import overheads
from ringprune.advise.rows import DENSE, METHODS, Row, curve, rows_of
from ringprune.advise.words import COLUMNS, LEGEND, mixtures, sentence
from ringprune.bench.local_step import OPTIMIZERS, RECOMMENDED, policy_of
from ringprune.bench.table import print_table
from ringprune.comm.communicator import ASKED
from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.policies import Policy
from ringprune.prediction import DEVICES, GOODPUT, LATENCY_SECONDS, Link, Setting, Speeds, Workload
from ringprune.probing.speeds import measured
from ringprune.readers import above_zero, at_least, picture, rate, share, target, written_rate
from ringprune.simulation.makers import POLICIES_HELP
from ringprune.whole_file import write_json

__all__ = ["add_command"]

HERE = None
"""Instead of a rate: that of the job's own links."""

DESCRIPTION = """\
Says whether compression would pay, before anything is run: the time of a training step with each method, predicted
from the sizes of the model's tensors, the time of its forward and backward pass, the number of ranks and the rate of
the links. On fast links it often does not pay, and then the answer is to leave it off.

A prediction is as good as what it rests on; that is printed below the table. It says nothing about accuracy.
"""
EPILOG = f"""\
examples:
  ringprune advise --model resnet50 --ranks 16 --rate 10gbit --compute-ms 180
  mpirun -np 4 --hostfile hosts ringprune advise --model resnet50 --rate here --measure       on the cluster itself
  ringprune advise --model vgg19 --ranks 4 --rate 1gbit --device gpu --plot vgg19.png
  ringprune advise --model mine.json --ranks 8 --rate 25gbit --measure          a profile; this machine's own speed
  ringprune advise --entries 350e6 --ranks 32 --rate 100gbit --compute-ms 400 --json -
  ringprune advise --model vgg19 --ranks 8 --rate 1gbit --methods iwp:density=0.01,values=fp16 dense:local_steps=4

--compute-ms is what one step takes on one rank without any exchange: measure it there, with your batch. Without it the
known models take what operation counts tell of a slow GPU, so that the answer is a rough one.

{POLICIES_HELP}
{RECOMMENDED} is what policy="iwp" stands for in the wrapper, for --optimizer, at the highest learning rate. The other
names are those of policies' functions: iwp is ringprune.IWP().

Known models: {", ".join(MODELS)}.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``advise`` to the command line."""
    parser = commands.add_parser(
        "advise",
        help="whether compression would pay, predicted without running anything",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_job(parser)
    _add_assumptions(parser)
    _add_answer(parser)
    parser.set_defaults(run=_run, link="as given", shares={})


def _add_job(parser: argparse.ArgumentParser) -> None:
    """What is asked about."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="a known model, or a profile: a file that ends in .json")
    entries, ranks = at_least(1, 1e18, " and below 1e18"), at_least(1, 1e9, " and below 1e9")
    what.add_argument("--entries", type=entries, metavar="N", help="a model of so many entries, in equal matrices")
    add("--ranks", type=ranks, metavar="N", help="how many, each with a link of its own; of a job, its own")
    rate_help = "of the links: 100mbit, 2.5gbit, unlimited; here: measure"
    add("--rate", type=_rate, required=True, metavar="R", help=rate_help)
    add("--compute-ms", type=above_zero, metavar="MS", help="forward and backward pass of one step, without exchange")
    add("--methods", nargs="+", default=METHODS, metavar="M", help="policies; first those that leave least out")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help=f"what {RECOMMENDED} is made for; sgd")


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    """What the answer rests on, where nothing else is said."""
    add = parser.add_argument
    speed = parser.add_mutually_exclusive_group()
    device_help = "where gradients live; gpu is assumed, not measured; cpu"
    speed.add_argument("--device", choices=tuple(DEVICES), default="cpu", help=device_help)
    measure_help = "measure this machine's processor, about 8 s; with --rate here those of all ranks at once"
    speed.add_argument("--measure", action="store_true", help=measure_help)
    add(
        "--communicator",
        choices=get_args(Over),
        help="what training exchanges over, and --rate here measures; mpi's messages go on during backward passes and "
        "coding only; torch under torchrun, else horovod, in a job without it mpi",
    )
    add("--latency-us", type=above_zero, metavar="US", help="of a message; 50, with --rate here as measured")
    goodput_help = "payload's share of the rate; 0.94, TCP on Ethernet"
    add("--goodput", type=share, default=GOODPUT, metavar="S", help=goodput_help)


def _add_answer(parser: argparse.ArgumentParser) -> None:
    """Where it goes."""
    add = parser.add_argument
    add("--plot", type=picture, metavar="FILE", help="draw step time against rate; .png, .pdf or .svg")
    add("--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output")


def _run(options: argparse.Namespace) -> int:
    try:
        methods = _methods(options.methods, options.optimizer)
        found = _workload(options)
        speeds = network = None
        over = options.communicator or (likely() if options.rate is HERE else "horovod")
        if options.rate is HERE:
            if options.latency_us is not None:
                raise ConfigurationError("--latency-us with --rate here: it is measured; leave one of them away")
            job = measure_job(over, processors=options.measure)
            if job.rank:
                return 0  # rank 0 answers for all
            speeds, network = job.speeds, job.network
            _take_over(job, options)
        if options.ranks is None:
            raise ConfigurationError("--ranks N is missing: how many ranks there are")
        if speeds is None:
            speeds = measured(*overheads()) if options.measure else DEVICES[options.device]
        if options.latency_us is None:
            options.latency_us = 1e6 * LATENCY_SECONDS
        latency = options.latency_us / 1e6
        link_of = partial(Link.of_rate, latency_seconds=latency, goodput=options.goodput, shares=options.shares)
        link = network if network is not None and network.ranks == options.ranks else link_of(options.rate)
        setting = Setting(found, options.ranks, link, speeds, groups=over == "horovod", asked=over in ASKED)
        rows = [row | _facts(setting, over, options) for row in rows_of(setting, methods, link_of)]
        if options.plot:
            _draw(setting, methods, link_of, options)
    except RingPruneError as error:
        print(f"ringprune advise: {error}", file=sys.stderr)
        return 2
    if options.json != "-":
        _show(rows, written_rate(options.rate), speeds)
    write_json(rows, options.json)
    return 0


def _rate(text: str) -> float | None:
    return HERE if text == "here" else rate(text)


def _take_over(job: Job, options: argparse.Namespace) -> None:
    """Answer for the job's own ranks and links, where nothing else was asked for."""
    options.ranks = options.ranks or job.network.ranks
    options.rate = 8 * job.link.bytes_per_second / options.goodput
    options.latency_us, options.shares = 1e6 * job.link.latency_seconds, job.link.shares
    shares = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in job.link.shares.items())
    options.link = f"measured on {job.network.ranks} ranks, whose collectives reach of it: {shares}"


def _methods(names: Sequence[str], optimizer: str) -> dict[str, Policy]:
    """Policies by name; dense comes first, whether or not it was asked for.

    Raises:
        ConfigurationError: there is no such policy.
    """
    wrapped = OPTIMIZERS[optimizer]([torch.zeros(1)])
    return {name: policy_of(name)(wrapped) for name in dict.fromkeys([DENSE, *names])}


def _workload(options: argparse.Namespace) -> Workload:
    """What is trained.

    Raises:
        ConfigurationError: the model is not known, or nothing tells how long it computes.
    """
    seconds = None if options.compute_ms is None else options.compute_ms / 1e3
    if options.entries is not None:
        if seconds is None:
            raise ConfigurationError("--entries needs --compute-ms: how long forward and backward pass take")
        return of_entries(options.entries, seconds)
    found = workload(options.model)
    if seconds is None:
        return found
    return found.taking(seconds, f"{options.compute_ms:g} ms as given, over the layers like {found.provenance}")


def _facts(setting: Setting, over: Over, options: argparse.Namespace) -> Row:
    return {
        "rate": written_rate(options.rate),
        "latency_seconds": options.latency_us / 1e6,
        "goodput": options.goodput,
        "link": options.link,
        "communicator": over,
        "compute": setting.workload.provenance,
        "speeds": setting.speeds.provenance,
    }


def _draw(
    setting: Setting, methods: dict[str, Policy], link_of: Callable[[float], Link], options: argparse.Namespace
) -> None:
    curves = {name: curve(setting, policy, RATES, link_of) for name, policy in methods.items()}
    compute = setting.workload.compute_seconds
    title = f"{setting.workload.model}, {setting.ranks} ranks, {1e3 * compute:,.0f} ms of compute"
    draw(curves, compute, options.rate, title, options.plot)


def _show(rows: Sequence[Row], written: str, speeds: Speeds) -> None:
    first = rows[0]
    print(sentence(rows, written), end="\n\n")
    print(f"{first['model']}: {first['entries']:,} entries, {1e3 * first['compute_seconds']:,.1f} ms of compute\n")
    print_table(COLUMNS, rows)
    print("", *mixtures(rows), LEGEND, "", *_basis(first, speeds), sep="\n")


def _basis(row: Row, speeds: Speeds) -> list[str]:
    latency, goodput = 1e6 * row["latency_seconds"], 100 * row["goodput"]
    return [
        f"compute:  {row['compute']}",
        f"local:    {row['speeds']}",
        f"          {speeds}",
        f"network:  over {row['communicator']}, {row['link']}",
        f"          {goodput:.1f} % of the rate is payload, {latency:.3g} us a message; full both ways",
        "Not in it: what a method costs in accuracy, and what summing costs the processor (docs/tuning.md).",
    ]
