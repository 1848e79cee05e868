"""Collectives that go through host memory: the library gets them in order, and errors stay where they belong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.staging import HostCopy, Staged, Staging


class Copies:
    """Copies that are there when the test says so."""

    def __init__(self) -> None:
        self.there: list[bool] = []

    def like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def to_host(self, tensor: Tensor) -> HostCopy:
        number = len(self.there)
        self.there.append(False)
        return HostCopy(tensor.clone(), lambda: self.there[number])

    def to_device(self, host: Tensor, into: Tensor) -> None:
        into.copy_(host)


class Request:
    def Test(self) -> bool:  # noqa: N802 - as mpi4py calls it
        return True


def staging(refused: str = "") -> tuple[Staging, Copies, list[str], Callable[..., Staged]]:
    """A staging whose library doubles what it gets and refuses one call, and what it was handed so far."""
    started: list[str] = []

    def start(call: Call, tensor: Tensor, into: Tensor) -> list[Request]:
        if call.name == refused:
            raise ValueError(f"{call.name} is refused")
        started.append(call.name)
        torch.mul(tensor, 2, out=into)
        return [Request()]

    copies = Copies()
    made = Staging(start, copies)

    def add(name: str, value: float, copied: bool = True) -> tuple[Staged, Tensor]:
        tensor = torch.full((3,), value)
        call = Call("allreduce", name, tensor.dtype, tuple(tensor.shape))
        return made.add(call, tensor, tensor, copied=copied, receives=False), tensor

    return made, copies, started, add


def test_nothing_overtakes_a_copy_that_is_not_there() -> None:
    made, copies, started, add = staging()
    (first, a), (second, b), (third, c) = add("first", 1), add("second", 2), add("third", 3, copied=False)
    copies.there[1] = True
    assert not third.done() and not second.done() and started == [] and made.waiting
    copies.there[0] = True
    assert first.done() and started == ["first", "second", "third"] and not made.waiting
    assert [one.result().tolist()[0] for one in (first, second, third)] == [2, 4, 6]
    assert [tensor.tolist()[0] for tensor in (a, b, c)] == [2, 4, 6]


def test_an_error_at_the_start_is_that_of_its_own_collective() -> None:
    """Asked about another one, it was charged to that, and the one refused never ended."""
    _, copies, started, add = staging(refused="second")
    (first, _), (second, _), (third, _) = add("first", 1), add("second", 2), add("third", 3)
    copies.there[:] = [True] * 3
    assert first.done() and third.done() and started == ["first", "third"]
    with pytest.raises(ValueError, match="second is refused"):
        second.done()


def test_all_can_be_started_before_a_call_that_goes_past_them() -> None:
    made, copies, started, add = staging()
    add("first", 1)
    copies.there[0] = True
    made.start_all()
    assert started == ["first"] and not made.waiting
