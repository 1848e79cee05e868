"""Wrappers of others around the same model: DistributedDataParallel and Horovod's optimizer."""

import gc
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringprune as rp
from tests.training import make_model, plain_sgd


def wrapped(model: nn.Module, comm: Any, **more: Any) -> rp.DistributedOptimizer:
    return rp.DistributedOptimizer(plain_sgd(model.parameters()), model.named_parameters(), comm=comm, **more)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("alone")
def test_a_model_that_ddp_averages_is_refused(overlap: bool) -> None:
    """With overlap=False it trained without a word, and every gradient was sent twice, once of it whole."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        ddp = DistributedDataParallel(model)
        for each in (ddp, model):
            with pytest.raises(rp.ConfigurationError, match=r"a DistributedDataParallel averages .*ringprune.ddp_hook"):
                wrapped(each, comm, overlap=overlap)
        with pytest.raises(rp.ConfigurationError, match="averages"):
            rp.DistributedOptimizer(plain_sgd(model.parameters()), comm=comm)
        wrapped(make_model(), comm).close()  # another model
        cycle: list[Any] = [ddp]
        cycle.append(cycle)  # nobody holds it any more, and nobody has looked
        gc.disable()
        try:
            del ddp, each, cycle
            wrapped(model, comm).close()
        finally:
            gc.enable()

    rp.simulate(1, rank)


@pytest.mark.parametrize(
    ("policy", "overlap", "after"),
    [(rp.IWP(0.1), True, 1), (rp.IWP(0.1), False, 2), (rp.IWP(0.1, local_steps=3), True, 3), (rp.P3(), True, 2)],
)
@pytest.mark.usefixtures("alone")
def test_ddp_made_after_the_wrapper_is_told_at_the_next_exchange(policy: rp.Policy, overlap: bool, after: int) -> None:
    """As transformers.Trainer does. With local steps DDP sent all gradients whole, and statistics told of few bytes."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = rp.DistributedOptimizer(
            plain_sgd(model.parameters()),
            model.named_parameters(),
            policy=policy,
            comm=comm,
            overlap=overlap,
            model=model,
        )
        ddp = DistributedDataParallel(model)
        inputs = torch.ones(2, next(model.parameters()).shape[1])
        with pytest.raises(rp.UsageError, match=r"averages .* require_backward_grad_sync = False"):
            for step in range(after):
                optimizer.zero_grad()
                ddp(inputs).sum().backward()
                optimizer.step()
                assert step + 1 < after, "the exchange after the first step tells"
        optimizer.close()

    rp.simulate(1, rank)


@pytest.mark.parametrize("policy", [rp.IWP(0.1), rp.IWP(0.1, local_steps=2)])
@pytest.mark.usefixtures("alone")
def test_ddp_that_averages_nothing_may_stay(policy: rp.Policy) -> None:
    """What frameworks make, told to keep still: the same weights as without it."""

    def rank(comm: rp.comm.Communicator, *, before: bool, after: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = make_model()
        called: nn.Module = model
        if before:
            called = DistributedDataParallel(model)
            called.require_backward_grad_sync = False
        optimizer = wrapped(model, comm, policy=policy)
        if after:
            called = DistributedDataParallel(model)
            called.require_backward_grad_sync = False
        inputs = torch.ones(2, next(model.parameters()).shape[1])
        for _ in range(4):
            optimizer.zero_grad()
            called(inputs).sum().backward()
            optimizer.step()
        optimizer.close()
        return model.state_dict()

    (plain,) = rp.simulate(1, lambda comm: rank(comm, before=False, after=False))
    for before in (False, True):
        (kept,) = rp.simulate(1, lambda comm, before=before: rank(comm, before=before, after=not before))
        assert all(torch.equal(kept[name], value) for name, value in plain.items())


@pytest.mark.usefixtures("alone")
def test_ddp_that_is_woken_later_is_told() -> None:
    """Lightning's manual optimization does it, and so does the end of no_sync() around the first steps."""

    def rank(comm: rp.comm.Communicator, *, inside: bool) -> None:
        model = make_model()
        optimizer = wrapped(model, comm, policy=rp.IWP(0.1, local_steps=2))
        ddp = DistributedDataParallel(model)
        inputs = torch.ones(2, next(model.parameters()).shape[1])

        def step() -> None:
            optimizer.zero_grad()
            ddp(inputs).sum().backward()
            optimizer.step()

        if inside:
            with ddp.no_sync():
                step()
        else:
            ddp.require_backward_grad_sync = False
            step()
            ddp.require_backward_grad_sync = True
        with pytest.raises(rp.UsageError, match=r"averages .* require_backward_grad_sync = False"):
            for _ in range(3):
                step()
        optimizer.close()

    for inside in (False, True):
        rp.simulate(1, lambda comm, inside=inside: rank(comm, inside=inside))


@pytest.mark.usefixtures("alone")
def test_ddp_that_is_made_anew_is_told() -> None:
    """A second fit() of a framework puts another one around the model, and the first goes."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrapped(model, comm, policy=rp.IWP(0.1, local_steps=2))
        inputs = torch.ones(2, next(model.parameters()).shape[1])
        for still in (True, False):
            ddp = DistributedDataParallel(model)
            ddp.require_backward_grad_sync = not still
            for step in range(2):
                optimizer.zero_grad()
                ddp(inputs).sum().backward()
                if still or step == 0:
                    optimizer.step()
            gc.collect()
        with pytest.raises(rp.UsageError, match="averages"):
            optimizer.step()
        optimizer.close()

    rp.simulate(1, rank)


def test_parameters_that_horovods_optimizer_averages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both exchanged; Horovod then said that backward_passes_per_step was to be increased."""
    monkeypatch.setitem(sys.modules, "horovod.torch", cast("Any", SimpleNamespace(is_initialized=lambda: False)))

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = plain_sgd(model.parameters())
        # As Horovod makes it: of the optimizer's own class, in its own module, with the same param groups.
        kind = type("SGD", (torch.optim.SGD,), {"__module__": "horovod.torch.optimizer"})
        theirs = kind(inner.param_groups)
        with pytest.raises(rp.ConfigurationError, match=r"hvd.DistributedOptimizer averages .* remove that line"):
            rp.DistributedOptimizer(inner, model.named_parameters(), comm=comm)
        del theirs
        rp.DistributedOptimizer(inner, model.named_parameters(), comm=comm).close()

    rp.simulate(1, rank)


@pytest.mark.usefixtures("alone")
def test_what_ddp_leaves_alone_and_what_is_half_made_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for others ended in an AttributeError where Horovod had just been refused around a wrapper of ours."""
    monkeypatch.setitem(sys.modules, "horovod.torch", cast("Any", SimpleNamespace(is_initialized=lambda: False)))

    def rank(comm: rp.comm.Communicator) -> None:
        model, empty = make_model(), DistributedDataParallel.__new__(DistributedDataParallel)
        names = [name for name, _ in model.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names[1:])
        ddp = DistributedDataParallel(model)
        mine = [(name, param) for name, param in model.named_parameters() if name in names[1:]]
        optimizer = rp.DistributedOptimizer(plain_sgd([param for _, param in mine]), mine, comm=comm)
        derived = type("DistributedOptimizer", (rp.DistributedOptimizer,), {"__module__": "horovod.torch.optimizer"})
        with pytest.raises(rp.ArgumentTypeError, match=r"as from hvd\.") as held:
            derived(optimizer.param_groups)
        optimizer.close()
        wrapped(make_model(), comm).close()
        del ddp, empty, held

    rp.simulate(1, rank)


@pytest.mark.usefixtures("alone")
def test_a_hook_serves_one_model() -> None:
    """The second one's backward said that a checkpoint did not fit."""
    hook = rp.ddp_hook(rp.Dense())
    first, second = (DistributedDataParallel(make_model()) for _ in range(2))
    for ddp in (first, second):
        ddp.register_comm_hook(None, hook)
    inputs = torch.ones(2, next(first.parameters()).shape[1])
    first(inputs).sum().backward()
    with pytest.raises(rp.UsageError, match=r"make a ringprune\.ddp_hook for each model"):
        second(inputs).sum().backward()
