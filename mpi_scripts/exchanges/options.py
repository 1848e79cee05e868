"""The command line of bench_exchange.py: what it takes, and what is wrong with what was given."""

import argparse
import difflib
import math
from collections.abc import Sequence

from models import PUBLISHED

from exchanges.choice import COMMUNICATORS, FORMATS, Choice
from exchanges.methods import DEFAULTS, METHODS, OURS, Unknown, named
from exchanges.words import link_rate, listed
from ringprune.policies import POLICIES
from ringprune.readers import above_zero, at_least, picture, share, target

__all__ = ["SECONDS", "choice_of", "parsed"]

RATES = ("1gbit",)
SECONDS = 600.0
SIMULATED_ENTRIES = 1_000_000

DESCRIPTION = """\
Measures what exchanging the gradients of a model costs, method by method: seconds, and bytes on the wire by the
kernel's own counters. Gradients have the real shapes of the model, all parameters, and are drawn outside of what is
timed; a backward pass without computation hands them out one by one, so that hooks, buckets and overlap work as in
training.

Started as it is, it makes an emulated cluster on this machine for each number of ranks (Linux, root; one rank per host,
links of the rates given), runs a job per method on it, and takes it down. Started by mpirun it measures in the job that
it is in: on a real cluster. There --rates names the speed of the links, if you know it, and nothing is limited.
"""
EPILOG = """\
examples:
  bench_exchange.py --models resnet50,alexnet --rates 1gbit,unlimited --ranks 4 --json rows.json --plot rows.png
  bench_exchange.py --methods horovod-fp32-ring,ringprune:iwp --density 0.001 --rates 100mbit
  bench_exchange.py --simulate-ranks 2,4,8,16,32,64          bytes against ranks; no network, no root
  bench_exchange.py --methods peer --peer mine:exchange      mine.py: def exchange(named_gradients, ranks): ...
  mpirun -np 16 --hostfile hosts python mpi_scripts/bench_exchange.py --models bert_base --rates 10gbit

Open MPI chooses the algorithm of Horovod's allreduces, and does not always choose the ring; methods that end in -ring
have it forced. In a job of your own that is for mpirun to do:
  mpirun --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4 ... --methods horovod-fp32-ring

An outside exchange (--peer) is called at each step on every rank with the gradients, a mapping from names to tensors,
and with ranks.rank, ranks.size, ranks.step and ranks.density; it overwrites the gradients with their averages and
returns nothing. It starts its own communication (mpi4py, Horovod). None is bundled. Only the kernel counts its bytes.

Bytes: read from /proc/self/net/dev, all interfaces but lo, so anything else that a host sends meanwhile is in them, and
what passes the kernel by (InfiniBand, shared memory) is not. Where all ranks share a host there is only lo.

Exit status: 0; 1 a method failed; 2 wrong arguments; 3 nothing can be measured here, for example no emulated cluster
made. docs/benchmarks.md says how to read the figures; docs/api.md lists the keys of the rows.
"""


def parsed(arguments: Sequence[str] | None, *, inside: bool) -> argparse.Namespace:
    """The options; exits with status 2 and one line where they cannot work.

    Args:
        arguments: of the command line; None is this process's.
        inside: whether this process is a rank of a job already.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        named(options.methods)
        _check(options, inside)
    except (Unknown, ValueError) as error:
        parser.error(str(error))
    if options.peer and "peer" not in options.methods:
        options.methods = [*options.methods, "peer"]
    options.jobs = options.simulate_ranks is None or options.rates is not None or options.ranks is not None
    options.ranks = options.ranks or [4]
    return options


def choice_of(options: argparse.Namespace, model: str, method: str, rate: str) -> Choice:
    """What one row is measured on."""
    names = ("communicator", "density", "values", "dense_values", "bucket_bytes", "steps", "warmup", "seed", "peer")
    return Choice(model, method, rate=rate, **{name: getattr(options, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench_exchange.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument(
        "--models", type=listed(_model), default=["resnet50"], metavar="M,..", help=f"{', '.join(PUBLISHED)}; resnet50"
    )
    what.add_argument(
        "--methods", type=listed(str), default=DEFAULTS, metavar="M,..", help="see --list-methods; all but the peer's"
    )
    what.add_argument("--list-methods", action=_ListMethods, help="show the methods and leave")
    what.add_argument(
        "--peer", type=_peer, metavar="MODULE:FUNCTION", help="compare an outside exchange too; see below"
    )
    ours = parser.add_argument_group("RingPrune's methods")
    ours.add_argument("--communicator", choices=COMMUNICATORS, default="mpi", help="what carries them; mpi")
    ours.add_argument("--density", type=share, default=0.01, metavar="D", help="share of entries sent; 0.01")
    ours.add_argument("--values", choices=FORMATS, help="format of packed values; the policy's own (dgc takes none)")
    ours.add_argument(
        "--dense-values",
        choices=FORMATS,
        help="format of tensors that travel whole, with dense of all; the policy's own",
    )
    ours.add_argument(
        "--bucket-bytes", type=at_least(1), metavar="N", help="size of a bucket; the wrapper's own, 25 MiB"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--rates", type=listed(link_rate), metavar="R,..", help="100mbit, 2.5gbit, unlimited; 1gbit")
    where.add_argument(
        "--ranks",
        type=listed(at_least(2, such_as="; one alone sends nothing")),
        metavar="P,..",
        help="ranks, one per emulated host; 4",
    )
    where.add_argument(
        "--simulate-ranks",
        type=listed(at_least(2, such_as="; one alone sends nothing")),
        metavar="P,..",
        help="count bytes on simulated ranks; without --rates and --ranks nothing else",
    )
    where.add_argument(
        "--simulate-entries",
        type=at_least(1),
        default=SIMULATED_ENTRIES,
        metavar="N",
        help="of larger models the first rows of each tensor are simulated, about N entries in all; 1e6",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="steps that are timed; 5")
    how.add_argument("--warmup", type=at_least(1), default=2, metavar="N", help="steps before them; 2")
    how.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of weights, gradients and roots; 0")
    how.add_argument("--time-limit", type=above_zero, default=SECONDS, metavar="S", help="seconds for each job; 600")
    how.add_argument(
        "--within",
        type=above_zero,
        default=math.inf,
        metavar="S",
        help="begin no job later than this, and end the last one",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--json", type=target, metavar="FILE", help="write the rows for programs; - is standard output"
    )
    results.add_argument("--plot", type=picture, metavar="FILE", help="draw seconds against rate, bytes against ranks")
    return parser


class _ListMethods(argparse.Action):
    """Shows the methods, as ``--help`` shows the options."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002 - argparse's word
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        about = {name: method.about for name, method in METHODS.items()}
        made = {name: make() for name, make in POLICIES.items()}
        without_model = [name for name, policy in made.items() if policy.schedule is None and policy.rows is None]
        about[f"{OURS}POLICY"] = f"any policy that needs no model: {', '.join(without_model)}"
        width = max(map(len, about))
        print("\n".join(f"{name:{width}}  {what}" for name, what in about.items()))
        parser.exit()


def _check(options: argparse.Namespace, inside: bool) -> None:
    if "peer" in options.methods and not options.peer:
        raise ValueError("--methods peer: --peer MODULE:FUNCTION is missing")
    if not inside:
        return
    if options.ranks is not None:
        raise ValueError("--ranks: this is a job already, of as many ranks as mpirun was told")
    if options.simulate_ranks is not None:
        raise ValueError("--simulate-ranks: start it without mpirun, in one process")
    if len(options.rates or ()) > 1:
        raise ValueError("--rates: in a job that is there the links have one rate; name it, or leave it out")


def _model(text: str) -> str:
    if text not in PUBLISHED:
        near = difflib.get_close_matches(text, PUBLISHED, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(PUBLISHED)}{hint}")
    return text


def _peer(text: str) -> str:
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise argparse.ArgumentTypeError(f"{text!r}: MODULE:FUNCTION, such as mine.exchanges:sparse")
    return text
