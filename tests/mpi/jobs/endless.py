"""A job whose ranks neither end nor let themselves be asked to; it prints their process ids."""

import os
import signal
import time

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"pid={os.getpid()};", flush=True)
    time.sleep(1000)
