"""Runs a script in this process as ``python SCRIPT ARGUMENTS`` would, and says how it ended."""

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

__all__ = ["run_script", "stdout_to_stderr"]


def run_script(script: Path, arguments: Sequence[str]) -> str | None:
    """Run it; ``__name__`` is ``"__main__"``.

    Its traceback, or what it gave to ``sys.exit``, goes to standard error. Exceptions that derive from BaseException
    alone come through, KeyboardInterrupt among them.

    Returns:
        None if it ended well, else how it failed.
    """
    with _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            return f"ended with status {ended.code if isinstance(ended.code, int) else 1}" if ended.code else None
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
                trace = trace.tb_next  # past our own frames
            traceback.print_exception(type(error), error, trace)
            return f"failed ({type(error).__name__})"
    return None


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, what this process and those it starts write to standard output goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, ``sys.argv`` and the first place that is searched for modules are those of the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:1] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
