"""The process under a sanitizer: rounds of random calls, each round from one seed, until the time is up."""

import argparse
import ctypes
import faulthandler
import os
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

import torch

from ringprune.ops.crc32 import bound, checksum
from tests.sanitizers.calls import GENERATORS, compare
from tests.sanitizers.misuse import refuse
from tests.sanitizers.values import Values

CALLS = 6  # of one thread in one round
HANGS = 120.0  # seconds


def play(seed: int, large: float, counter: Counter[str]) -> None:
    """One round: one to three threads that call at once, each with random arguments and threads of its own."""
    values = Values(seed)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            own = Values(seed * 8 + number + 1)
            for _ in range(CALLS):
                call(own, large, counter)
        except BaseException as error:
            errors.append(error)

    use(values.choice.randint(0, 2))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(values.choice.choice((1, 1, 1, 2, 3)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def call(values: Values, large: float, counter: Counter[str]) -> None:
    """One op with random arguments, compared with its reference; and then with the arguments broken."""
    if values.choice.random() < 0.1:
        use(values.choice.randint(0, 2))  # also while others compute
    if values.choice.random() < 0.1:
        check_crc32(values, counter)
    op = values.choice.choice([*GENERATORS, "accumulate_select", "accumulate_select"])
    for arguments in GENERATORS[op](values, large):
        compare(op, arguments, values.choice.randint(1, 4), counter)
        for _ in range(2):
            refuse(op, arguments, values, counter)
    values.check_canaries()


def check_crc32(values: Values, counter: Counter[str]) -> None:
    """The checksum of some bytes that begin anywhere."""
    (library,) = torch.ops.loaded_libraries
    data = values.tensor(values.choice.randint(0, 2_000)).view(torch.uint8).numpy()[values.choice.randint(0, 17) :]
    before = values.choice.getrandbits(32)
    assert checksum(data, before, bound(ctypes.CDLL(str(library)))) == zlib.crc32(data, before)
    counter["crc32"] += 1


def use(most: int) -> str:
    """Choose the loops: 0 portable, 1 AVX2, 2 AVX-512, as far as this processor has them."""
    (library,) = torch.ops.loaded_libraries
    choose = ctypes.CDLL(str(library)).ringprune_use_instructions
    choose.restype = ctypes.c_char_p
    return str(choose(most).decode())


def main() -> None:
    """Play rounds; the number of the round at hand is left in a file for the process that watches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--large", type=float, required=True)
    parser.add_argument("--at", type=Path, required=True)
    given = parser.parse_args()
    torch.ops.load_library(given.library)
    loops = sorted({use(most) for most in (0, 1, 2)})
    counter: Counter[str] = Counter()
    start = shown = time.monotonic()
    seed = given.seed
    at = os.open(given.at, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    while seed - given.seed < given.rounds and time.monotonic() - start < given.seconds:
        os.pwrite(at, b"%20d" % seed, 0)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            play(seed, given.large, counter)
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        seed += 1
        now = time.monotonic()
        if now - shown > (0.5 if sys.stdout.isatty() else 10):
            shown = now
            ending = "\r" if sys.stdout.isatty() else "\n"
            print(f"{now - start:4.0f} s, {seed - given.seed} rounds, {counter.total()} calls", end=ending, flush=True)
    print(f"seeds {given.seed} to {seed - 1}, {time.monotonic() - start:.0f} s, loops {', '.join(loops)}")
    print(f"  {'crc32':18} {counter['crc32']:7} compared")
    for op in GENERATORS:
        print(f"  {op:18} {counter[op]:7} compared {counter[f'{op} refused']:7} refused")


if __name__ == "__main__":
    main()
