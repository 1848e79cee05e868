"""Measures on this machine what the exchange costs its processor, in some seconds."""

import os
from collections.abc import Sequence
from functools import partial

import torch

import ringprune as rp
from ringprune import ops, packing, wire
from ringprune.bench import machine
from ringprune.bench.bucket import MOMENTUM, Bucket, Case
from ringprune.bench.stopwatch import Call, Times, stopwatch
from ringprune.comm.communicator import Communicator
from ringprune.prediction import Speeds
from ringprune.reduction.merge import add_pairs

__all__ = ["measured"]

CPU = torch.device("cpu")
ENTRIES, DENSITY, REPETITIONS = 4_000_000, 0.01, 9
FEW = 64  # positions, against as many as there are at DENSITY
TENSORS, STEPS = 32, 25
SETTLING = 4  # calls before those that are timed: hints settle, code is compiled


def measured(entries: int = ENTRIES, repetitions: int = REPETITIONS) -> Speeds:
    """The speeds of this machine's CPU, with as many threads as torch has now.

    Args:
        entries: of the tensor that is selected from: more than fit into a cache.
        repetitions: times of each call; the median of the undisturbed ones counts.
    """
    bucket = Bucket(Case("flat", ((entries,),), DENSITY), CPU, seed=0)
    for _ in range(SETTLING):
        bucket.draw()
        bucket.step()
    bucket.restore()
    passes = _passes(bucket, repetitions)
    count = bucket.counts[0]
    message, tensor = _overheads()
    encode_index, decode_index = _indices(bucket, count, repetitions)
    encode_values, decode_values = _values(bucket, count, repetitions)
    return Speeds(
        provenance=_provenance(),
        accumulate=passes["accumulate"] / entries,
        select=passes["select"] / entries,
        copy=passes["copy"] / entries,
        fill=passes["fill"] / entries,
        kept=max(0.0, (passes["take"] + passes["put"] - passes["fill"]) / (2 * count)),
        merge=_merge(count, repetitions),
        encode_index=encode_index,
        decode_index=decode_index,
        encode_values=encode_values,
        decode_values=decode_values,
        message=message,
        tensor=tensor,
    )


def _provenance() -> str:
    processor, threads = machine.facts(CPU)["processor"], torch.get_num_threads()
    return f"measured now on {processor}, {threads} thread{'s' * (threads > 1)}, load average {os.getloadavg()[0]:.1f}"


def _seconds(repetitions: int, *calls: Call) -> list[float]:
    """Seconds of some calls, taken in turns."""
    clock, times = stopwatch(CPU), [Times() for _ in calls]
    for call in calls:
        call()
    for _ in range(repetitions):
        for call, taken in zip(calls, times, strict=True):
            taken.samples.append(clock.time(call)[0])
    return [taken.seconds for taken in times]


def _passes(bucket: Bucket, repetitions: int) -> dict[str, float]:
    """Whatever reads or writes all entries."""
    positions = bucket.beside()
    few = positions[:: max(1, positions.numel() // FEW)].contiguous()
    state = bucket.out_residual.clone(), bucket.out_velocity.clone()
    values = ops.take(*state, positions, bucket.offsets)
    calls: dict[str, Call] = {
        "select": bucket.beside,
        "accumulate": partial(_accumulate, bucket),
        "copy": partial(packing.flatten, bucket.grads, [1.0], torch.empty_like(bucket.grad)),
        "take": partial(ops.take, *state, positions, bucket.offsets),
        "put": partial(ops.put, bucket.grads, positions, values),
        "fill": partial(ops.put, bucket.grads, few, values[: few.numel()]),
    }
    return dict(zip(calls, _seconds(repetitions, *calls.values()), strict=True))


def _accumulate(bucket: Bucket) -> None:
    ops.accumulate(
        bucket.grads,
        bucket.residual,
        bucket.velocity,
        residual_out=bucket.out_residual,
        velocity_out=bucket.out_velocity,
        factors=[1.0],
        momentum=[MOMENTUM],
        nesterov=[False],
    )


def _merge(count: int, repetitions: int) -> float:
    """Seconds per pair that is added, two ranks' lists at a time."""
    draw = torch.Generator().manual_seed(0)
    lists = []
    for _ in range(2):
        indices = torch.randperm(100 * count, generator=draw)[:count].sort().values.int().numpy()
        lists.append((indices, torch.randn(count, generator=draw).numpy()))
    return _seconds(repetitions, lambda: add_pairs(lists, 100 * count))[0] / (2 * count)


def _indices(bucket: Bucket, count: int, repetitions: int) -> list[float]:
    """Coding and decoding of a position."""
    positions = bucket.beside()
    code = wire.index_code(count, bucket.case.numel)
    message = code.encode(positions)
    times = _seconds(repetitions, lambda: code.encode(positions), lambda: code.decode(message, name="m"))
    return [seconds / count for seconds in times]


def _values(bucket: Bucket, count: int, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Coding and decoding of a value, in each format."""
    values, rest, into = bucket.out_residual[:count].clone(), torch.empty(count), torch.empty(count)
    there, back = {}, {}
    for name in wire.VALUE_FORMATS[1:]:
        code = wire.value_code(name)
        assert code is not None
        message = code.encode(values, rest)
        encode, decode = partial(code.encode, values, rest), partial(code.decode, message, into, name="m")
        there[name], back[name] = (seconds / count for seconds in _seconds(repetitions, encode, decode))
    return there, back


def _overheads() -> tuple[float, float]:
    """Seconds per collective and per tensor: steps on one simulated rank that has next to nothing to exchange."""
    together, apart = (rp.simulate(1, partial(_steps, bytes_of_bucket))[0] for bytes_of_bucket in (4 * TENSORS, 4))
    message = max(0.0, (apart - together) / (TENSORS - 1))
    return message, max(0.0, (together - 2 * message) / TENSORS)


def _steps(bucket_bytes: int, comm: Communicator) -> float:
    """Median seconds of hooks and step on ``TENSORS`` tensors of one entry, less those of a step without exchange."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(TENSORS)]
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.0),
        [(str(i), p) for i, p in enumerate(params)],
        policy=rp.Dense(),
        comm=comm,
        bucket_bytes=bucket_bytes,
    )
    others = [torch.nn.Parameter(torch.zeros(1)) for _ in range(TENSORS)]
    plain = torch.optim.SGD(others, lr=0.0)
    exchanging, alone = _seconds(STEPS, partial(_step, optimizer, params), partial(_step, plain, others))
    optimizer.close()
    return exchanging - alone


def _step(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> None:
    loss = torch.cat(list(params)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
