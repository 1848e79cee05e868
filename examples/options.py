"""The command line that the training scripts share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from distribute import POLICIES
from ranks import started_by_torchrun

from ringprune.readers import above_zero, at_least, share

__all__ = ["options", "total_steps", "warmup_then_cosine"]

EPILOG = """\
policies:
  horovod-fp32   hvd.DistributedOptimizer as it is
  horovod-fp16   the same with hvd.Compression.fp16
  dense          ringprune.DistributedOptimizer, everything sent: the results of horovod-fp32
  iwp            ringprune.DistributedOptimizer, importance weighted pruning: rp.IWP(--density, ...), of gradients
  recommended    rp.recommended(optimizer), what policy="iwp" of the library means: local steps, and what they moved
  auto           whichever of dense and iwp (without warm-up) is faster on this network, by measurement

examples:
  python examples/{script} --policy iwp                                one rank, to try things
  horovodrun -np 2 python examples/{script} --policy iwp
  mpirun -np 4 python examples/{script} --policy iwp --density 0.005
  mpirun -np 4 python examples/{script} --density 0.04 --roots all --local-steps 4
  mpirun -np 4 python examples/{script} --policy auto --log-file run.json
  torchrun --nproc-per-node 2 examples/{script} --policy iwp           torch.distributed instead of Horovod
  horovodrun -np 2 python examples/{script} --checkpoint run.pt        the same line again continues it

If a job does not start at all, ask: ringprune doctor
"""


def options(
    script: str, about: str, *, epochs: int | None = None, steps: int | None = None, **defaults: object
) -> argparse.ArgumentParser:
    """The parser of one script.

    Args:
        script: its name.
        about: what it does.
        epochs: how long to train if the user does not say.
        steps: the same in steps.
        defaults: its other defaults, for example ``lr=0.1``.
    """
    parser = argparse.ArgumentParser(
        description=about, epilog=EPILOG.format(script=script), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    exchange = parser.add_argument_group("how gradients are exchanged")
    exchange.add_argument("--policy", choices=POLICIES, default="iwp", help="see below (%(default)s)")
    exchange.add_argument(
        "--density",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="iwp, auto: share of a tensor's entries sent per step (%(default)s)",
    )
    exchange.add_argument(
        "--density-warmup",
        type=at_least(0),
        metavar="STEPS",
        help="iwp: steps in which the density falls from 1 to --density (a tenth of all)",
    )
    exchange.add_argument(
        "--roots",
        type=_roots,
        default=1,
        metavar="N|all",
        help="iwp, auto: how many ranks propose what to send at each step (%(default)s)",
    )
    exchange.add_argument(
        "--local-steps",
        type=at_least(1),
        metavar="H",
        help="iwp: exchange what H steps have moved the weights by, instead of every gradient (off)",
    )
    exchange.add_argument(
        "--comm",
        choices=("horovod", "mpi", "torch"),
        default="torch" if started_by_torchrun() else "horovod",
        help="all but horovod-*: what carries the messages (torch under torchrun, else horovod)",
    )

    training = parser.add_argument_group("training")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=at_least(1), help=f"passes over the training data ({epochs or 'see --steps'})")
    length.add_argument("--steps", type=at_least(1), help=f"steps instead of epochs ({steps or 'see --epochs'})")
    training.add_argument(
        "--batch-size", type=at_least(1), metavar="N", help="examples per rank and step (%(default)s)"
    )
    training.add_argument("--lr", type=above_zero, help="highest learning rate: warm-up, then a cosine (%(default)s)")
    training.add_argument(
        "--clip",
        type=above_zero,
        metavar="NORM",
        help="bound on the norm of the gradient; auto: of each tensor's (%(default)s)",
    )
    training.add_argument(
        "--seed",
        type=at_least(0, 2**32, " and below 2^32"),
        default=1,
        help="weights, order of the data, choice of roots (%(default)s)",
    )
    training.add_argument(
        "--validate-every", type=at_least(0), metavar="STEPS", help="how often; 0: at the end (an epoch)"
    )

    results = parser.add_argument_group("results")
    results.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="continue from FILE.rank0, FILE.rank1, ... if they exist; save there at every validation",
    )
    results.add_argument(
        "--stop-at",
        type=at_least(1),
        metavar="STEP",
        help="save and stop there, as if the time of the job were up; needs --checkpoint",
    )
    # not "--log": horovodrun would take that for one of its own options
    results.add_argument("--log-file", type=Path, metavar="FILE", help="write curves, metric, speed and bytes as JSON")
    parser.set_defaults(usual_length=(epochs, steps), **defaults)
    return parser


def _roots(text: str) -> int | str:
    return text if text == "all" else at_least(1, such_as=', or "all"')(text)


def total_steps(args: argparse.Namespace, steps_per_epoch: int) -> int:
    """How long to train; fills in the options that depend on it."""
    if args.stop_at and not args.checkpoint:
        raise SystemExit("--stop-at saves and stops: it needs --checkpoint FILE")
    epochs, steps = (args.epochs, args.steps) if args.epochs or args.steps else args.usual_length
    steps = steps or epochs * steps_per_epoch
    if args.density_warmup is None:
        args.density_warmup = steps // 10 // (args.local_steps or 1)  # counted in exchanges
    if args.validate_every is None:
        args.validate_every = steps_per_epoch
    return int(steps)


def warmup_then_cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """Factor of the learning rate at each step: rises for ``warmup`` steps, then falls to zero along a cosine."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor
