"""A job in which every rank sends so many megabytes, in messages of one megabyte, to the next rank.

It imports no torch and sleeps while it waits, so that it is soon over on a busy machine too.
"""

import faulthandler
import os
import sys
import time

from mpi4py import MPI

MESSAGE = 1_000_000

if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ["RINGPRUNE_TEST_SECONDS"]), exit=True)
    world = MPI.COMM_WORLD
    sent, received = bytearray(b"1" * MESSAGE), bytearray(MESSAGE)
    for _ in range(int(sys.argv[1])):
        requests = [
            world.Irecv(received, (world.rank - 1) % world.size),
            world.Isend(sent, (world.rank + 1) % world.size),
        ]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-3)
        assert received[-1:] == b"1"
    if world.rank == 0:
        print("transferred")
