"""Functions that make policies, as command lines name them: ours by name, a user's own as ``MODULE:FUNCTION``."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.policies import POLICIES, Policy

__all__ = ["OWN", "POLICIES_HELP", "divided", "is_own", "made", "maker"]

OWN = "MODULE:FUNCTION"

POLICIES_HELP = f"""\
policies: {", ".join(POLICIES)}, each alone or with
arguments of its function: iwp:density=0.04,roots=all,warmup=200. One of your own is {OWN}, also with arguments:
mine:policy:density=0.04 is policy(density=0.04) of mine.py in this folder, or of a module that Python finds.
"""
"""What every command that takes policies says of them."""


def divided(text: str) -> tuple[str, str]:
    """The name of a policy, and the arguments behind it."""
    first, _, rest = text.partition(":")
    second, _, arguments = rest.partition(":")
    if first.strip() in POLICIES or not second.strip() or "=" in second:
        return first.strip(), rest
    return f"{first.strip()}:{second.strip()}", arguments


def is_own(name: str) -> bool:
    """Whether it names a function of the user's."""
    return name not in POLICIES and ":" in name


def maker(name: str) -> Callable[..., Policy]:
    """The function that makes the policies of a name.

    Raises:
        ConfigurationError: it cannot be imported; says why.
    """
    if not is_own(name):
        return POLICIES[name]
    module, _, function = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there takes a library's place
    try:
        found: Callable[..., Policy] = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a module does as it is imported
        raise ConfigurationError(f"policy {name!r}, as {OWN}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigurationError(
            f"policy {name!r}: it is a {type(found).__name__}; a function that makes one is wanted"
        )
    return found


def made(name: str, arguments: Mapping[str, Any]) -> Policy:
    """The policy of a name.

    Raises:
        RingPruneError: a value cannot work, or a function of the user's makes no policy.
    """
    function = maker(name)
    if not is_own(name):
        return function(**arguments)
    try:
        policy = function(**arguments)
    except RingPruneError:
        raise
    except Exception as error:  # whatever a user's function does
        raise ConfigurationError(f"policy {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise ConfigurationError(f"policy {name!r}: its function returned {policy!r:.60}, which is no ringprune.Policy")
    return policy
