"""Memory that is not there, or is written while it is read: every kernel refuses it. Found by ``make fuzz``."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringprune import ops
from ringprune.errors import ConfigurationError
from ringprune.ops import Hints
from tests.ops.cases import positions

pytestmark = pytest.mark.usefixtures("native")


def given_back(entries: int, left: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose storage keeps ``left`` entries of it, as sharding wrappers leave parameters between steps."""
    tensor = torch.ones(entries, dtype=dtype)
    tensor.untyped_storage().resize_(left * tensor.element_size())
    return tensor


def accumulate_select(grad: Tensor, weight: Tensor, residual: Tensor, hints: Hints | None = None) -> None:
    """The call with one tensor, in place."""
    ops.accumulate_select(
        [grad],
        residual,
        None,
        [weight],
        residual_out=residual,
        velocity_out=None,
        factors=[1.0],
        momentum=[0.0],
        nesterov=[False],
        score="ratio",
        parameters=[0.1],
        counts=[1],
        hints=hints or Hints.none(1, torch.device("cpu")),
    )


def share_momentum(average: Tensor, elapsed: Tensor, momentum: Tensor, square: Tensor | None = None) -> None:
    """The call with one tensor, as SGD has it, or Adam where ``square`` is given."""
    adams = ops.Adams() if square is None else ops.Adams([square], [0.0], [1.0], [0.0], [1.0])
    numbers = {"intervals": [1.0], "times": [1.0], "keeps": [1.0], "whole": [True]}
    ops.share_momentum([average], [elapsed], [momentum], [torch.ones(5)], [torch.ones(5)], **numbers, adams=adams)


CALLS: dict[str, Callable[[Tensor], object]] = {
    "accumulate_select grads": lambda x: accumulate_select(x, torch.ones(5), torch.ones(5)),
    "accumulate_select weights": lambda x: accumulate_select(torch.ones(5), x, torch.ones(5)),
    "accumulate_select residual": lambda x: accumulate_select(torch.ones(5), torch.ones(5), x),
    "importance": lambda x: ops.importance(torch.ones(5), [x], score="ratio", parameters=[0.1]),
    "select": lambda x: ops.select(x, [0, 5], [1]),
    "take": lambda x: ops.take(x, None, positions(1), [0, 5]),
    "gather": lambda x: ops.gather(x, positions(1)),
    "give_back": lambda x: ops.give_back(x, positions(1), torch.ones(1)),
    "put": lambda x: ops.put([x], positions(1), torch.ones(1)),
    "share_momentum averages": lambda x: share_momentum(x, torch.ones(5), torch.ones(5)),
    "share_momentum elapsed": lambda x: share_momentum(torch.ones(5), x, torch.ones(5)),
    "share_momentum momenta": lambda x: share_momentum(torch.ones(5), torch.ones(5), x),
    "share_momentum squares": lambda x: share_momentum(torch.ones(5), torch.ones(5), torch.ones(5), x),
    "encode_books values": lambda x: ops.encode_books(x, torch.ones(5), torch.zeros(16).byte(), levels=4),
    "encode_books rest": lambda x: ops.encode_books(torch.ones(5), x, torch.zeros(16).byte(), levels=4),
    "decode_books values": lambda x: ops.decode_books(torch.zeros(16).byte(), x, levels=4, add=False),
    "square_sum": lambda x: ops.square_sum([x]),
    "count_nonfinite": lambda x: ops.count_nonfinite([x]),
}


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_memory_given_back_is_refused(call: Callable[[Tensor], object], left: int) -> None:
    """It was read all the same, and the process died."""
    with pytest.raises(ConfigurationError, match=f"needs 20 bytes and its storage has {4 * left}"):
        call(given_back(5, left))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_tensor_between_two_entries_of_memory_is_refused(call: Callable[[Tensor], object]) -> None:
    """Torch computes with it; kernels that write past the cache did not survive it."""
    between = torch.frombuffer(bytearray(24), dtype=torch.float32, offset=1, count=5)
    with pytest.raises(ConfigurationError, match="starts between two entries of memory"):
        call(between)


DENSE_THEN_SPARSE = """
import resource, torch
from ringprune import ops

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
entries = 1 << 22
residual = torch.randn(entries)
before = resident()
ops.select(residual, [0, entries], [entries * 3 // 5])
grown = resident() - before
for _ in range(300):
    ops.select(residual[:1000], [0, 1000], [10])
print(entries, grown, resident() - before)
"""


def test_memory_of_dense_steps_is_given_back() -> None:
    """What one step of warm-up needed stayed with the process for good."""
    command = [sys.executable, "-c", DENSE_THEN_SPARSE]  # a process of its own: this one's memory was used before
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    entries, grown, left = map(int, done.stdout.split())
    assert grown > 2 * entries, "else there is nothing to give back"
    assert left < grown / 4


def test_a_part_of_a_storage_is_enough() -> None:
    assert ops.square_sum([torch.ones(9)[4:]]).tolist() == [5.0]
    assert ops.square_sum([given_back(0, 0), torch.ones(9)[9:]]).tolist() == [0.0, 0.0]


def test_put_refuses_outputs_in_the_memory_of_its_arguments() -> None:
    """Indices were checked, overwritten by the outputs, and then believed."""
    room = torch.arange(8, dtype=torch.int32)
    output = room.view(torch.float32)
    with pytest.raises(ConfigurationError, match=r"put: outputs\[1\] shares memory with indices"):
        ops.put([torch.ones(1), output], room[1:3], torch.ones(2))
    with pytest.raises(ConfigurationError, match=r"put: outputs\[0\] shares memory with values"):
        ops.put([output], positions(1, 2), output[6:])
    with pytest.raises(ConfigurationError, match=r"put: outputs\[0\] shares memory with outputs\[2\]"):
        ops.put([output[2:], torch.ones(3), output[:3]], positions(1, 2), torch.ones(2))
    assert room.tolist() == list(range(8))


def test_neighbours_in_one_storage_do_not_share_memory() -> None:
    room = torch.ones(8)
    ops.put([room[4:], room[:2], room[2:2], room[2:4]], positions(0, 7), torch.tensor([2.0, 3.0]))
    assert room.tolist() == [0, 0, 0, 3, 2, 0, 0, 0]


def test_take_refuses_velocity_and_indices_in_the_memory_of_the_residual() -> None:
    room = torch.arange(8, dtype=torch.int32)
    residual = room.view(torch.float32)
    with pytest.raises(ConfigurationError, match="take: residual shares memory with indices"):
        ops.take(residual, None, room[1:3], [0, 8])
    with pytest.raises(ConfigurationError, match="take: velocity shares memory with residual"):
        ops.take(residual, residual, positions(1), [0, 8])
    with pytest.raises(ConfigurationError, match="take: velocity shares memory with indices"):
        ops.take(torch.ones(8), residual, room[1:3], [0, 8])
    assert room.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("average", "momentum"), r"(averages|momenta)\[0\] shares memory with (averages|momenta)\[0\]"),
        (("elapsed", "momentum"), r"(elapsed|momenta)\[0\] shares memory with (elapsed|momenta)\[0\]"),
        (("square", "momentum"), r"(squares|momenta)\[0\] shares memory with (squares|momenta)\[0\]"),
    ],
)
def test_share_momentum_refuses_what_it_writes_in_the_memory_of_what_it_reads(
    names: tuple[str, str], message: str
) -> None:
    room = torch.arange(8.0)
    tensors = {name: torch.ones(5) for name in ("average", "elapsed", "momentum", "square")}
    tensors |= {names[0]: room[3:], names[1]: room[:5]}
    with pytest.raises(ConfigurationError, match=message):
        share_momentum(**tensors)
    assert room.tolist() == list(range(8))


def test_hints_lie_apart_from_what_is_computed_with() -> None:
    """They were written over it at the end."""
    room = torch.ones(8)
    keys, tally = room.view(torch.int32)[3:5].view(1, 2), torch.zeros(4, dtype=torch.int64)
    for arguments, name in (
        ((room[:5], torch.ones(5), torch.ones(5)), r"grads\[0\]"),
        ((torch.ones(5), room[:5], torch.ones(5)), r"weights\[0\]"),
        ((torch.ones(5), torch.ones(5), room[:5]), "residual"),
    ):
        with pytest.raises(ConfigurationError, match=f"accumulate_select: hints shares memory with {name}"):
            accumulate_select(*arguments, Hints(keys, tally))
    with pytest.raises(ConfigurationError, match="accumulate_select: hints shares memory with tally"):
        shared = torch.zeros(4, dtype=torch.int64)
        accumulate_select(torch.ones(5), torch.ones(5), torch.ones(5), Hints(shared.view(torch.int32)[:2], shared))
    assert bool((room == 1.0).all())
