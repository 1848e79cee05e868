"""``ringprune profile``: its options, what it writes, and what it prints."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

import torch

import ringprune
from ringprune.bench import machine
from ringprune.errors import RingPruneError
from ringprune.profiles import table
from ringprune.profiles.format import Profile, text, write
from ringprune.profiles.record import Enough, Recorder
from ringprune.profiles.script import run_script, stdout_to_stderr
from ringprune.profiles.summary import passes, profile_of
from ringprune.readers import at_least, target

__all__ = ["add_command"]

FAILED, WRONG_ARGUMENTS, INTERRUPTED = 1, 2, 130  # exit status

NEXT = """\
next, for example:
  ringprune advise --model {0} --ranks 16 --rate 10gbit     whether compression would pay there
  mpi_scripts/replay.py {0} --rates 10gbit     the same with real messages (Linux, root; in a checkout)"""
"""What a profile is for; both take what ends in .json."""

DESCRIPTION = """\
Runs a training script unchanged, as one rank on the CPU or one GPU, and writes its model's profile: each layer's
parameters, and how long its forward and its backward pass take. mpi_scripts/replay.py replays such a file on a cluster
that is emulated, at any number of ranks and any speed of the links.

The script is stopped after its warm-up and the iterations measured; nothing is computed differently until then.
"""
EPILOG = """\
examples:
  ringprune profile train.py --batch-size 32 --lr 0.1
  ringprune profile --warmup 10 --iterations 50 --name resnet50-v100 train.py
  ringprune profile --output - train.py > mine.profile.json

Options of this command stand before SCRIPT, those of the script behind it. Profile the script with its plain optimizer
and without torch.compile: what a wrapper does in hooks of the backward pass counts as backward, and watching layers
breaks compiled graphs.

A layer is a module with parameters of its own. Its forward time is from its call to that of the next layer, its
backward time from the moment the gradients of the layer behind it are there to the moment its own are: what lies in
between (activations, pooling, the loss) counts, and layers add up to the whole. Passes of one step add up too. Times
are medians over the iterations, scaled by one factor each for forward and backward so that they add up to the median
pass. Data loading, the optimizer's step, and passes without gradients (validation) are left out.

Exit status: 0; 1 the script failed, or nothing could be measured; 2 wrong arguments; 130 interrupted.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``profile`` to the command line."""
    parser = commands.add_parser(
        "profile",
        help="how long each layer of a training script's model takes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    options = [
        add("--warmup", type=at_least(1), default=3, metavar="N", help="iterations before those that are measured; 3"),
        add("--iterations", type=at_least(1), default=10, metavar="N", help="iterations that are measured; 10"),
        add("--to-end", action="store_true", help="let the script go on to its end, unwatched"),
        add("--name", metavar="NAME", help="the model's; that of the script"),
        add("--output", type=target, metavar="FILE", help="NAME OF THE SCRIPT.profile.json; - is standard output"),
    ]
    add("script", type=_script, metavar="SCRIPT", help="a training script in Python")
    rest = add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own")
    rest.required = False  # argparse would name them as missing with the script
    parser.set_defaults(run=_run, ours=[word for option in options for word in option.option_strings])


def _run(options: argparse.Namespace) -> int:
    try:
        output = options.output or target(f"{options.script.stem}.profile.json")
    except argparse.ArgumentTypeError as error:
        print(f"ringprune profile: {error}; --output FILE says another", file=sys.stderr)
        return WRONG_ARGUMENTS
    to = None if output == "-" else Path(output).absolute()  # the script may go elsewhere
    with nullcontext() if to else stdout_to_stderr():
        profile, status = _record(options)
        if profile is not None:
            table.show(profile)
    if profile is not None and to is not None:
        write(profile, to)
        print(f"written: {output}")
        if output.endswith(".json"):
            print(NEXT.format(shlex.quote(output)))
    elif profile is not None:
        print(text(profile), end="")
    return status


def _record(options: argparse.Namespace) -> tuple[Profile | None, int]:
    """What came of it, and the exit status; what went wrong is on standard error."""
    recorder = Recorder(options.warmup, options.iterations, stop=not options.to_end)
    status, failure = 0, None
    try:
        with recorder:
            failure = run_script(options.script, options.arguments)
    except Enough:
        pass
    except KeyboardInterrupt:
        status = INTERRUPTED
    if failure is not None:
        hint = _misplaced(options.arguments, options.ours)
        _tell(f"{options.script} {failure} after {recorder.steps} steps; nothing is written{hint}")
        return None, FAILED
    try:
        profile = profile_of(recorder, options.name or options.script.stem, _provenance(options.script, recorder))
    except RingPruneError as error:
        _tell(f"{options.script}: {error}")
        return None, status or FAILED
    if any(hasattr(root, "_orig_mod") for root in recorder.roots):
        _tell("torch.compile was used: to watch layers breaks its graphs, these are not the times of compiled code")
    if len(recorder.iterations) < options.iterations:
        ended = "was interrupted" if status else "ended"
        _tell(f"{options.script} {ended} after {len(recorder.iterations)} of {options.iterations} iterations measured")
    return profile, status


def _misplaced(arguments: Sequence[str], ours: Sequence[str]) -> str:
    """A hint, where the script was given options that are this command's."""
    found = [word for word in arguments if word.partition("=")[0] in ours]
    return f" ({found[0]} went to the script: options of ringprune profile stand before it)" if found else ""


def _provenance(script: Path, recorder: Recorder) -> str:
    devices = [param.device for param in recorder.trained]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    dtypes = dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in recorder.trained)
    count = len(recorder.iterations)
    several = f" of {number} passes" if count and (number := passes(recorder.iterations)) > 1 else ""
    parts = [
        f"measured: {script.name} on {machine.facts(device)['processor']}{threads}",
        f"parameters {' and '.join(dtypes)}",
        f"first input {recorder.batch or 'unknown'}",
        f"medians of {count} iterations{several}",
        f"torch {torch.__version__}",
        f"ringprune {ringprune.__version__}",
        f"{datetime.now(timezone.utc):%Y-%m-%d}",
    ]
    return ", ".join(parts)


def _tell(message: str) -> None:
    print(f"ringprune profile: {message}", file=sys.stderr)


def _script(word: str) -> Path:
    path = Path(word)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{word!r}: no such file; a training script in Python")
    return path
