"""Calls of ip, tc and nsenter, whose failures become one-line errors."""

import json
import subprocess
from typing import Any

from .errors import ClusterError

__all__ = ["in_network", "ip", "run", "tc"]

SECONDS = 30


def run(*command: str) -> str:
    """The standard output of a command.

    Raises:
        ClusterError: it failed, or took more than 30 s.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)}: no answer within {SECONDS} s") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
        raise ClusterError(f"{' '.join(command)}: {said}")
    return done.stdout


def in_network(pid: int, *command: str) -> list[str]:
    """A command that runs in the network namespace of process ``pid``, and in no other namespace of it."""
    return ["nsenter", "--target", str(pid), "--net", "--", *command]


def ip(pid: int, *arguments: str) -> Any:
    """Run ``ip`` in the network namespace of ``pid`` and return what it answers, parsed; None where it is silent."""
    return _parsed(run(*in_network(pid, "ip", "-j", *arguments)))


def tc(pid: int, *arguments: str) -> Any:
    """The same for ``tc``."""
    return _parsed(run(*in_network(pid, "tc", "-j", *arguments)))


def _parsed(text: str) -> Any:
    return json.loads(text) if text.strip() else None
