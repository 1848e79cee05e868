"""Dense gradients that are summed where they are, by a library that gathers tensors into messages itself."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune import ops, packing
from ringprune.comm.call import Call
from ringprune.comm.communicator import Handle
from ringprune.plan import ParamSpec
from ringprune.residual import Clipping
from ringprune.routing import plan_of
from tests.training import batches, loss_of, make_model, nesterov, run, sgd, wrap

Rank = rp.comm.Communicator


class _Group:
    """What such a library does, with a message of a simulated rank: gather, sum, scale, and back.

    At once where all ranks have come, as a thread of the library may: while this rank's backward pass goes on.
    """

    def __init__(self, handle: Handle, buffer: Tensor, tensors: Sequence[Tensor], factor: float) -> None:
        self._handle, self._buffer, self._tensors, self._factor = handle, buffer, tensors, factor

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> Tensor:
        self._handle.wait()
        packing.unflatten(self._tensors, self._buffer, self._factor)
        return self._tensors[0]


def grouping(comm: Any) -> Any:
    """The simulated rank, with the ability."""

    def start(call: Call, tensors: Sequence[Tensor], factor: float) -> Handle:
        call = replace(call, name=f"{call.name} {[tensor.numel() for tensor in tensors]}")  # alike on all ranks
        buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        # What is read later than this must not be what was there before.
        for tensor in tensors:
            tensor.fill_(float("nan"))
        return _Group(comm._start(call, buffer, buffer), buffer, tensors, factor)

    comm.abilities, comm._start_group = comm.abilities | {"group"}, start
    return comm


def conv_model() -> nn.Module:
    """Of gradients that are not contiguous: torch makes those of channels_last weights so."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"op": "sum"}, {"gradient_predivide_factor": 2.0}, {"bucket_bytes": 1}],
    ids=str,
)
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05)], ids=["dense", "iwp"])
def test_the_weights_are_those_without_groups_to_the_bit(ranks: int, options: dict[str, Any], policy: Any) -> None:
    def rank(comm: Rank) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, policy, nesterov, **options)
        run(model, optimizer, comm.rank, 4)
        return [param.detach() for param in model.parameters()]

    plain, grouped = rp.simulate(ranks, rank)[0], rp.simulate(ranks, lambda comm: rank(grouping(comm)))[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, grouped, strict=True))


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_bytes": 1}], ids=str)
@pytest.mark.parametrize("group", [False, True], ids=["single", "group"])
def test_averages_are_made_in_the_gradients_own_memory(
    options: dict[str, Any], group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied into a bucket, but where one of several tensors is one message."""
    copied: list[int] = []
    flatten = packing.flatten
    monkeypatch.setattr(
        packing, "flatten", lambda tensors, *rest: (copied.append(len(tensors)), flatten(tensors, *rest))[1]
    )

    def rank(comm: Rank) -> None:
        model = make_model()
        optimizer = wrap(model, grouping(comm) if group else comm, rp.Dense(), **options)
        for batch in batches(comm.rank, 2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            before = [param.grad.data_ptr() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            after = [param.grad.data_ptr() for param in model.parameters() if param.grad is not None]
            assert before == after

    rp.simulate(2, rank)
    assert not copied or (not group and "bucket_bytes" not in options)


@pytest.mark.parametrize("layout", ["channels_last", "float16", "scaled"])
def test_gradients_that_cannot_be_summed_where_they_are(layout: str) -> None:
    def rank(comm: Rank) -> list[Tensor]:
        model = conv_model() if layout == "channels_last" else make_model()
        if layout == "float16":
            model[0].half()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=layout == "scaled")
        optimizer = wrap(model, comm, rp.Dense(), sgd, scaler=scaler)
        for seed in range(3):
            draw = torch.Generator().manual_seed(10 * comm.rank + seed)
            optimizer.zero_grad()
            loss = torch.stack(
                [(p * torch.randn(p.shape, generator=draw)).sum().float() for p in model.parameters()]
            ).sum()
            if layout == "channels_last":
                loss = nn.functional.cross_entropy(
                    model(torch.randn(2, 4, 8, 8, generator=draw).to(memory_format=torch.channels_last)),
                    torch.tensor([1, 2]),
                )
                scaler.scale(loss).backward()
                assert not model[0].weight.grad.is_contiguous(), "as this test needs it"
            else:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach() for param in model.parameters()]

    plain, grouped = rp.simulate(2, rank)[0], rp.simulate(2, lambda comm: rank(grouping(comm)))[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, grouped, strict=True))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_bad_gradient_is_found_before_it_is_summed(nonfinite: str) -> None:
    def rank(comm: Rank) -> None:
        model = make_model()
        optimizer = wrap(model, grouping(comm), rp.Dense(), nonfinite=nonfinite)
        run(model, optimizer, comm.rank, 1)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        inputs, labels = next(iter(batches(comm.rank, 1)))
        if comm.rank == 1:
            inputs[0, 0] = float("inf")
        loss_of(model, (inputs, labels)).backward()
        if nonfinite == "raise":
            with pytest.raises(
                rp.NonFiniteGradientError, match=r"rank 1: the gradient of '0.weight' has \d+ of 4096"
            ) as told:
                optimizer.step()
            assert "rank 0" not in str(told.value)
        else:
            optimizer.step()
            assert optimizer.stats()["skipped_steps"] == 1
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        run(model, optimizer, comm.rank, 2)
        assert all(param.isfinite().all() for param in model.parameters())

    rp.simulate(2, rank)


def test_dense_buckets_of_groups_taper_off() -> None:
    """The last bucket's message is what no compute hides."""
    specs = [ParamSpec(str(i), (1 << 18,), torch.float32, torch.device("cpu"), 0) for i in range(100)]
    of = [len(bucket.members) for bucket in plan_of(rp.Dense().routing, specs, 25 << 20, (), groups=True).buckets]
    assert of == [25, 25, 25, 12, 6, 3, 2, 1, 1]
    assert [len(b.members) for b in plan_of(rp.Dense().routing, specs, 25 << 20, ()).buckets] == [25] * 4


def test_long_tensors_of_groups_wait_for_no_others() -> None:
    """A translation model's table of target words was sent when the encoder's gradients were there, much later."""
    sizes = [*[1 << 20] * 5, 2 << 20, *[1 << 18] * 4, 2 << 20]  # backward begins with the last
    specs = [ParamSpec(str(i), (n,), torch.float32, torch.device("cpu"), 0) for i, n in enumerate(sizes)]
    of = [list(bucket.members) for bucket in plan_of(rp.Dense().routing, specs, 25 << 20, (), groups=True).buckets]
    assert of == [[10], [9, 8, 7, 6, 5], [4], [3], [2], [1], [0]]


# -- memory that is not the gradient's alone: a library that sums at once would change what others read ----------------


class Shifted(nn.Module):
    """Batches of one: autograd's gradient of ``positions`` lies in the memory of that on its way to ``linear``."""

    def __init__(self) -> None:
        super().__init__()
        # The last parameter's bucket is the first to go.
        self.linear, self.positions = nn.Linear(64, 10), nn.ParameterList([torch.zeros(10)])
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 640).view(10, 64))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.positions[0].unsqueeze(0)
        return out


class Twins(nn.Module):
    """Parameters that get one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(64, 10)), nn.Parameter(torch.ones(10, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a.view(-1) + self.b.view(-1)).view(64, 10)


class Joined(nn.Module):
    """Parameters whose gradients are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(32, 10)), nn.Parameter(torch.ones(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.b, self.a])


class Flat(nn.Module):
    """All gradients in one tensor of the user's, and several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters()))
        self.assign()

    def assign(self) -> None:
        for param, part in zip(self.parameters(), self.flat.split([p.numel() for p in self.parameters()]), strict=True):
            param.grad = part.view_as(param)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("group", [False, True], ids=["single", "group"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"op": "sum"}, {"gradient_predivide_factor": 2.0}], ids=str)
@pytest.mark.parametrize("kind", [Shifted, Twins, Joined, Flat])
def test_memory_that_others_read_is_left_alone(kind: Any, options: dict[str, Any], passes: int, group: bool) -> None:
    """The averages are those of Horovod's arithmetic on gradients of the plain model, whoever lies in their memory."""
    if kind is Twins and passes > 1:
        pytest.skip("torch itself adds the second pass twice")

    def gradients(rank: int) -> list[Tensor]:
        model = kind()
        for inputs, labels in batches(rank, passes):
            loss_of(model, (inputs[: 1 + rank], labels[: 1 + rank])).backward()
        return [param.grad.clone() for param in model.parameters()]

    def train(comm: Rank) -> None:
        model = kind()
        eager(comm, group)
        optimizer = wrap(model, comm, rp.Dense(), sgd, bucket_bytes=1, backward_passes_per_step=passes, **options)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=kind is Twins)
            for inputs, labels in batches(comm.rank, passes):
                # More than one on the second rank: no gradient lies in the memory of another there.
                loss_of(model, (inputs[: 1 + comm.rank], labels[: 1 + comm.rank])).backward()
            optimizer.synchronize()
            for param, *of_ranks in zip(model.parameters(), *map(gradients, range(comm.size)), strict=True):
                expected = torch.stack(of_ranks).sum(0)
                expected = expected if options.get("op") == "sum" else expected / comm.size
                # Two ranks' sum, and a division by a power of two: one rounding, where the gradients do not differ.
                torch.testing.assert_close(param.grad, expected, rtol=1e-6, atol=1e-7)

    rp.simulate(2, train)


@pytest.mark.parametrize(
    "policy", [rp.Dense(), replace(rp.Dense(), clipping=Clipping(None, 1e-2))], ids=["flat", "clipped"]
)
def test_ranks_may_differ_in_what_they_have_to_copy(policy: rp.Policy) -> None:
    """Messages are alike: a rank once sent one tensor where the others sent several, and Horovod waited for ever."""

    def train(comm: Rank, flat: bool) -> list[Tensor]:
        model = Flat()
        if comm.rank or not flat:
            model.zero_grad()
        optimizer = wrap(model, grouping(comm), policy, sgd)
        for inputs, labels in batches(comm.rank, 3):
            optimizer.zero_grad(set_to_none=False)
            (loss_of(model, (inputs, labels)) * (1.0 if comm.rank else 1e-4)).backward()  # the second rank's is clipped
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    differing = rp.simulate(2, lambda comm: train(comm, flat=True))
    for a, b, c in zip(*differing, rp.simulate(2, lambda comm: train(comm, flat=False))[0], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def eager(comm: Any, group: bool) -> None:
    """Sums of a simulated rank come as early as they may, not when they are waited for."""
    if group:
        grouping(comm)
    start = comm._start

    def started(call: Call, tensor: Tensor, into: Tensor) -> Handle:
        handle: Handle = start(call, tensor, into)
        if call.op == "allreduce" and "dense" in call.name:
            handle.wait()
        return handle

    comm._start = started


def test_a_scaler_of_scale_one_reads_gradients_that_are_not_being_summed() -> None:
    """GradScaler reads and writes gradients before the wrapper's step, with nothing to divide by too."""

    def train(comm: Rank) -> float:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
        optimizer = wrap(model, grouping(comm), rp.Dense(), sgd, scaler=scaler)
        for batch in batches(comm.rank, 2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.stats()["steps"] == 2
        return float(scaler.get_scale())

    assert rp.simulate(2, train) == [1.0, 1.0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", [rp.Dense(), rp.Dense("bf16"), rp.IWP(0.05)], ids=["dense", "rounded", "iwp"])
def test_entries_are_looked_at_once(policy: Any, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    count = ops.count_nonfinite

    def counting(tensors: Sequence[Tensor]) -> Tensor:
        nonlocal seen
        seen += sum(tensor.numel() for tensor in tensors)
        return count(tensors)

    def train(comm: Rank) -> int:
        model = make_model()
        optimizer = wrap(model, comm, policy, overlap=overlap)
        run(model, optimizer, comm.rank, 1)
        return sum(param.numel() for param in model.parameters())

    monkeypatch.setattr(ops, "count_nonfinite", counting)
    entries = rp.simulate(1, train)[0]
    assert seen <= entries
    if isinstance(policy, rp.Policy) and policy == rp.Dense():
        assert seen == entries


def test_nothing_of_a_step_that_was_not_made_is_held() -> None:
    def train(comm: Rank) -> None:
        model = make_model()
        optimizer = wrap(model, grouping(comm), rp.Dense(), nonfinite="skip")
        run(model, optimizer, comm.rank, 1)
        optimizer.zero_grad()
        inputs, labels = next(iter(batches(comm.rank, 1)))
        loss_of(model, (inputs * float("inf"), labels)).backward()
        held = [weakref.ref(param.grad.untyped_storage()) for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)

    rp.simulate(1, train)
