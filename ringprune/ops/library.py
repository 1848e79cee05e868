"""The ``ringprune`` namespace of ``torch.ops``: how an op is defined, and where its compiled kernels come from.

Three names, one thing: ``ringprune/_native*.so`` is the file, ``torch.ops.ringprune`` the ops the dispatcher knows,
``ringprune.ops`` the functions people call. The file is loaded first and the ops are defined afterwards, so that a
file built from other sources is refused with an error Python can catch.

Environment variable ``RINGPRUNE_NATIVE``: unset or ``auto`` uses the compiled library where there is one, ``require``
raises where there is none, ``off`` leaves it alone and computes with torch.
"""

import ctypes
import os
import re
import struct
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from ringprune.errors import ArgumentTypeError, ConfigurationError, NativeLibraryError, RingPruneError

__all__ = ["backend", "call", "define", "native_build", "native_library", "native_path"]

PACKAGE = Path(__file__).resolve().parent.parent
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
# csrc/library.cpp leaves this line in the file, where it can be read without loading it.
BUILD = re.compile(rb"ringprune native library, (built for torch ([^\s,]+), threads \w+)")

_LIBRARY = torch.library.Library("ringprune", "DEF")
_CHECKS: dict[OpOverload, Callable[..., None]] = {}


def native_path() -> Path | None:
    """The compiled library in use, or None where the ops run in torch."""
    return _PATH


def native_library(function: str) -> ctypes.CDLL | None:
    """The compiled library in use for its plain C functions; None without one.

    Raises:
        NativeLibraryError: it has no such ``function``: it was built from other sources.
    """
    if _PATH is None:
        return None
    library = ctypes.CDLL(str(_PATH))
    if not hasattr(library, function):
        raise _native_error(_PATH, f"it has no {function}")
    return library


def native_build() -> str | None:
    """How the library in use was built, for example ``built for torch 2.13.0, threads OpenMP``; None without one."""
    found = _build(_PATH) if _PATH else None
    return found[1].decode() if found else None


def backend() -> Literal["native+cuda", "native", "reference"]:
    """Who computes: the compiled kernels for CPU and CUDA, for CPU only, or torch."""
    if _PATH is None:
        return "reference"
    return "native+cuda" if _has_kernel("select", "CUDA") else "native"


def define(
    schema: str, check: Callable[..., None], reference: Callable[..., Any], fake: Callable[..., Any]
) -> OpOverload:
    """Define one op of ``torch.ops.ringprune``.

    Args:
        schema: name, arguments and results in torch's schema language; the only place where they stand.
        check: refuses arguments that do not fit, in the words of Python; taken like all that follow by the op's
            arguments. It is asked before ``reference`` and ``fake`` run, and to explain what a compiled kernel refused.
        reference: the op in torch, or in numba where torch has no such operation; runs on every device for which the
            compiled library has no kernel.
        fake: the shapes and dtypes of the results, for ``torch.compile`` and fake tensors.

    Returns:
        The op as the dispatcher calls it.

    Raises:
        NativeLibraryError: the compiled library is in use, and has no CPU kernel for this op or one for other
            arguments: it was built from other sources.
    """
    name = schema.partition("(")[0]

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object, **kwargs: object) -> Any:
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    try:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        if _PATH is None:
            raise
        raise _native_error(_PATH, f"its kernel for {name} takes other arguments: {error}") from error
    if _PATH is not None and not _has_kernel(name, "CPU"):
        raise _native_error(_PATH, f"it has no CPU kernel for {name}")
    _LIBRARY.impl(name, checked(reference), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringprune::{name}", checked(fake), lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.ringprune, name).default
    _CHECKS[op] = check
    return op


def call(op: OpOverload, *args: object, **kwargs: object) -> Any:
    """Call ``op`` outside of autograd, with the errors of its kernel as ours.

    Compiled kernels check their arguments themselves: in front of them the checks of Python would cost more than a
    small bucket's work. They are asked after a refusal, for they know Python's types and name arguments better.

    Raises:
        ConfigurationError: a value was refused.
        ArgumentTypeError: a type was refused.
    """
    try:
        with torch.no_grad():
            return op(*args, **kwargs)
    except RingPruneError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        _CHECKS[op](*args, **kwargs)
        if isinstance(error, ValueError):
            raise ConfigurationError(str(error)) from None
        if isinstance(error, TypeError):
            raise ArgumentTypeError(str(error)) from None
        raise


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"ringprune::{name}", key))


def _load(package: Path, mode: str) -> Path | None:
    """Load the compiled library beside ``package`` as ``mode`` asks; returns its path, or None where not used."""
    if mode not in ("auto", "require", "off"):
        raise ConfigurationError(f"RINGPRUNE_NATIVE is {mode!r}; allowed: auto, require, off")
    if mode == "off":
        return None
    path = _find(package)
    if path is None:
        if mode == "require":
            raise _native_error(package / "_native*.so", "no such file, and RINGPRUNE_NATIVE=require")
        return None
    build = _build(path)
    if build is None:
        raise _native_error(path, "it is unreadable, damaged, or not a library of RingPrune")
    if _release(build[2].decode()) != _release(torch.__version__):
        raise _native_error(path, "it was built for another torch")
    if _is_cut_short(path):
        raise _native_error(path, "it is damaged: its end is missing")
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        raise _native_error(path, str(error)) from error
    return path


def _find(package: Path) -> Path | None:
    """The library file this Python would load; None where nothing has been built."""
    for suffix in EXTENSION_SUFFIXES:
        path = package / f"_native{suffix}"
        if path.exists():
            return path
    others = sorted(package.glob("_native*.so"))
    if others:
        raise _native_error(others[0], f"it is for another Python; this one loads _native{EXTENSION_SUFFIXES[0]}")
    return None


def _is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its section table, its last part; loading one would kill the process."""
    content = path.read_bytes()
    if not content.startswith(b"\x7fELF\x02") or len(content) < 64:
        return False  # not 64-bit ELF: the loader's own checks have to do
    start: int = struct.unpack_from("=Q", content, 40)[0]
    size, count = struct.unpack_from("=HH", content, 58)
    return len(content) < start + int(size) * int(count)


def _build(path: Path) -> re.Match[bytes] | None:
    """The line a library carries about its build; None where there is none, or no file that can be read."""
    try:
        return BUILD.search(path.read_bytes())
    except OSError:
        return None


def _release(version: str) -> list[str]:
    """``2.13.0+cpu`` -> ``["2", "13"]``: what decides whether compiled code fits."""
    return version.split(".")[:2]


def _native_error(path: Path, reason: str) -> NativeLibraryError:
    build = _build(path)
    built_for = build[2].decode() if build else "(unknown)"
    return NativeLibraryError(
        f"the compiled library {path} cannot be used: {reason}\n"
        f"  built for torch {built_for}, running torch {torch.__version__}\n"
        f"  rebuild it in the source folder: {REBUILD}\n"
        "  or compute with torch, slowly: RINGPRUNE_NATIVE=off"
    )


_PATH = _load(PACKAGE, os.environ.get("RINGPRUNE_NATIVE") or "auto")
