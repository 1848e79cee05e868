"""Loops compiled by numba, for messages on the host: the decorator, and instructions that numba has no name for."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

__all__ = ["bits_of", "compiled", "float_of", "ones", "trailing_zeros"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function of arrays and numbers at its first call; the result is kept on disk. It releases the GIL.

    Accesses are not checked: what such a function reads may have come from another rank, so it has to check by itself.
    """
    dispatcher: Any = njit(nogil=True)(function)
    with suppress(RuntimeError):  # neither the package's folder nor the user's can be written
        dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]  # as numba leaves it
    return cast(F, dispatcher)


class _Cache(FunctionCache):
    """Numba's. What cannot be kept is compiled anew by each process: a full disk ended the step of one rank alone."""

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]  # as numba leaves it


def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Number of the lowest bit set of a uint64 other than 0."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), emit


def _ones(typing_context: Any, word: Any) -> Any:
    """Number of bits set in a uint64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), emit


def _bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as a uint32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), emit


def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 of these bits, a uint32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), emit


trailing_zeros: Any = intrinsic(_trailing_zeros)
ones: Any = intrinsic(_ones)
bits_of: Any = intrinsic(_bits_of)
float_of: Any = intrinsic(_float_of)
