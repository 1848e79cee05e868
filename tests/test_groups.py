"""Dense gradients that are summed where they are, by a library that gathers tensors into messages itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune import packing
from ringprune.comm.call import Call
from ringprune.comm.communicator import Handle
from tests.training import batches, loss_of, make_model, nesterov, run, sgd, wrap

Rank = rp.comm.Communicator


class _Group:
    """What such a library does, with a message of a simulated rank: gather, sum, scale, and back."""

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


def test_averages_are_made_in_the_gradients_own_memory() -> None:
    def rank(comm: Rank) -> None:
        model = make_model()
        optimizer = wrap(model, grouping(comm), rp.Dense())
        for batch in batches(comm.rank, 2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            before = [param.grad.data_ptr() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            after = [param.grad.data_ptr() for param in model.parameters() if param.grad is not None]
            assert before == after

    rp.simulate(2, rank)


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


def test_dense_buckets_of_groups_are_short() -> None:
    """The last bucket's message is what no compute hides."""

    def names(comm: Rank) -> tuple[str, ...]:
        linear = nn.Linear(1024, 1024, bias=False)
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)), linear)
        sent: list[str] = []
        plain = comm.allreduce
        comm.allreduce = lambda t, *, name: (sent.append(name), plain(t, name=name))[1]  # type: ignore[method-assign,assignment]
        if "group" in comm.abilities:
            group = comm.allreduce_group
            comm.allreduce_group = lambda t, **o: (sent.append(o["name"]), group(t, **o))[1]  # type: ignore[method-assign]
        optimizer = wrap(model, comm, rp.Dense())
        sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return tuple(name for name in sent if "dense" in name)

    assert len(rp.simulate(1, names)[0]) == 1
    assert len(rp.simulate(1, lambda comm: names(grouping(comm)))[0]) == 4
