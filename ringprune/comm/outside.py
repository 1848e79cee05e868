"""What a rank gets that is not part of the group it asked for: it can do nothing there, and waits for nobody."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import CPU, Ability, Handle, Nodes, Traffic
from ringprune.errors import UsageError

__all__ = ["OutsideCommunicator"]


class OutsideCommunicator(CheckedCommunicator):
    """A group seen from outside: ``rank`` is -1, ``size`` 0, and every collective raises UsageError.

    Args:
        kind: of the group.
    """

    abilities: frozenset[Ability] = frozenset()

    def __init__(self, kind: str) -> None:
        super().__init__(-1, 0)
        self.kind = kind
        self.traffic = Traffic(1)  # of nothing

    def divide(self, device: torch.device = CPU) -> Nodes:
        """Raise UsageError."""
        self._refuse("divide", "hosts")

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> Handle:
        """Raise UsageError."""
        self._refuse("shift", name)

    def _check_tensor(self, op: Ability, name: str, tensor: Tensor, *, rows: bool = False) -> None:
        self._refuse(op, name)

    def _refuse(self, op: Ability, name: str) -> NoReturn:
        raise UsageError(f'{op} "{name}": this rank is not part of the group that the {self.kind} communicator is of')

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        self._refuse(call.op, call.name)

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        self._refuse(call.op, call.name)

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> CheckedCommunicator | None:
        self._refuse("divide", "hosts")

    def _duplicate(self) -> "OutsideCommunicator":
        return OutsideCommunicator(self.kind)
