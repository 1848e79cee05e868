"""Builds the kernels with a sanitizer, and calls them with random arguments in a process that may die of it.

The round that failed is played once more with its seed and ``--rounds 1``::

    python -m tests.sanitizers address                AddressSanitizer and UndefinedBehaviorSanitizer, 60 s
    python -m tests.sanitizers thread                 ThreadSanitizer, 60 s
    python -m tests.sanitizers address --seed 7 --rounds 1
"""

import argparse
import os
import secrets
import subprocess
import sys
import time

from tests.sanitizers.build import FOLDER, ROOT, SANITIZERS, Missing, build, preloaded

LARGE = {"address": 0.05, "thread": 0.3}  # share of calls whose work is divided among threads


def main() -> int:
    """Returns 0 where nothing was found, 1 where something was, 2 where the sanitizer is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (60)")
    parser.add_argument("--rounds", type=int, default=10**9, help="at most so many rounds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first round (random)")
    given = parser.parse_args()
    sanitizer = SANITIZERS[given.sanitizer]
    start = time.monotonic()
    try:
        library = build(sanitizer)
        runtimes = preloaded(sanitizer)
    except Missing as error:
        print(f"cannot look for errors: {error}", file=sys.stderr)
        return 2
    print(f"{given.sanitizer}: built in {time.monotonic() - start:.0f} s; seed {given.seed}", flush=True)

    at = FOLDER / sanitizer.name / f"round.{os.getpid()}"
    numbers = {"seconds": given.seconds, "seed": given.seed, "rounds": given.rounds, "large": LARGE[sanitizer.name]}
    options = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.sanitizers.rounds", str(library), "--at", str(at), *options]
    environment = os.environ | sanitizer.options
    environment |= {"LD_PRELOAD": " ".join(runtimes), "RINGPRUNE_NATIVE": "off", "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_WAIT_POLICY": "passive"}  # more threads than cores: one that waits leaves its core
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    seed = at.read_text().strip() if at.exists() else str(given.seed)
    at.unlink(missing_ok=True)
    if code == 0:
        print("nothing found")
        return 0
    print(f"FOUND in round {seed} (exit status {code}). Once more:", file=sys.stderr)
    print(f"  python -m tests.sanitizers {sanitizer.name} --seed {seed} --rounds 1", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
