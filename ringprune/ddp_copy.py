"""What a copy of a DistributedDataParallel has in place of its hook, which is connected to other ranks."""

from typing import Any, NoReturn

from ringprune.errors import UsageError

__all__ = ["LeftBehind"]


class LeftBehind:
    """A base of hooks: a copy of DDP, as ``AveragedModel`` makes one, or one that is saved, comes without.

    DDP keeps its hooks in a list, which is copied and pickled with it. Torch registers none of them with the copy.
    """

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    """Stands in the copy's list."""

    def __call__(self, state: object, bucket: object) -> NoReturn:
        raise UsageError(
            "a DistributedDataParallel that was copied or loaded has no hook: register a new ringprune.ddp_hook with it"
        )
