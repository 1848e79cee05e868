"""A GPU's streams, and when a step waits for it; run as tests/test_cuda_training.py says."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune import ops
from ringprune.profiles.record import Enough, Recorder
from ringprune.profiles.summary import profile_of
from ringprune.residual import Correction, Residual
from ringprune.wire import index_code
from tests.gpu_model import LIMIT, advance, bits, differing, halving, kept, pulls, weights, wrapped
from tests.test_cuda_training import JOBS, STEPS, trained


@pytest.fixture(params=["cuda"])
def cuda(request: pytest.FixtureRequest) -> str:
    """For what there is only on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.mark.parametrize("own", [False, True], ids=["one stream", "each its own"])
@pytest.mark.parametrize("job", ["one root", "dense", "own sets", "8 bits", "P3", "local steps"])
def test_a_stream_of_the_users(job: str, own: bool, device: str) -> None:
    """The whole loop on a side stream, behind work that is queued there: what does not wait for it reads early."""
    policy, options = JOBS[job]
    streams: list[Any] = [None, None] if device == "cpu" else [torch.cuda.Stream() for _ in range(2)]
    if not own:
        streams[1] = streams[0]

    def rank(comm: rp.comm.Communicator) -> Any:
        model = pulls(comm.rank, device)
        if device == "cuda":
            torch.cuda.synchronize()
        with nullcontext() if device == "cpu" else torch.cuda.stream(streams[comm.rank]):
            optimizer = wrapped(model, comm, policy, bucket_bytes=20_000, **options)
            for _ in range(STEPS):
                if device == "cuda":
                    torch.cuda._sleep(1_000_000)
                advance(model, optimizer, 1)
            state = kept(optimizer)
            found = weights(model)
        return found, state

    for mine, other in zip(rp.simulate(2, rank, timeout=LIMIT), trained(job, "cpu"), strict=True):
        assert not differing(mine[0], other[0]) and not differing(mine[1], other[2])


@pytest.mark.parametrize("aside", [False, True], ids=["plain", "on a side stream"])
@pytest.mark.usefixtures("alone")
def test_the_hook_of_ddp(aside: bool, device: str) -> None:
    """DDP copies averages back on its own account: behind the exchange, whatever stream that was on."""

    def rank(comm: rp.comm.Communicator, where: str) -> dict[str, torch.Tensor]:
        model = pulls(0, where)
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        hook = rp.ddp_hook(rp.IWP(0.05), comm=comm)
        ddp.register_comm_hook(None, hook)
        if where == "cuda":
            torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()) if aside and where == "cuda" else nullcontext():
            optimizer = halving(model.parameters())
            for _ in range(STEPS):
                if where == "cuda":
                    torch.cuda._sleep(1_000_000)
                advance(ddp, optimizer, 1)
            return weights(model)

    (found,), (expected,) = (rp.simulate(1, partial(rank, where=to), timeout=LIMIT) for to in (device, "cpu"))
    assert not differing(found, expected)
    assert differing(found, weights(pulls(0, "cpu")))


# -- waiting for the device -------------------------------------------------------------------------------------------


@contextmanager
def told_of_waiting(mode: str) -> Iterator[None]:
    """Torch says where the host waits for the device: as an error, or as a warning."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_selecting_and_packing_do_not_wait_for_the_device(cuda: str) -> None:
    if ops.backend() != "native+cuda":
        pytest.skip("torch's own operations look at the indices")
    sizes = [4_096, 70, 3_072]
    offsets = [0, 4_096, 4_166, 7_238]
    drawn = torch.randn(7_238, generator=torch.Generator().manual_seed(0)).to(cuda)
    grads, params = (list(torch.split(t.clone(), sizes)) for t in (drawn, drawn + 1))
    residual, velocity = torch.zeros_like(drawn), torch.zeros_like(drawn)
    hints = ops.Hints.none(3, torch.device(cuda))
    mine = torch.arange(0, 7_238, 20, dtype=torch.int32, device=cuda)
    outputs = [torch.empty_like(p) for p in params]
    sent = ops.Sent(mine, torch.ones(mine.numel(), device=cuda), masks=True)

    def work() -> None:
        ops.accumulate_select(
            grads,
            residual,
            velocity,
            params,
            residual_out=residual,
            velocity_out=velocity,
            factors=[0.5] * 3,
            momentum=[0.5] * 3,
            nesterov=[False] * 3,
            score="ratio",
            parameters=[0.05] * 3,
            counts=[200, 3, 150],
            hints=hints,
            sent=sent,
        )
        ops.gather(residual, mine)
        scores = ops.importance(residual, params, score="sum", parameters=[0.05] * 3)
        ops.select(scores, offsets, [200, 3, 150])
        values = ops.take(residual, velocity, mine, offsets)
        ops.give_back(residual, mine, values / 256)
        ops.put(outputs, mine, values)
        ops.square_sum(grads)
        ops.count_nonfinite(grads)

    work()
    torch.cuda.synchronize()
    with told_of_waiting("error"):
        work()
    assert residual.isfinite().all() and bits(outputs[0]).any()


def test_what_was_sent_is_there_until_it_was_read(cuda: str) -> None:
    """Also where another stream made it, which goes on meanwhile and takes what memory it finds."""
    numel, side = 1_000_000, torch.cuda.Stream()
    state = Residual([0, numel], velocity=False, spare=False, device=torch.device(cuda))
    grads, correction = [torch.ones(numel, device=cuda)], Correction([1.0], [0.0], [False])
    state.accumulate(grads, correction)
    with torch.cuda.stream(side):
        indices = torch.arange(0, numel, 50, dtype=torch.int32, device=cuda)
    torch.cuda.current_stream().wait_stream(side)
    state.leave(ops.Sent(indices))
    state.commit()
    count = indices.numel()
    del indices
    torch.cuda._sleep(20_000_000)
    state.accumulate(grads, correction)
    with torch.cuda.stream(side):
        others = [torch.full((count,), 1, dtype=torch.int32, device=cuda) for _ in range(4)]
    expected = torch.full((numel,), 2.0)
    expected[::50] = 1.0
    assert torch.equal(state.residual.cpu(), expected)
    assert len(others) == 4


def test_a_bit_map_is_read_without_waiting_for_the_device(cuda: str) -> None:
    """Of several roots as well: how many positions there are, and whether they can be, the host knows."""
    code = index_code(4_000, 10_000, "bitmap")
    sets = [torch.arange(start, 10_000, 3, dtype=torch.int32) for start in (0, 1)]
    messages = {f"of {i}": code.encode(positions.to(cuda)) for i, positions in enumerate(sets)}
    code.decode_maps(messages, torch.device(cuda))
    torch.cuda.synchronize()
    with told_of_waiting("error"):
        found = code.decode_maps(messages, torch.device(cuda))
    assert found.is_cuda and torch.equal(found.cpu(), torch.cat(sets).sort().values)


WAITS = {
    "dense": {"mode.py"},  # whether gradients are finite
    "one root": {"mode.py", "devices.py"},  # indices to the host
    "4 bits": {"mode.py", "devices.py", "values.py"},  # a bit map of them; and values, coded
    "local steps": {"mode.py", "devices.py"},  # also whether weights were changed outside
}
"""Where a step waits for the device, once it is under way."""


@pytest.mark.parametrize("job", WAITS)
def test_a_step_waits_where_it_is_known_to(job: str, cuda: str) -> None:
    policy, options = JOBS[job]

    def rank(comm: rp.comm.Communicator) -> None:
        model = pulls(comm.rank, cuda)
        optimizer = wrapped(model, comm, policy, **options)
        advance(model, optimizer, 4)
        comm.barrier(name="before")
        with told_of_waiting("warn") if comm.rank == 0 else nullcontext():
            comm.barrier(name="begin")
            advance(model, optimizer, 2)
            comm.barrier(name="end")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rp.simulate(2, rank, timeout=LIMIT)
    found = {f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)}
    print(f"{job} waits in {', '.join(sorted(found))}")
    assert {place.partition(":")[0] for place in found} <= WAITS[job], found


def test_a_loop_can_be_recorded(device: str) -> None:
    """As `ringprune profile` does it: with events of the GPU in place of the processor's clock."""
    model = pulls(0, device)
    recorder = Recorder(2, 3, stop=True)
    with suppress(Enough), recorder:
        advance(model, halving(model.parameters()), 6)
    profile = profile_of(recorder, "pulls", "made here")
    assert len(recorder.iterations) == 3 and recorder.problem is None
    marks = [mark.when for mark in recorder.iterations[0].marks]
    assert marks == sorted(marks) and 0 < marks[-1] < 1e3 * LIMIT
    assert len(profile.layers) == 3
