"""A job that trains under DistributedDataParallel with RingPrune's hook and compares it with the wrapper."""

import copy
import io
import logging
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import ringprune as rp
from tests.mpi.inside import check_together, start
from tests.training import batches, loss_of, make_model, run, same_bytes, sgd, weights, wrap


def wrapped(policy: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """The test model with buckets of one or two tensors, and its hook."""
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    hook = rp.ddp_hook(policy, named_parameters=model.named_parameters(), **options)
    ddp.register_comm_hook(None, hook)
    return ddp, hook


def train(ddp: nn.Module, rank: int, steps: int, start: int = 0) -> Tensor:
    run(ddp, sgd(ddp.parameters()), rank, steps, start)
    return weights(ddp)


def dense_is_plain_ddp(comm: rp.comm.Communicator) -> None:
    expected = train(DistributedDataParallel(make_model(), bucket_cap_mb=0.005), comm.rank, 8)
    got = train(wrapped(rp.Dense())[0], comm.rank, 8)
    if comm.size == 2:
        assert same_bytes(got, expected)
    assert torch.allclose(got, expected, atol=1e-5)


def other_ranks_than_the_hook_s_are_refused(comm: rp.comm.Communicator) -> None:
    """Gradients were averaged across the groups of DDP, in silence; a state was not looked at."""
    groups = [torch.distributed.new_group([rank]) for rank in range(comm.size)]
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=groups[comm.rank])
    ddp.register_comm_hook(None, rp.ddp_hook(rp.Dense()))
    with pytest.raises(rp.RankMismatchError, match=f"averages over 1 ranks and this hook over {comm.size}"):
        train(ddp, comm.rank, 1)

    ddp = DistributedDataParallel(make_model())
    ddp.register_comm_hook(groups[0] if comm.rank == 0 else None, rp.ddp_hook(rp.Dense()))
    with pytest.raises(rp.RankMismatchError, match="the hook takes no state"):
        train(ddp, comm.rank, 1)

    model = make_model()
    still = DistributedDataParallel(model, process_group=groups[comm.rank])
    still.require_backward_grad_sync = False
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(torch.distributed.group.WORLD, rp.ddp_hook(rp.Dense()))
    train(ddp, comm.rank, 1)


def a_static_graph_changes_its_buckets_late(comm: rp.comm.Communicator) -> None:
    """One pass later than otherwise: the hook took itself for steady, and said "make a new hook"."""
    results = []
    for hooked in (False, True):
        model = make_model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, static_graph=True)
        if hooked:
            ddp.register_comm_hook(None, rp.ddp_hook(rp.Dense()))
        results.append(train(ddp, comm.rank, 8))
    assert torch.allclose(*results, atol=1e-5)
    assert comm.size > 2 or same_bytes(*results)


def a_policy_is_what_the_wrapper_makes_of_it(comm: rp.comm.Communicator) -> None:
    """Same roots and scores; only the buckets differ, and with them whom a step's root is: so all ranks are roots."""
    policy = rp.IWP(0.05, roots="all", correction="global")
    model = make_model()
    optimizer = wrap(model, comm, policy)
    run(model, optimizer, comm.rank, 8)
    ddp, hook = wrapped(policy)
    got = train(ddp, comm.rank, 8)
    if comm.size == 2:
        assert same_bytes(got, weights(model)), float((got - weights(model)).abs().max())
    assert torch.allclose(got, weights(model), atol=1e-5)
    theirs, ours = optimizer.stats(), hook.stats()
    for key in ("steps", "bytes_values", "bytes_dense", "realised_density"):
        assert math.isclose(theirs[key], ours[key]), key
    # An index message has a frame, and whole words: at most 40 bytes more for each of DDP's two packed buckets.
    assert abs(theirs["bytes_indices"] - ours["bytes_indices"]) <= 8 * 2 * 40 * comm.size
    optimizer.close()


def resuming_equals_not_stopping(comm: rp.comm.Communicator) -> None:
    """With all ranks as roots: whose turn it is goes by bucket, and DDP's first pass has other buckets."""
    policy = replace(rp.IWP(0.05, roots="all", refresh=4), smoothing=0.1, turns=2)
    ddp, hook = wrapped(policy)
    optimizer = sgd(ddp.parameters())
    run(ddp, optimizer, comm.rank, 5)
    saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict(), hook.state_dict()))
    run(ddp, optimizer, comm.rank, 4, start=5)
    again, second = wrapped(policy)
    resumed = sgd(again.parameters())
    for part, state in zip((again.module, resumed, second), saved, strict=True):
        part.load_state_dict(state)
    run(again, resumed, comm.rank, 4, start=5)
    assert second.state_dict()["step"] == 9
    assert torch.allclose(weights(again), weights(ddp), atol=1e-5)
    assert comm.size > 2 or same_bytes(weights(again), weights(ddp))
    hook.load_state_dict({})  # of before the first backward pass: nothing was kept back
    state = hook.state_dict()
    assert state["step"] == 0
    assert not any(tensor.any() for kinds in state["parameters"].values() for tensor in kinds.values())


def a_change_of_what_is_trained_needs_a_new_hook(comm: rp.comm.Communicator) -> None:
    """The error spoke of a checkpoint, and of policies, where there was neither."""
    for frozen_first in (True, False):
        model = make_model()
        model[0].requires_grad_(not frozen_first)
        hook = rp.ddp_hook(rp.IWP(0.05), named_parameters=model.named_parameters())
        for pas in range(2):
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(None, hook)
            says = r"requires_grad of 0\.bias, 0\.weight has changed .* a new ringprune\.ddp_hook"
            with pytest.raises(rp.UsageError, match=says) if pas else nullcontext():
                train(ddp, comm.rank, 2)
            model[0].requires_grad_(frozen_first)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, rp.ddp_hook(rp.IWP(0.05), named_parameters=model.named_parameters()))
        train(ddp, comm.rank, 2)


def a_copy_of_ddp_has_no_hook(comm: rp.comm.Communicator) -> None:
    """AveragedModel(ddp) ended in "cannot pickle 'ProcessGroup' object", and so did saving the whole of it."""
    for ends in (True, False):
        ddp, hook = wrapped(rp.IWP(0.05))
        expected = train(wrapped(rp.IWP(0.05))[0], comm.rank, 6)
        optimizer = sgd(ddp.parameters())
        run(ddp, optimizer, comm.rank, 3)
        averaged = AveragedModel(ddp)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        run(ddp, optimizer, comm.rank, 3, start=3)
        averaged.update_parameters(ddp)
        assert same_bytes(weights(ddp), expected)
        assert hook.stats()["steps"] == 6
        if ends:  # as torch's own hooks do not: it averages all
            train(loaded, comm.rank, 2)
        else:
            again = rp.ddp_hook(rp.IWP(0.05))
            loaded.register_comm_hook(None, again)
            train(loaded, comm.rank, 2)
            assert again.stats()["steps"] == 2
        with pytest.raises(rp.UsageError, match=r"has no hook: register a new ringprune\.ddp_hook"):
            copy.deepcopy(hook)(None, None)


def selection_is_counted_over_all_buckets_that_ddp_makes(comm: rp.comm.Communicator) -> None:
    """The counts began anew where DDP changed its buckets, after the first pass."""
    ddp, hook = wrapped(rp.IWP(0.05, roots="all"))
    train(ddp, comm.rank, 6)
    assert hook.stats()["selection"]["tensors"] == 6 * 2


def other_checkpoints_are_refused(comm: rp.comm.Communicator) -> None:
    ddp, hook = wrapped(rp.IWP(0.05))
    assert hook.state_dict() == {}
    train(ddp, comm.rank, 1)
    saved = hook.state_dict()
    for wrong, says in (
        ({**saved, "size": comm.size + 1}, r"residuals of rank \d of .* leave load_state_dict\(\) out"),  # not: flush()
        ({**saved, "parameters": {}}, "does not fit this model"),
        ({"hook": saved}, "is no state_dict.. of a ringprune.ddp_hook"),
        ([saved], "is no state_dict.. of a ringprune.ddp_hook"),
    ):
        with pytest.raises(rp.CheckpointError, match=says):
            hook.load_state_dict(wrong)
    again, second = wrapped(rp.IWP(0.05))
    if comm.rank == 0:
        second.load_state_dict({**saved, "parameters": {}})
    with pytest.raises(rp.RankMismatchError, match=r"rank 0 could not build .* does not fit this model"):
        train(again, comm.rank, 1)


def without_names_other_buckets_are_refused(comm: rp.comm.Communicator) -> None:
    """Parameters are numbered by DDP's buckets: in others residuals of one went to another of its shape, silently."""

    def unnamed(*, unused: bool) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)), nn.Linear(64, 10))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=unused)
        hook = rp.ddp_hook(rp.IWP(0.05))
        ddp.register_comm_hook(None, hook)
        return ddp, hook

    ddp, hook = unnamed(unused=True)  # else the first pass has one bucket
    train(ddp, comm.rank, 2)
    saved = hook.state_dict()
    assert any(name.endswith("of bucket 1") for name in saved["parameters"])
    same, second = unnamed(unused=True)
    second.load_state_dict(saved)
    train(same, comm.rank, 2)
    other, third = unnamed(unused=False)
    third.load_state_dict(saved)
    with pytest.raises(rp.RankMismatchError, match="does not fit this model"):
        train(other, comm.rank, 1)


def a_bad_gradient_of_one_rank_raises_on_all(comm: rp.comm.Communicator) -> None:
    ddp, _ = wrapped(rp.IWP(0.05))
    train(ddp, comm.rank, 4)
    bad = math.nan if comm.rank == comm.size - 1 else 1.0
    try:
        (loss_of(ddp, next(iter(batches(comm.rank, 1)))) * bad).backward()
    except rp.NonFiniteGradientError as error:
        assert f"rank {comm.size - 1}: the gradient of" in str(error)
    else:
        raise AssertionError("NaN was accepted")


def a_pass_that_was_given_up_needs_a_new_hook(comm: rp.comm.Communicator) -> None:
    """Some ranks had sent more of its messages than others, which met those of the hook's next pass: all hung."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    ddp, hook = wrapped(rp.IWP(0.05, roots="all"))
    train(ddp, comm.rank, 4)
    before, model = copy.deepcopy(hook.state_dict()), ddp.module
    last = model[0].weight.register_hook(fail)  # other buckets have been sent by then
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, next(batches(comm.rank, 1))).backward()
    last.remove()
    del ddp  # its hooks on the parameters go with it
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(rp.UsageError, match=r"new_hook\.load_state_dict\(hook\.state_dict\(\)\)"):
        train(ddp, comm.rank, 1)
    saved = hook.state_dict()
    assert saved["step"] == before["step"]
    for name, kinds in before["parameters"].items():
        assert all(same_bytes(saved["parameters"][name][kind], tensor) for kind, tensor in kinds.items()), name
    del ddp
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    new = rp.ddp_hook(rp.IWP(0.05, roots="all"), named_parameters=model.named_parameters())
    new.load_state_dict(saved)
    ddp.register_comm_hook(None, new)
    train(ddp, comm.rank, 4)
    assert new.state_dict()["step"] == before["step"] + 4


class LastFirst(nn.Module):
    """What runs last is registered first, so that a fresh DDP's first bucket is what a steady one's last is."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x.bfloat16()).float())
        assert isinstance(out, Tensor)
        return out


def a_pass_that_was_given_up_is_remembered_whatever_comes_next(comm: rp.comm.Communicator) -> None:
    """Buckets of other parameters read as one more of the same pass: the hook was refused once, then never again."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    def ddp_of(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
        ddp.register_comm_hook(None, hook)
        return ddp

    model, x = LastFirst(), torch.ones(2, 64)
    hook = rp.ddp_hook(rp.IWP(0.05, roots="all"), named_parameters=model.named_parameters())
    ddp = ddp_of(model)
    for _ in range(4):
        ddp(x).sum().backward()
    failing = model.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        ddp(x).sum().backward()
    failing.remove()
    for _ in range(2):
        del ddp
        ddp = ddp_of(model)
        with pytest.raises(rp.UsageError, match="an error has ended a backward pass"):
            ddp(x).sum().backward()


def an_overflow_skips_the_step_on_all_ranks(comm: rp.comm.Communicator) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, hook = wrapped(rp.IWP(0.05), scaler=scaler)
    optimizer = sgd(ddp.parameters())
    for step, batch in enumerate(batches(comm.rank, 6)):
        before = weights(ddp)
        optimizer.zero_grad()
        factor = math.inf if step == 4 and comm.rank == 0 else 1.0
        (scaler.scale(loss_of(ddp, batch)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same_bytes(before, weights(ddp)) == (step == 4)
    assert scaler.get_scale() == 2.0**9
    assert hook.stats()["skipped_steps"] == 1


def a_norm_over_all_gradients(comm: rp.comm.Communicator) -> None:
    policy = rp.IWP(0.05, roots="all", correction="global", clip_norm=0.1)
    model = make_model()
    optimizer = wrap(model, comm, policy)
    run(model, optimizer, comm.rank, 5)
    assert torch.allclose(train(wrapped(policy)[0], comm.rank, 5), weights(model), atol=1e-5)
    optimizer.close()


def ranks_that_differ(comm: rp.comm.Communicator) -> None:
    ddp, _ = wrapped(rp.IWP(0.05), seed=comm.rank)
    try:
        train(ddp, comm.rank, 1)
    except rp.RankMismatchError as error:
        assert "seed=1" in str(error)
    else:
        raise AssertionError("different seeds were accepted")


def other_layouts_of_memory(comm: rp.comm.Communicator) -> None:
    """Channels-last gradients lie in another order than their weights are counted."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(16, 32, 3).to(memory_format=layout)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, rp.ddp_hook(rp.IWP(0.05)))
        optimizer = sgd(ddp.parameters())
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            ddp(torch.randn(2, 16, 5, 5, generator=generator)).square().mean().backward()
            optimizer.step()
        results.append(model.weight.detach().contiguous())
    assert torch.allclose(*results, atol=1e-4)


class Heads(nn.Module):
    """Two heads, of which a pass uses one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 64, bias=False, dtype=kind) for kind in (torch.float32, dtype)])

    def forward(self, x: Tensor, *used: int) -> Tensor:
        total = sum(self.heads[i](x.to(self.heads[i].weight.dtype)).float().sum() for i in used)
        assert isinstance(total, Tensor)
        return total


def what_was_kept_of_heads_that_nobody_uses_comes_too(comm: rp.comm.Communicator) -> None:
    """DDP leaves ``.grad`` alone where no rank used a parameter: a third of such gradients was lost without a word."""
    for to_none in (True, False):
        torch.manual_seed(0)
        model = Heads()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        hook = rp.ddp_hook(rp.IWP(0.1, roots="all", min_numel=1), named_parameters=model.named_parameters())
        ddp.register_comm_hook(None, hook)
        draw = torch.Generator().manual_seed(comm.rank)
        given, got = torch.zeros(64, dtype=torch.float64), torch.zeros(64, 64, dtype=torch.float64)
        for step in range(12):
            x = torch.randn(8, 64, generator=draw)
            head = 0 if step < 6 else 1
            model.zero_grad(set_to_none=to_none)
            ddp(x, head).backward()
            given += x.sum(0) * (head == 0)
            if model.heads[0].weight.grad is not None:
                got += model.heads[0].weight.grad
        kept = hook.state_dict()["parameters"]["heads.0.weight"]["residual"].double()
        mine = given.expand(64, 64) - kept.view(64, 64)
        mean = comm.allreduce(mine.contiguous(), name="given").wait() / comm.size
        # Twelve sums of float32, each of entries of at most 64.
        assert torch.allclose(got, mean, atol=12 * 64 * 2**-23), float((got - mean).abs().max())


def what_ddp_does_not_tell_is_refused(comm: rp.comm.Communicator) -> None:
    """Several buckets, none of them the last: the hook waited for that, and DDP for the hook, for ever."""
    mixed = DistributedDataParallel(Heads(torch.bfloat16), static_graph=True)
    mixed.register_comm_hook(None, rp.ddp_hook(rp.Dense()))
    with pytest.raises(rp.UsageError, match=r"without telling which is the last.*static_graph"):
        mixed(torch.randn(4, 64), 0, 1).backward()


def parameters_that_cannot_be_exchanged_are_refused_by_name(comm: rp.comm.Communicator) -> None:
    for layer, inputs, message in (
        (nn.Embedding(100, 8, sparse=True), torch.arange(4), r"'weight' is sparse.*leave sparse=True out"),
        (nn.Linear(8, 8, bias=False, dtype=torch.complex64), torch.ones(1, 8, dtype=torch.complex64), "'weight' compl"),
    ):
        ddp = DistributedDataParallel(layer)
        ddp.register_comm_hook(None, rp.ddp_hook(rp.Dense(), named_parameters=layer.named_parameters()))
        with pytest.raises(rp.ConfigurationError, match=message):
            ddp(inputs).abs().sum().backward()


def averages_beyond_float16_are_refused(comm: rp.comm.Communicator) -> None:
    """Infinity reached the weights, where the wrapper raises."""
    model = nn.Linear(64, 64, bias=False).half()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, rp.ddp_hook(rp.IWP(0.01, min_numel=1), named_parameters=model.named_parameters()))
    with pytest.raises(rp.NonFiniteGradientError, match=r"'weight' is beyond float16.*kept back has added up"):
        for _ in range(60):
            model.zero_grad()
            (ddp(torch.ones(1, 64, dtype=torch.half)).float() * 3000).sum().backward()


def wrappers_that_are_closed_give_their_groups_back(comm: rp.comm.Communicator) -> None:
    """Each left a process group behind, of five open files and three threads."""

    def wrap_and_close() -> int:
        model = make_model()
        optimizer = rp.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), comm="torch")
        run(model, optimizer, comm.rank, 1)
        optimizer.close()
        return len(os.listdir("/proc/self/fd"))

    if sys.platform == "linux":
        first = wrap_and_close()
        assert max(wrap_and_close() for _ in range(10)) < first + 10


def parts_of_a_backward_pass_are_no_passes(comm: rp.comm.Communicator) -> None:
    """Reentrant checkpointing, and a second backward() on what one forward pass has made, end several times."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_model(), make_model(1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return checkpoint(self.first, x, use_reentrant=True), self.second(x)

    expected = Both()
    ddp = DistributedDataParallel(Both(), bucket_cap_mb=0.005)
    ddp.register_comm_hook(None, rp.ddp_hook(rp.Dense()))
    for _ in range(4):
        x = torch.ones(4, 64, requires_grad=True)
        for model in (expected, ddp):
            model.zero_grad()
            one, other = model(x)
            other.square().sum().backward()
            one.square().sum().backward()
    for a, b in zip(expected.parameters(), ddp.module.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-5)


def ranks_that_run_out_of_batches_join(comm: rp.comm.Communicator) -> None:
    """join() hands over zeros outside of a backward pass, where nothing can be put off until its end."""
    rest: list[Tensor] = []
    for policy in (None, rp.Dense(), rp.IWP(0.05)):
        ddp, hook = (DistributedDataParallel(make_model()), None) if policy is None else wrapped(policy)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with ddp.join():
            for batch in batches(comm.rank, 3 if comm.rank == 0 else 6):
                optimizer.zero_grad()
                loss_of(ddp, batch).backward()
                optimizer.step()
        rest.append(weights(ddp))  # those of the last rank that had batches: DDP hands them to all
        assert hook is None or hook.stats()["steps"] == 6, "a rank without batches goes on exchanging"
    assert torch.allclose(rest[0], rest[1], atol=1e-5)
    assert comm.size > 2 or same_bytes(rest[0], rest[1])
    assert not torch.allclose(rest[0], rest[2], atol=1e-5)


def ranks_that_joined_before_the_buckets_changed_go_on(comm: rp.comm.Communicator) -> None:
    """Their weights have stayed behind, as join() means it: the check of a start told that ranks had other weights."""
    for static, first in ((False, 0), (True, 1)):  # how many batches rank 0 has
        rest = []
        for policy in (None, rp.Dense(), rp.IWP(0.05)):
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.005, static_graph=static)
            if policy is not None:
                ddp.register_comm_hook(None, rp.ddp_hook(policy))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            with ddp.join():
                for batch in batches(comm.rank, first if comm.rank == 0 else 4):
                    optimizer.zero_grad()
                    loss_of(ddp, batch).backward()
                    optimizer.step()
            rest.append(weights(ddp))
        assert torch.allclose(rest[0], rest[1], atol=1e-5)
        assert comm.size > 2 or same_bytes(rest[0], rest[1])


def passes_in_no_sync_are_exchanged_with_the_next(comm: rp.comm.Communicator) -> None:
    """What ranks have added up on their own comes with the first pass outside, to the bit as DDP has it."""
    for unused in (False, True):
        found = []
        for hooked in (False, True):
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.005, find_unused_parameters=unused)
            if hooked:
                ddp.register_comm_hook(None, rp.ddp_hook(rp.Dense()))
            for number, batch in enumerate(batches(comm.rank, 9)):
                with ddp.no_sync() if number % 3 != 2 else nullcontext():
                    loss_of(ddp, batch).backward()
                if number % 3 == 2:
                    found.append(torch.cat([param.grad.flatten() for param in ddp.parameters()]))
                    ddp.zero_grad()
        if comm.size == 2:  # with more, sums of another order
            assert all(same_bytes(plain, ours) for plain, ours in zip(found[:3], found[3:], strict=True))


class Heard(logging.Handler):
    """What ringprune has warned of."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def a_pass_that_nobody_steps_on_is_told(comm: rp.comm.Communicator) -> None:
    """A generator's loss left its gradients, of the other sign, in the discriminator's residual, in silence."""
    heard = Heard()
    logging.getLogger("ringprune").addHandler(heard)
    for policy, thrown_away in ((rp.IWP(0.05), False), (rp.Dense(), True), (rp.IWP(0.05), True)):
        ddp, _ = wrapped(policy)
        with ddp.join():
            train(ddp, comm.rank, 3 if comm.rank else 2)
        optimizer = sgd(ddp.parameters())
        for batch in batches(comm.rank, 4):
            optimizer.zero_grad()
            if thrown_away:
                loss_of(ddp, batch).backward()
                optimizer.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, batch).backward()
            loss_of(ddp, batch).backward()
            optimizer.step()
        told = [text for text in heard.said if "no optimizer stepped" in text]
        assert len(told) == (thrown_away and policy.name == "iwp" and comm.rank == 0), (policy.name, told)
    logging.getLogger("ringprune").removeHandler(heard)


def an_optimizer_that_takes_harm_is_warned_of(comm: rp.comm.Communicator) -> None:
    """AdamW under the hook lost points of accuracy, in silence: the wrapper warns, which is given its optimizer."""
    heard = Heard()
    logging.getLogger("ringprune").addHandler(heard)
    before = len(_global_optimizer_pre_hooks)
    for kind, policy, warned in (
        (torch.optim.AdamW, rp.IWP(0.05), True),
        (torch.optim.AdamW, rp.IWP(1.0), False),
        (torch.optim.AdamW, rp.Dense(), False),
        (torch.optim.SGD, rp.IWP(0.05), False),
    ):
        heard.said.clear()
        ddp, _ = wrapped(policy)
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # somebody else's
        run(ddp, kind(ddp.parameters(), lr=0.001), comm.rank, 3)
        told = [text for text in heard.said if "kept back" in text]
        assert len(told) == (warned and comm.rank == 0), (kind, policy.name, told)
        assert not told or ("AdamW" in told[0] and 'policy="iwp"' in told[0]), told
        assert len(_global_optimizer_pre_hooks) == before, "looked once"
    logging.getLogger("ringprune").removeHandler(heard)


def a_loop_that_is_compiled_as_a_whole(comm: rp.comm.Communicator) -> None:
    """torch.compile went into the hook, and failed on what is coded there."""
    rest = []
    for compiled in (False, True):
        ddp = DistributedDataParallel(make_model())  # buckets below 1 MiB are refused by torch.compile
        ddp.register_comm_hook(None, rp.ddp_hook(rp.IWP(0.05, roots="all")))
        optimizer = sgd(ddp.parameters())

        def step(batch: tuple[Tensor, Tensor], ddp: nn.Module = ddp, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()

        one = torch.compile(step, backend="eager") if compiled else step
        for batch in batches(comm.rank, 4):
            one(batch)
        rest.append(weights(ddp))
    assert torch.allclose(*rest, atol=1e-5)


CHECKS = (
    dense_is_plain_ddp,
    other_ranks_than_the_hook_s_are_refused,
    ranks_that_run_out_of_batches_join,
    ranks_that_joined_before_the_buckets_changed_go_on,
    passes_in_no_sync_are_exchanged_with_the_next,
    a_static_graph_changes_its_buckets_late,
    a_policy_is_what_the_wrapper_makes_of_it,
    resuming_equals_not_stopping,
    a_change_of_what_is_trained_needs_a_new_hook,
    a_copy_of_ddp_has_no_hook,
    selection_is_counted_over_all_buckets_that_ddp_makes,
    other_checkpoints_are_refused,
    without_names_other_buckets_are_refused,
    a_bad_gradient_of_one_rank_raises_on_all,
    a_pass_that_was_given_up_needs_a_new_hook,
    a_pass_that_was_given_up_is_remembered_whatever_comes_next,
    an_overflow_skips_the_step_on_all_ranks,
    a_norm_over_all_gradients,
    ranks_that_differ,
    other_layouts_of_memory,
    what_was_kept_of_heads_that_nobody_uses_comes_too,
    what_ddp_does_not_tell_is_refused,
    parts_of_a_backward_pass_are_no_passes,
    parameters_that_cannot_be_exchanged_are_refused_by_name,
    averages_beyond_float16_are_refused,
    wrappers_that_are_closed_give_their_groups_back,
    a_pass_that_nobody_steps_on_is_told,
    an_optimizer_that_takes_harm_is_warned_of,
    a_loop_that_is_compiled_as_a_whole,
)

if __name__ == "__main__":
    comm = start("torch")
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            check_together("torch", check.__name__, partial(check, comm))
    if comm.rank == 0:
        print(f"{len(CHECKS)} checks of the hook passed on {comm.size} ranks")
