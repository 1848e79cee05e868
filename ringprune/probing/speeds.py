"""Measures what the exchange costs a rank: its passes over memory, and its codes."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ringprune import ops, packing, wire
from ringprune.agreement import union
from ringprune.bench import machine
from ringprune.bench.bucket import MOMENTUM, Bucket, Case
from ringprune.bench.stopwatch import Call, Times, stopwatch
from ringprune.comm.communicator import Communicator
from ringprune.plan import gather_texts
from ringprune.prediction import Speeds
from ringprune.prediction.speeds import DENSITIES
from ringprune.reduction.merge import add_pairs

__all__ = ["measured", "measured_together", "seconds_of", "slowest_of"]

CPU = torch.device("cpu")
ENTRIES, REPETITIONS = 4_000_000, 9
FEW = 64  # positions, against as many as there are at the least density
SETTLING = 4  # calls before those that are timed: hints settle, code is compiled


def measured(
    message: float,
    tensor: float,
    *,
    entries: int = ENTRIES,
    repetitions: int = REPETITIONS,
    device: torch.device = CPU,
    together: bool = False,
) -> Speeds:
    """The speeds of this machine, with as many threads as torch has now.

    Args:
        message: seconds per collective, which are not measured here.
        tensor: seconds per tensor likewise.
        entries: of the tensor that is selected from: more than fit into a cache.
        repetitions: times of each call; the median of the undisturbed ones counts.
        device: where gradients live.
        together: all ranks of a job call this at the same time. Where they share processors each waits for one now and
            then, as it will in training: that lengthens everything by the same factor, and memory is as slow as then.
    """
    together = together and device.type == "cpu"  # passes on a GPU wait for no processor
    watch = _Watch(repetitions, device, together)
    buckets = {name: _settled(Case("flat", ((entries,),), density), device) for name, density in DENSITIES.items()}
    passes = _passes(buckets, watch)
    bucket = buckets.pop("apart")
    buckets.clear()  # what it holds is a hundred megabytes
    count = bucket.counts[0]
    kept = {
        name: max(0.0, passes[f"take {name}"] + passes[f"put {name}"] - passes["fill"]) / (2 * round(density * entries))
        for name, density in DENSITIES.items()
    }
    # Of few entries it may be lost in what passes over all of them differ by.
    kept["apart"] = max(kept.values())
    encode_index, decode_index = _indices(bucket, count, watch)
    encode_values, decode_values = _values(bucket, round(DENSITIES["close"] * entries), watch)
    speeds = Speeds(
        provenance=_provenance(device),
        accumulate=passes["accumulate"] / entries,
        select={name: passes[f"select {name}"] / entries for name in DENSITIES},
        copy=passes["copy"] / entries,
        whole=passes["whole"] / entries,
        fill=passes["fill"] / entries,
        kept=kept,
        merge=_merge(count, replace(watch, device=CPU)),  # on the host, wherever gradients live
        encode_index=encode_index,
        decode_index=decode_index,
        unite=_unite(bucket, replace(watch, device=CPU)),
        encode_values=encode_values,
        decode_values=decode_values,
        message=message,
        tensor=tensor,
    )
    return replace(speeds.times(watch.share), shared=watch.share) if together else speeds


def measured_together(comm: Communicator, message: float, tensor: float) -> Speeds:
    """The speeds of a job's ranks, all measured at once; all ranks call this, and get the same: the slowest rank's.

    ``message`` and ``tensor`` were measured together too, by what ran.
    """
    own = asdict(measured(message, tensor, together=True))
    reports = [json.loads(text) for text in gather_texts(json.dumps(own), comm, CPU, name="speeds")]
    found = slowest_of(reports)
    return replace(found, provenance=f"{found.provenance}, {comm.size} ranks at once")


def slowest_of(reports: Sequence[Mapping[str, Any]]) -> Speeds:
    """Of each speed that of the rank which is slowest in it.

    Args:
        reports: of each rank, its :class:`Speeds` as a mapping.
    """

    def longest(values: Sequence[Any]) -> Any:
        if isinstance(values[0], str):
            return values[0]
        if isinstance(values[0], dict):
            return {key: max(value[key] for value in values) for key in values[0]}
        return max(values)

    return Speeds(**{key: longest([report[key] for report in reports]) for key in reports[0]})


def _provenance(device: torch.device) -> str:
    processor, threads = machine.facts(CPU)["processor"], torch.get_num_threads()
    if device.type == "cuda":
        return f"measured now on {torch.cuda.get_device_name(device)} and {processor}"
    return f"measured now on {processor}, {threads} thread{'s' * (threads > 1)}, load average {os.getloadavg()[0]:.1f}"


def seconds_of(repetitions: int, *calls: Call, together: bool = False) -> list[float]:
    """Seconds of some calls, taken in turns: the medians of the undisturbed times; ``together`` as for ``measured``.

    Times of ranks that measure together are those in which something ran.
    """
    return _Watch(repetitions, CPU, together).seconds_of(*calls)


@dataclass
class _Watch:
    """Times calls; ``together``: by what they ran, and tells how much longer they took than that."""

    repetitions: int
    device: torch.device
    together: bool
    _taken: list[float] = field(default_factory=list)
    _running: list[float] = field(default_factory=list)

    def seconds_of(self, *calls: Call) -> list[float]:
        clock, times = stopwatch(self.device), [Times() for _ in calls]
        for call in calls:
            call()
        for _ in range(self.repetitions):
            for call, taken in zip(calls, times, strict=True):
                taken.samples.append(clock.time(call)[0])
        if not self.together:
            return [taken.seconds for taken in times]
        found = []
        for taken in times:
            # Other threads of ours, such as Horovod's, wait as well, and hold nothing up here.
            running = [sample.seconds - sample.held_up for sample in taken.samples]
            self._running += running
            self._taken.append(taken.spent)
            found.append(median(running))
        return found

    @property
    def share(self) -> float:
        """Seconds that went by for each that something ran."""
        return sum(self._taken) / max(sum(self._running), 1e-9)


def _settled(case: Case, device: torch.device) -> Bucket:
    """A bucket whose hints are those of training."""
    bucket = Bucket(case, device, seed=0)
    for _ in range(SETTLING):
        bucket.draw()
        bucket.step()
    bucket.restore()
    bucket.sent = None  # else it leaves with what is timed
    return bucket


def _passes(buckets: Mapping[str, Bucket], watch: _Watch) -> dict[str, float]:
    """Whatever reads or writes all entries; ``buckets`` by ``DENSITIES``."""
    bucket = buckets["apart"]
    numel, device = bucket.case.numel, bucket.grad.device
    state = bucket.out_residual.clone(), bucket.out_velocity.clone()
    calls: dict[str, Call] = {
        "accumulate": partial(_accumulate, bucket),
        "copy": partial(packing.flatten, bucket.grads, [1.0], torch.empty_like(bucket.grad)),
        "whole": partial(ops.count_nonfinite, bucket.grads),
        "fill": _put(bucket, _positions(FEW / numel, numel).to(device)),
    }
    for name, density in DENSITIES.items():
        positions = _positions(density, numel).to(device)
        calls[f"select {name}"] = buckets[name].beside
        # At once: what leaving with the next pass takes is a small difference of long times.
        calls[f"take {name}"] = partial(packing.pack, *state, positions, bucket.offsets, lazily=False)
        calls[f"put {name}"] = _put(bucket, positions)
    return dict(zip(calls, watch.seconds_of(*calls.values()), strict=True))


def _positions(density: float, numel: int, seed: int = 0) -> Tensor:
    """So many positions, int32, ascending, on the host; without strata, for which processors would guess too well."""
    draw = torch.Generator().manual_seed(seed)
    count = min(numel, max(1, round(density * numel)))
    return torch.randperm(numel, generator=draw, device="cpu")[:count].sort().values.int()


def _put(bucket: Bucket, positions: Tensor) -> Call:
    return partial(ops.put, bucket.grads, positions, torch.ones(positions.numel(), device=positions.device))


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


def _merge(count: int, watch: _Watch) -> float:
    """Seconds per pair that is added, two ranks' lists at a time."""
    draw = torch.Generator().manual_seed(0)
    lists = []
    for rank in range(2):
        indices = _positions(0.01, 100 * count, rank).numpy()
        lists.append((indices, torch.randn(count, generator=draw, dtype=torch.float32, device="cpu").numpy()))
    return watch.seconds_of(lambda: add_pairs(lists, 100 * count))[0] / (2 * count)


def _indices(bucket: Bucket, count: int, watch: _Watch) -> list[float]:
    """Coding and decoding of a position."""
    positions = bucket.beside()
    code = wire.index_code(count, bucket.case.numel)
    message = code.encode(positions)
    encode = watch.seconds_of(lambda: code.encode(positions))
    # What is read is in host memory, wherever gradients live.
    decode = replace(watch, device=CPU).seconds_of(lambda: code.decode(message, name="m"))
    return [seconds / count for seconds in encode + decode]


def _unite(bucket: Bucket, watch: _Watch) -> dict[str, float]:
    """Making one set of two ranks' positions, per position; on the host, wherever gradients live."""
    found = {}
    for name, density in DENSITIES.items():
        positions = _positions(density, bucket.case.numel)
        proposals = positions[::2].contiguous(), positions[1::2].contiguous()
        found[name] = watch.seconds_of(partial(union, proposals, CPU))[0] / positions.numel()
    return found


def _values(bucket: Bucket, count: int, watch: _Watch) -> tuple[dict[str, float], dict[str, float]]:
    """Coding and decoding of a value, in each format; of so many that what each message takes besides is lost."""
    values, rest, into = (bucket.out_residual[:count].clone() for _ in range(3))
    there, back = {}, {}
    for name in wire.VALUE_FORMATS[1:]:
        code = wire.value_code(name)
        assert code is not None
        message = code.encode(values, rest)
        encode, decode = partial(code.encode, values, rest), partial(code.decode, message, into, name="m")
        taken = watch.seconds_of(encode, decode)
        there[name], back[name] = (seconds / count for seconds in taken)
    return there, back
