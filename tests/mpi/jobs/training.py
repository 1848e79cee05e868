"""A job that holds the laws of training on real ranks: ``KIND STEPS [WHICH]``, the laws whose names begin so."""

import copy
import hashlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.wire import index_code
from tests.mpi.inside import check_together, start
from tests.tables import WAYS, loss_of_words, make_words, tables_of
from tests.training import (
    OPTIMIZERS,
    batches,
    loss_of,
    make_model,
    nesterov,
    run,
    same_bytes,
    train,
    weights,
    wrap,
)

EPS = torch.finfo(torch.float32).eps
MIPD = rp.MIPD(0.05, smoothing=0.1)


def all_bytes(comm: rp.comm.Communicator, data: bytes, name: str) -> list[bytes]:
    message = torch.tensor(list(data), dtype=torch.uint8)
    rows = comm.allgather(message, name=name).wait().reshape(comm.size, -1)
    return [bytes(row.tolist()) for row in rows]


def agreement(comm: rp.comm.Communicator, policy: rp.Policy, steps: int, **options: Any) -> None:
    """The weights have the same hash on all ranks after every step."""
    model = make_model()
    optimizer = wrap(model, comm, policy, nesterov, **options)
    hashes = set()
    for step, batch in enumerate(batches(comm.rank, steps)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        digest = hashlib.sha256(weights(model).numpy().tobytes()).digest()
        seen = all_bytes(comm, digest, "weights' hash")
        assert len(set(seen)) == 1, f"weights differ after step {step}: {[h.hex()[:8] for h in seen]}"
        hashes.add(digest)
    assert len(hashes) == steps
    optimizer.close()


def local_steps(comm: rp.comm.Communicator) -> None:
    """Update mode: shared weights have one hash on all ranks at every step, and a resumed run ends at the same one."""
    policy = rp.IWP(0.05, roots="all", values="int8", local_steps=rp.LocalSteps(3, outer_momentum=0.3))
    model = make_model()
    optimizer = wrap(model, comm, policy, OPTIMIZERS["adamw"])
    saved: dict[str, Any] = {}
    for step, batch in enumerate(batches(comm.rank, 10)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        with optimizer.shared_weights():
            digest = hashlib.sha256(weights(model).numpy().tobytes()).digest()
        assert len(set(all_bytes(comm, digest, "weights' hash"))) == 1, f"shared weights differ after step {step}"
        own = hashlib.sha256(weights(model).numpy().tobytes()).digest()
        assert len(set(all_bytes(comm, own, "own weights' hash"))) == (1 if step % 3 == 2 else comm.size)
        if step == 6:
            saved = copy.deepcopy(optimizer.state_dict())  # what torch.save would write
    optimizer.flush()
    straight = weights(model)
    optimizer.close()
    again = make_model(seed=3)
    optimizer = wrap(again, comm, policy, OPTIMIZERS["adamw"])
    optimizer.load_state_dict(saved)
    run(again, optimizer, comm.rank, 3, start=7)
    optimizer.flush()
    # With more ranks the order of a sum, and so its last bit, may change from call to call.
    assert comm.size > 2 or same_bytes(weights(again), straight)
    optimizer.close()


def horovod_reference(make: Any, steps: int) -> tuple[Tensor, float]:
    """Plain Horovod, and the largest averaged gradient seen."""
    import horovod.torch as hvd

    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
    largest = 0.0
    for batch in batches(hvd.rank(), steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        largest = max(largest, *(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None))
    return weights(model), largest


def transparency(comm: rp.comm.Communicator, name: str, steps: int = 50) -> None:
    """Dense is plain Horovod: to the bit with two ranks, where there is one order of sums; density 1 up to rounding.

    The bound is that of tests/test_laws.py.
    """
    make = OPTIMIZERS[name]
    expected, largest = horovod_reference(make, steps)
    group = make([torch.zeros(1)]).param_groups[0]
    gain = 2 / group["eps"] if name == "adamw" else 1 / (1 - group["momentum"])
    bound = 2 * steps * group["lr"] * gain * (comm.size + 4) * EPS * largest + 4 * EPS * float(expected.abs().max())
    for policy in (rp.Dense(), rp.IWP(1.0)):
        got, optimizer = train(comm, policy, make, steps)
        optimizer.close()
        if policy == rp.Dense() and comm.size == 2:
            assert same_bytes(got, expected), f"Dense differs by {float((got - expected).abs().max())}"
        difference = float((got - expected).abs().max())
        assert difference <= bound, f"{policy.name}: {difference} > {bound}"


def like_horovod_where_gradients_are_missing(comm: rp.comm.Communicator) -> None:
    """Unused on some ranks, unused on all, frozen: what plain Horovod does, to the bit."""
    import horovod.torch as hvd

    def loop(wrapped: Callable[[Any, nn.Module], Any]) -> Tensor:
        model = nn.ModuleDict({key: nn.Linear(64, 64) for key in "abc"})
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        model["c"].requires_grad_(False)
        optimizer = wrapped(nesterov(model.parameters()), model)
        for _ in range(3):
            optimizer.zero_grad()
            if comm.rank == 0:
                model["a"](torch.ones(1, 64)).sum().backward()
            else:
                model["a"].weight.sum().backward()
            optimizer.step()
        return weights(model)

    expected = loop(lambda o, m: hvd.DistributedOptimizer(o, named_parameters=m.named_parameters()))
    got = loop(lambda o, m: rp.DistributedOptimizer(o, m.named_parameters(), policy=rp.Dense(), comm=comm))
    if comm.size == 2:
        assert same_bytes(got, expected)
    assert torch.allclose(got, expected, atol=1e-6)


def horovod_s_own_broadcasts(comm: rp.comm.Communicator) -> None:
    """hvd.broadcast_parameters and broadcast_optimizer_state serve the wrapper, as migrating scripts call them.

    The latter makes an uninitialised optimizer step on zero gradients; that step must neither wait nor move weights.
    """
    import horovod.torch as hvd

    for make in (nesterov, torch.optim.AdamW):
        model = make_model(seed=comm.rank)
        inner = make(model.parameters())
        if comm.rank == 0:
            run(model, inner, 0, 2)
        inner.zero_grad()
        optimizer = wrap(model, comm, rp.IWP(0.05), lambda _, inner=inner: inner)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 3)
        # Again in mid-run, and after a load: Horovod's usual ways to resume.
        before = weights(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert same_bytes(weights(model), before)
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 3)
        digest = hashlib.sha256(weights(model).numpy().tobytes()).digest()
        assert len(set(all_bytes(comm, digest, "weights' hash"))) == 1
        optimizer.close()


def horovod_s_arguments(comm: rp.comm.Communicator) -> None:
    """op, compression and predivide as Horovod has them."""
    import horovod.torch as hvd

    for options in ({"op": hvd.Sum}, {"op": hvd.Average, "gradient_predivide_factor": 2.0}):
        results = []
        for library in (hvd, rp):
            model = make_model()
            extra = {} if library is hvd else {"policy": rp.Dense(), "comm": comm, "compression": hvd.Compression.none}
            optimizer = library.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options, **extra
            )
            run(model, optimizer, comm.rank, 3)
            results.append(weights(model))
        assert torch.allclose(*results, atol=1e-6) and (comm.size > 2 or same_bytes(*results))
    for options, said in (({"op": hvd.Adasum}, "Adasum"), ({"compression": hvd.Compression.fp16}, "compression")):
        try:
            wrap(make_model(), comm, rp.IWP(0.05), **options)
        except rp.ConfigurationError as error:
            assert said in str(error)
        else:
            raise AssertionError(f"{options} was accepted")


def a_bad_gradient_of_one_rank(comm: rp.comm.Communicator) -> None:
    model = make_model()
    optimizer = wrap(model, comm, rp.IWP(0.05), nesterov)
    run(model, optimizer, comm.rank, 2)
    before = weights(model)
    optimizer.zero_grad()
    last = comm.rank == comm.size - 1
    (loss_of(model, next(iter(batches(comm.rank, 1, 2)))) * (math.nan if last else 1.0)).backward()
    try:
        optimizer.step()
    except rp.NonFiniteGradientError as error:
        assert f"rank {comm.size - 1}: the gradient of '2.weight' has" in str(error), str(error)
    else:
        raise AssertionError("NaN was accepted")
    assert same_bytes(weights(model), before)
    run(model, optimizer, comm.rank, 2, start=2)
    optimizer.close()


def ranks_that_differ(comm: rp.comm.Communicator) -> None:
    try:
        wrap(make_model(), comm, rp.IWP(0.05), seed=comm.rank)
    except rp.RankMismatchError as error:
        assert "seed=1" in str(error)
    else:
        raise AssertionError("different seeds were accepted")


def resume(comm: rp.comm.Communicator) -> None:
    policy = rp.IWP(0.05, warmup=rp.Warmup(3), explore=0.2, refresh=4)  # saved between two refreshes
    expected, optimizer = train(comm, policy, nesterov, 12)
    optimizer.close()
    model = make_model()
    first = wrap(model, comm, policy, nesterov)
    run(model, first, comm.rank, 5)
    saved = {"model": model.state_dict(), "optimizer": first.state_dict()}
    again = make_model(seed=3)
    second = wrap(again, comm, policy, nesterov)
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    run(again, second, comm.rank, 7, start=5)
    if comm.size == 2:  # with more ranks the library may sum in another order from run to run
        assert same_bytes(weights(again), expected)
    assert torch.allclose(weights(again), expected, atol=1e-4)


def counted_bytes(comm: rp.comm.Communicator) -> None:
    start_bytes = comm.traffic.bytes_sent
    model = make_model()
    optimizer = wrap(model, comm, rp.IWP(0.05))
    built = comm.traffic.bytes_sent
    run(model, optimizer, comm.rank, 4)
    stats = optimizer.stats()
    assert math.isclose(stats["bytes_sent"], comm.traffic.bytes_sent - built)
    assert built - start_bytes == (comm.size - 1) * 33, "the hand-shake"
    share = (comm.size - 1) / comm.size
    k = round(0.05 * 4096) + round(0.05 * 3072)
    assert math.isclose(stats["bytes_indices"], 4 * share * index_code(k, 4096 + 3072).size)
    assert math.isclose(stats["bytes_values"], 4 * 2 * share * 4 * k)
    optimizer.close()


def scheduled(comm: rp.comm.Communicator, kind: str) -> None:
    """The weights do not depend on when things are sent: with two ranks, of one order of sums, to the bit."""
    for policy in (rp.Dense(), rp.IWP(0.05, values="int8"), rp.DGC(0.05)):
        results = []
        for schedule in (None, rp.LayerPriority(slice_bytes=4096, credit_bytes=8192, fuse_bytes=600)):
            model = make_model()
            optimizer = rp.DistributedOptimizer(
                nesterov(model.parameters()),
                model.named_parameters(),
                policy=replace(policy, schedule=schedule),
                comm=rp.connect(kind, timeout=20),
                model=model,
                check_every=4,
            )
            run(model, optimizer, comm.rank, 20)
            with optimizer.shared_weights():
                results.append(weights(model))
            optimizer.close()
        digest = hashlib.sha256(results[1].numpy().tobytes()).digest()
        assert len(set(all_bytes(comm, digest, "weights' hash"))) == 1
        if comm.size == 2 and policy.values == "fp32":  # codes are fitted to what travels together
            assert same_bytes(*results), f"{policy.name} differs by {float((results[0] - results[1]).abs().max())}"


def rows(comm: rp.comm.Communicator, kind: str) -> None:
    """Tables end at the same weights whichever way their rows go: with two ranks, of one order of sums, to the bit."""
    results = []
    for way in ("auto", *WAYS):
        model = make_words()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            policy=replace(rp.IWP(0.1), rows=rp.Rows(way)),
            comm=rp.connect(kind, timeout=20),
            model=model,
            check_every=2,
        )
        for step in range(10):
            optimizer.zero_grad()
            if step == 4:  # rows of one rank alone
                (loss_of_words(model, 0, step) if comm.rank == 0 else model["out"].bias.sum()).backward()
            else:
                loss_of_words(model, comm.rank, step).backward()
            optimizer.step()
        results.append(weights(model))
        taken = optimizer.stats()["rows"]["words.weight"]
        assert sum(taken.values()) == 10
        assert way in ("auto", *taken)
        optimizer.close()
    for result in results[1:]:
        assert torch.allclose(result, results[0], rtol=1e-4, atol=1e-5)
        assert comm.size > 2 or same_bytes(result, results[0])
    coded(comm, kind)


def coded(comm: rp.comm.Communicator, kind: str) -> None:
    """Rows in 16 bits, under SparseAdam: the same weights on all ranks."""
    for way in WAYS:
        model = make_words()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SparseAdam(tables_of(model), lr=0.05),
            model.named_parameters(),
            policy=rp.Parallax(way, values="fp16"),
            comm=rp.connect(kind, timeout=20),
            model=model,
            check_every=1,
        )
        if kind == "horovod":
            import horovod.torch as hvd

            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            optimizer.zero_grad()
            loss_of_words(model, comm.rank, step).backward()
            optimizer.step()
        optimizer.close()


def saved_by_one_rank(comm: rp.comm.Communicator, kind: str) -> None:
    """Messages of a scheduled step go on while a rank does something else: here it waits for what another rank saves.

    With MPI nothing moves while nobody asks; the thread once slept as soon as the last message had been started.
    """
    own = rp.connect(kind, timeout=20)
    number = comm.broadcast(torch.tensor([os.getpid()]), 0, name="number").wait()
    path = Path(tempfile.gettempdir()) / f"ringprune-saved-{kind}-{int(number)}"
    model = make_model()
    optimizer = rp.DistributedOptimizer(
        nesterov(model.parameters()), model.named_parameters(), policy=rp.P3(4096, 8192), comm=own, model=model
    )
    run(model, optimizer, comm.rank, 5)
    if comm.rank == 0:
        torch.save(model.state_dict(), path)
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, "rank 0 cannot save: its step waits for this rank"
        time.sleep(0.01)
    optimizer.close()
    own.close()
    comm.allreduce(torch.ones(1), name="all have seen it").wait()
    path.unlink(missing_ok=True)


def two_wrappers_in_one_backward(comm: rp.comm.Communicator, kind: str) -> None:
    """Horovod matches collectives by name, and both wrappers' buckets are under way at the same time."""
    models = make_model(), make_model(seed=1)
    optimizers = [wrap(model, rp.connect(kind, timeout=20), rp.IWP(0.05)) for model in models]
    for batch in batches(comm.rank, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model, batch) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    digest = hashlib.sha256(torch.cat([weights(model) for model in models]).numpy().tobytes()).digest()
    assert len(set(all_bytes(comm, digest, "weights' hash"))) == 1
    for optimizer in optimizers:
        optimizer.close()


def process_sets(comm: rp.comm.Communicator) -> None:
    """Ranks of a set exchange among themselves; a rank outside only steps, and waits for nobody."""
    import horovod.torch as hvd

    # All ranks together would be the global set, which Horovod has already.
    pair = hvd.add_process_set([0, comm.size - 1] if comm.size > 2 else [0])
    model = make_model()
    optimizer = rp.DistributedOptimizer(
        nesterov(model.parameters()), model.named_parameters(), policy=rp.IWP(0.05), process_set=pair
    )
    run(model, optimizer, comm.rank, 5)
    digest = hashlib.sha256(weights(model).numpy().tobytes()).digest()
    seen = all_bytes(comm, digest, "weights' hash")
    assert seen[1] != seen[0]
    assert comm.size == 2 or seen[0] == seen[-1]
    assert bool(optimizer.stats()) == pair.included()
    hvd.remove_process_set(pair)


def checks(kind: str, steps: int) -> dict[str, Callable[[rp.comm.Communicator], None]]:
    found: dict[str, Callable[[rp.comm.Communicator], None]] = {
        "agreement, one root": partial(agreement, policy=rp.IWP(0.05), steps=steps),
        "agreement, all roots": partial(agreement, policy=rp.IWP(0.05, roots="all", explore=0.2), steps=20),
        "agreement, coded": partial(agreement, policy=rp.IWP(0.05, values="int8", dense_values="bf16"), steps=10),
        "agreement, look-ahead": partial(agreement, policy=rp.IWP(0.05, lookahead=True, values="fp16"), steps=10),
        "agreement, own sets": partial(agreement, policy=rp.DGC(0.05), steps=10),
        "agreement, own sets scattered": partial(agreement, policy=rp.DGC(0.05, index_sets="scattered"), steps=10),
        "agreement, balanced": partial(agreement, policy=rp.OkTopk(0.05, values="bf16"), steps=10),
        "agreement, guarded": partial(
            agreement, policy=rp.IWP(0.05, values="int8"), steps=12, guard=rp.Guard(2, 1e-9, 1), check_every=2
        ),
        "agreement, random": partial(agreement, policy=rp.RandomK(0.05), steps=10),
        "local steps": local_steps,
        "agreement, low-pass": partial(agreement, policy=rp.ScaleCom(0.05), steps=10),
        "agreement, core and explored": partial(agreement, policy=rp.SlimDP(0.05, refresh=3), steps=10),
        "agreement, core and each rank's own": partial(
            agreement, policy=rp.SlimDP(0.05, refresh=3, explore_by="rank", values="int8"), steps=10
        ),
        "agreement, relevance, estimate and turns": partial(agreement, policy=MIPD, steps=10),
        "a bad gradient of one rank": a_bad_gradient_of_one_rank,
        "ranks that differ": ranks_that_differ,
        "resume": resume,
        "counted bytes": counted_bytes,
        "scheduled": partial(scheduled, kind=kind),
        "rows": partial(rows, kind=kind),
        "scheduled, saved by one rank": partial(saved_by_one_rank, kind=kind),
        "two wrappers": partial(two_wrappers_in_one_backward, kind=kind),
    }
    if kind != "horovod":  # it cannot shift
        ring = replace(MIPD, reduction="ring", dense_values="int4")
        found["agreement, books on the ring"] = partial(agreement, policy=ring, steps=10)
    if kind == "horovod":
        found |= {f"transparency, {name}": partial(transparency, name=name) for name in OPTIMIZERS}
        found |= {
            "missing gradients": like_horovod_where_gradients_are_missing,
            "Horovod's broadcasts": horovod_s_own_broadcasts,
            "Horovod's arguments": horovod_s_arguments,
            "process sets": process_sets,
        }
    return found


if __name__ == "__main__":
    kind, steps, which = sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:])
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    comm = start(kind)
    chosen = {name: check for name, check in checks(kind, steps).items() if name.startswith(which)}
    for name, check in chosen.items():
        check_together(kind, name, partial(check, comm))
    if comm.rank == 0:
        print(f"{len(chosen)} checks passed on {comm.size} ranks")
