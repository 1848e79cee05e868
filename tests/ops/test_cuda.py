"""What only the CUDA kernels promise: many tensors, any alignment, indices passed over, streams, graphs, devices."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprune import ops
from ringprune.errors import ConfigurationError
from ringprune.ops import Hints
from ringprune.ops.accumulate_select import accumulate_select_reference
from tests.ops.cases import FLOATS, Backend, assert_same_bits, positions

# Ends of tiles (512 entries) and strips (16384), and what lies around them.
SIZES = (0, 1, 3, 511, 512, 513, 5_000, 16_384, 16_385, 70_001)


@pytest.fixture
def cuda(device_kernels: Backend) -> str:
    """For what only a real device has: streams, graphs, other devices."""
    if device_kernels.name != "cuda":
        pytest.skip("needs a GPU")
    return device_kernels.device


def anywhere(x: Tensor, shift: int) -> Tensor:
    """The same entries on the same device, ``shift`` entries behind where memory is aligned."""
    memory = torch.zeros(x.numel() + shift, dtype=x.dtype, device=x.device)
    memory[shift:] = x
    return memory[shift:]


def bucket(device: str, sizes: tuple[int, ...], density: float, *, sent: bool = False) -> dict[str, Any]:
    """Arguments of accumulate_select, of mixed dtypes and alignments; ``sent``: half of the tensors whole."""
    generator = torch.Generator().manual_seed(0)

    def random(n: int, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return anywhere(torch.randn(n, generator=generator).to(dtype).to(device), i % 4)

    spans = enumerate(pairwise([0, *accumulate(sizes)]))
    indices = torch.cat([torch.arange(a, b, 1 if i % 2 else 17) for i, (a, b) in spans]).int().to(device)
    return {
        "sent": ops.Sent(indices, random(indices.numel(), 0), masks=True) if sent else None,
        "grads": [random(n, i, FLOATS[i % 3]) for i, n in enumerate(sizes)],
        "weights": [random(n, i + 1, FLOATS[(i + 1) % 3]) for i, n in enumerate(sizes)],
        "residual": random(sum(sizes), 1),
        "velocity": random(sum(sizes), 2),
        "counts": [int(density * n) for n in sizes],
        "factors": [0.5] * len(sizes),
        "momentum": [0.9] * len(sizes),
        "nesterov": [i % 2 == 1 for i in range(len(sizes))],
        "score": "ratio",
        "parameters": [0.05] * len(sizes),
    }


def run(arguments: dict[str, Any], hints: Hints) -> Tensor:
    """Accumulate and select in place; the positions."""
    state = {"residual_out": arguments["residual"], "velocity_out": arguments["velocity"]}
    return ops.accumulate_select(**arguments, **state, hints=hints)[0]


def expected(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Positions and new residual by the torch reference, from copies on the CPU."""
    copies = {
        name: [x.cpu() for x in value] if name in ("grads", "weights") else value for name, value in arguments.items()
    }
    for name in ("residual", "velocity"):
        copies[name] = copies[f"{name}_out"] = arguments[name].cpu().clone()
    sent = copies.pop("sent")
    copies |= ops.Sent.arguments(sent and replace(sent, indices=sent.indices.cpu(), rest=sent.rest.cpu()))
    hints = Hints.none(len(arguments["counts"]), torch.device("cpu"))
    found, _ = accumulate_select_reference(**copies, hints=hints.keys, tally=hints.tally)
    return found, copies["residual"]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_every_size_and_alignment(device_kernels: Backend, density: float, sent: bool) -> None:
    arguments = bucket(device_kernels.device, SIZES, density, sent=sent)
    hints = Hints.none(len(SIZES), torch.device(device_kernels.device))
    for _ in range(3):
        wanted, residual = expected(arguments)
        assert_same_bits(run(arguments, hints).cpu(), wanted)
        assert_same_bits(arguments["residual"].cpu(), residual)
    tally = hints.counts()
    assert tally["cold"] == sum(count > 0 for count in arguments["counts"])
    assert tally["tensors"] == 3 * tally["cold"]


def test_more_tensors_than_fit_into_one_upload(device_kernels: Backend) -> None:
    arguments = bucket(device_kernels.device, tuple(i % 7 for i in range(1_000)), 0.5, sent=True)
    wanted, _ = expected(arguments)
    hints = Hints.none(1_000, torch.device(device_kernels.device))
    assert_same_bits(run(arguments, hints).cpu(), wanted)


@pytest.mark.parametrize("key", [1, 2**31 - 1, 0x3F800000])
def test_any_hint_is_only_a_hint(device_kernels: Backend, key: int) -> None:
    arguments = bucket(device_kernels.device, (70_001, 513), 0.01)
    hints = Hints.none(2, torch.device(device_kernels.device))
    hints.keys[:] = key
    wanted, _ = expected(arguments)
    assert_same_bits(run(arguments, hints).cpu(), wanted)
    before = hints.counts()
    wanted, _ = expected(arguments)
    assert_same_bits(run(arguments, hints).cpu(), wanted)
    after = hints.counts()
    assert after["overflowed"] == before["overflowed"]
    assert before["cold"] == 0


def test_several_blocks_count_and_one_goes_on(device_kernels: Backend) -> None:
    """Of tiny sizes 32 candidates are too many for one block to begin with, and few enough for it to end with."""
    arguments = bucket(device_kernels.device, (70_001,), 0) | {"counts": [20], "score": "magnitude"}
    wanted, residual = expected(arguments)
    hints = Hints.none(1, torch.device(device_kernels.device))
    hints.keys[0] = torch.tensor([int(torch.topk(residual.abs(), 32).values[-1].view(torch.int32)), 1280])
    assert_same_bits(run(arguments, hints).cpu(), wanted)
    assert hints.counts() == {"tensors": 1, "cold": 0, "missed": 0, "overflowed": 0}


def test_entries_in_one_place_need_no_more_room(device_kernels: Backend) -> None:
    arguments = bucket(device_kernels.device, (200_000,), 0.01)
    for name in ("residual", "velocity"):
        arguments[name][2_000:] *= 1e-6
    arguments["grads"][0][2_000:] *= 1e-6
    hints = Hints.none(1, torch.device(device_kernels.device))
    for _ in range(3):
        wanted, _ = expected(arguments)
        assert_same_bits(run(arguments, hints).cpu(), wanted)
    assert hints.counts() == {"tensors": 3, "cold": 1, "missed": 0, "overflowed": 0}


def test_indices_out_of_range_are_passed_over(device_kernels: Backend) -> None:
    to = device_kernels.device
    indices = positions(1, ops.PAD, ops.PAD, 4, 5, ops.PAD, 8, 2**31 - 1).to(to)
    residual, velocity = torch.arange(1.0, 9.0, device=to), torch.arange(1.0, 9.0, device=to)
    values = ops.take(residual, velocity, indices, [0, 4, 6, 8])
    assert values.tolist() == [2.0, 0.0, 0.0, 5.0, 6.0, 0.0, 0.0, 0.0]
    assert residual.tolist() == [1.0, 0.0, 3.0, 4.0, 0.0, 0.0, 7.0, 8.0]
    assert velocity.tolist() == [1.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "the second tensor is sent whole"
    ops.give_back(residual, indices, values)
    assert residual.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert ops.gather(residual, indices).tolist() == values.tolist()


def test_ascending_indices_may_begin_and_end_out_of_range(device_kernels: Backend) -> None:
    """As above where all that is looked for is those of a tile."""
    to = device_kernels.device
    indices = positions(-7, ops.PAD, 1, 4, 5, 8, 2**31 - 1).to(to)
    values = torch.arange(1.0, 8.0, device=to)
    outputs = [torch.ones(4, device=to), torch.ones(4, device=to, dtype=torch.bfloat16)]
    ops.put(outputs, indices, values)
    assert torch.cat(outputs).tolist() == [0.0, 3.0, 0.0, 0.0, 4.0, 5.0, 0.0, 0.0]
    state = [torch.full((8,), 10.0, device=to) for _ in range(4)]
    ops.accumulate(
        [torch.ones(4, device=to), torch.ones(2, device=to), torch.ones(2, device=to)],
        *state[:2],
        residual_out=state[2],
        velocity_out=state[3],
        factors=[1.0] * 3,
        momentum=[1.0] * 3,
        nesterov=[False] * 3,
        sent=ops.Sent(indices, values, masks=True),
    )
    assert state[3].tolist() == [11.0, 1.0, 11.0, 11.0, 11.0, 11.0, 11.0, 11.0], "the second tensor was sent whole"
    assert state[2].tolist() == [21.0, 4.0, 21.0, 21.0, 15.0, 16.0, 21.0, 21.0]


def strange_indices(seed: int, numel: int, count: int) -> Tensor:
    """Positions that are doubled, fall, lie out of range, or all of that."""
    generator = torch.Generator().manual_seed(seed)
    low, high = [(0, numel), (-(2**31), 2**31 - 1), (-5, numel + 5), (numel // 2, numel // 2 + 1)][seed % 4]
    indices = torch.randint(low, high, (count,), generator=generator)
    if seed % 3 == 0:
        indices = indices.sort().values
    if seed % 5 == 0:
        indices = torch.arange(count).flip(0)
    return indices.int()


@pytest.mark.parametrize("seed", range(20))
def test_indices_that_do_not_ascend_do_no_harm(device_kernels: Backend, seed: int) -> None:
    """Every entry gets what it may, with some index or without, and memory around the tensors stays as it is."""
    to, sizes = device_kernels.device, (1_500, 3, 700)
    numel = sum(sizes)
    indices = strange_indices(seed, numel, [1, 40, 600, 3_000][seed % 4]).to(to)
    values = torch.arange(2.0, 2.0 + indices.numel(), device=to)

    def inside(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        memory = torch.full((n + 64,), 0.5, dtype=dtype, device=to)
        return memory, memory[32:-32].fill_(1.0)

    memories, outputs = zip(*(inside(n, dtype) for n, dtype in zip(sizes, FLOATS, strict=True)), strict=True)
    ops.put(outputs, indices, values)
    for output in outputs:
        assert bool(torch.isin(output, torch.cat([values.to(output.dtype), output.new_zeros(1)])).all())

    more, (residual, velocity, residual_out, velocity_out) = zip(*(inside(numel) for _ in range(4)), strict=True)
    grads = [torch.ones(n, device=to) for n in sizes]
    ops.accumulate_select(
        grads,
        residual,
        velocity,
        grads,
        residual_out=residual_out,
        velocity_out=velocity_out,
        factors=[1.0] * 3,
        momentum=[0.5] * 3,
        nesterov=[False] * 3,
        score="magnitude",
        parameters=[0.0] * 3,
        counts=[n // 3 for n in sizes],
        hints=Hints.none(3, torch.device(to)),
        sent=ops.Sent(indices, values, masks=True),
    )
    assert bool(torch.isin(velocity_out, torch.tensor([1.0, 1.5], device=to)).all())
    assert bool(torch.isin(residual_out - velocity_out, torch.cat([values, values.new_ones(1)])).all())
    assert bool((residual == 1.0).all() and (velocity == 1.0).all())

    read = ops.gather(torch.arange(numel, device=to).float(), indices).cpu()
    there = indices.cpu()
    assert_same_bits(read, torch.where((there >= 0) & (there < numel), there, 0).float())
    for memory in (*memories, *more):
        assert bool((memory[:32] == 0.5).all() and (memory[-32:] == 0.5).all())


@pytest.mark.parametrize("n", [0, 1, 127, 128, 2_048, 2_049, 100_000])
def test_square_sum_is_the_same_tree(device_kernels: Backend, n: int) -> None:
    x = torch.randn(n, dtype=torch.float64)
    tensors = [x, x.float(), x.half()]
    sums = ops.square_sum([anywhere(tensor.to(device_kernels.device), 1) for tensor in tensors])
    assert_same_bits(sums.cpu(), Backend("reference").op("square_sum")(tensors))


def test_many_strips_at_once(device_kernels: Backend) -> None:
    """Each looks back over those before it, further than it reads at a time, as long as these do not know all."""
    arguments = bucket(device_kernels.device, (3_000_001, 5_000), 0.05)
    hints = Hints.none(2, torch.device(device_kernels.device))
    for _ in range(2):  # without hints, and with
        wanted, _ = expected(arguments)
        found = run(arguments, hints)
        assert_same_bits(found.cpu(), wanted)


def calls(device: str) -> dict[str, Callable[[], object]]:
    """Each op with arguments on ``device``, the first of which is elsewhere."""
    flat, elsewhere = torch.ones(5, device=device), torch.ones(5)
    indices = positions(1, 2)
    lists = {"factors": [1.0], "momentum": [0.0], "nesterov": [False]}
    return {
        "accumulate": lambda: ops.accumulate([elsewhere], flat, None, residual_out=flat, velocity_out=None, **lists),
        "importance": lambda: ops.importance(flat, [elsewhere], score="ratio", parameters=[0.0]),
        "take": lambda: ops.take(flat, None, indices, [0, 5]),
        "gather": lambda: ops.gather(flat, indices),
        "sent": lambda: ops.accumulate(
            [flat.clone()], flat, None, residual_out=flat, velocity_out=None, **lists, sent=ops.Sent(indices)
        ),
        "give_back": lambda: ops.give_back(flat, indices, torch.ones(2)),
        "put": lambda: ops.put([flat], indices, torch.ones(2)),
        "encode_books": lambda: ops.encode_books(flat, elsewhere, torch.zeros(16).byte().to(device), levels=4),
        "decode_books": lambda: ops.decode_books(torch.zeros(16).byte(), flat, levels=4, add=False),
        "square_sum": lambda: ops.square_sum([flat, elsewhere]),
        "count_nonfinite": lambda: ops.count_nonfinite([flat, elsewhere]),
    }


@pytest.mark.parametrize("op", sorted(calls("cpu")))
def test_tensors_elsewhere_are_refused(cuda: str, op: str) -> None:
    with pytest.raises(ConfigurationError, match="is on c"):
        calls(cuda)[op]()


LARGEST = [200_000, 3_000_001]
"""Entries of the first tensor: of a bucket that one kernel selects from, and of one for which there are several."""


@pytest.mark.parametrize("largest", LARGEST)
def test_side_stream(cuda: str, largest: int) -> None:
    arguments = bucket(cuda, (largest, 100), 0.01, sent=True)
    wanted, _ = expected(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # whoever does not wait for this stream is early
        arguments["residual"].add_(0.0)
        found = run(arguments, Hints.none(2, torch.device(cuda)))
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(found.cpu(), wanted)


@pytest.mark.parametrize("largest", LARGEST)
def test_captured_into_a_graph_and_replayed(cuda: str, largest: int) -> None:
    arguments = bucket(cuda, (largest, 100, 5), 0.01, sent=True)
    hints = Hints.none(3, torch.device(cuda))
    outputs = [torch.zeros_like(weight) for weight in arguments["weights"]]
    offsets = [0, largest, largest + 100, largest + 105]
    initial = {name: arguments[name].clone() for name in ("residual", "velocity")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # an op that waits for the device, or copies from the host, ends the capture
        found = run(arguments, hints)
        read = ops.gather(arguments["residual"], found)
        values = ops.take(arguments["residual"], arguments["velocity"], found, offsets)
        body = torch.empty(ops.book_body_bytes(values.numel(), 4), dtype=torch.uint8, device=cuda)
        coded = torch.empty_like(values)
        ops.encode_books(values, torch.empty_like(values), body, levels=4)
        ops.decode_books(body, coded, levels=4, add=False)
        ops.give_back(arguments["residual"], found, torch.zeros_like(values))
        ops.put(outputs, found, values)
        sums = ops.square_sum(outputs)
        ops.count_nonfinite(outputs)
    for name, tensor in initial.items():
        arguments[name].copy_(tensor)
    for _ in range(3):
        wanted, residual = expected(arguments)
        graph.replay()
        assert_same_bits(found.cpu(), wanted)
        residual[wanted[wanted >= 0]] = 0.0
        assert_same_bits(arguments["residual"].cpu(), residual)
        assert_same_bits(read.cpu(), values.cpu())
        assert bool(coded.any()) and bool((coded.abs() <= 2 * values.abs()).all())
        assert bool((sums > 0).any())


def test_another_device_than_the_current_one(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = bucket("cuda:1", (20_000, 100), 0.01)
    wanted, _ = expected(arguments)
    found = run(arguments, Hints.none(2, torch.device("cuda:1")))
    assert found.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same_bits(found.cpu(), wanted)
