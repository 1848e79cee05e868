"""Bugs of checkpoints, scalers and copies that were found, each with its story."""

import copy
import pickle
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune import wire
from tests.training import batches, loss_of, make_model, run, same_bytes, sgd, weights, wrap


@pytest.mark.parametrize("flushed", [False, True])
def test_a_rank_that_another_speaks_for_resumes_with_momentum(flushed: bool) -> None:
    """Without weight decay such a rank keeps nothing of a parameter, and looked for its momentum there: KeyError."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1), hierarchical=True)
        run(model, optimizer, comm.rank, 3)
        if flushed:
            optimizer.flush()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        run(model, optimizer, comm.rank, 3, start=3)
        again = make_model()
        resumed = wrap(again, comm.duplicate(), rp.IWP(0.1), hierarchical=True)
        for part, state in zip((again, resumed), saved, strict=True):
            part.load_state_dict(state)
        run(again, resumed, comm.rank, 3, start=3)
        assert same_bytes(weights(again), weights(model))

    rp.simulate(4, rank, ranks_per_node=2)


@pytest.mark.parametrize("policy", [rp.Dense(), rp.P3()], ids=["dense", "p3"])
def test_where_nothing_is_kept_any_ranks_checkpoint_serves_all(policy: rp.Policy) -> None:
    """Horovod's habit, rank 0 saves and all load, was refused for residuals that there were none of."""

    def rank(comm: rp.comm.Communicator, steps: int = 3, start: int = 0, saved: Any = None) -> Any:
        model = make_model()
        optimizer = rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch takes the tensors over
        run(model, optimizer, 0, steps, start=start)  # the same batches on all ranks, however many
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.close()
        return weights(model), state

    saved = rp.simulate(2, rank)[0][1]
    resumed = [rp.simulate(size, partial(rank, start=3, saved=saved)) for size in (2, 4)]
    expected, _ = rp.simulate(2, partial(rank, steps=6))[0]
    for one, _ in (pair for pairs in resumed for pair in pairs):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)  # 3 x may be rounded on the way to 4 x


@pytest.mark.parametrize("without", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize("policy", [rp.IWP(0.1), rp.IWP(0.1, local_steps=2)], ids=["gradients", "local steps"])
def test_a_rank_without_a_batch_keeps_up_under_a_scaler(policy: rp.Policy, without: int) -> None:
    """GradScaler.update() insists on having looked at a gradient, step() on a loss; they raised on that rank alone."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, float]:
        model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = wrap(model, comm, policy, scaler=scaler)
        for step, batch in enumerate(batches(comm.rank, 4)):
            optimizer.zero_grad()
            if step != without or comm.rank == 0:
                scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.stats()["skipped_steps"] == 0
        return weights(model), scaler.get_scale()

    (one, scale), (other, other_scale) = rp.simulate(2, rank)
    assert same_bytes(one, other) and scale == other_scale == 64.0


def test_what_adds_up_beyond_float16_is_told_on_all_ranks() -> None:
    """Every gradient was finite, so nobody looked: the sum of a hundred of them made the weight infinite."""

    def rank(comm: rp.comm.Communicator) -> None:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1e-6), [("weight", weight)], policy=rp.IWP(0.01), comm=comm
        )
        with pytest.raises(rp.NonFiniteGradientError, match=r"'weight' is beyond float16 in \d+ of 4096 entries"):
            for _ in range(200):
                optimizer.zero_grad()
                (weight * 700).sum().backward()
                optimizer.step()
        assert optimizer.stats()["steps"] > 50
        assert bool(torch.isfinite(weight).all())

    rp.simulate(2, rank)


@pytest.mark.parametrize("flushed", [False, True])
def test_look_ahead_resumes_to_the_bit_where_nothing_was_left_over(flushed: bool) -> None:
    """A bucket that no step had used yet was chosen by its gradient after a resume, and by its residual without."""
    later = 3  # the step from which on the second tensor is used

    def start(comm: Any) -> tuple[nn.ParameterList, rp.DistributedOptimizer]:
        params = nn.ParameterList([torch.arange(1.0, 101.0).view(10, 10) for _ in range(2)])
        policy = rp.IWP(0.1, min_numel=1, lookahead=True)
        optimizer = torch.optim.SGD(params.parameters(), lr=0.1)
        named = list(params.named_parameters())
        return params, rp.DistributedOptimizer(optimizer, named, policy=policy, comm=comm, bucket_bytes=400)

    def go_on(params: nn.ParameterList, optimizer: rp.DistributedOptimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            used = params if step >= later else [params[0]]
            torch.stack([(p * torch.randn(10, 10, generator=generator)).sum() for p in used]).sum().backward()
            optimizer.step()

    def rank(comm: Any) -> None:
        params, optimizer = start(comm)
        go_on(params, optimizer, 0, later)
        if flushed:
            optimizer.flush()
        saved = copy.deepcopy((params.state_dict(), optimizer.state_dict()))
        go_on(params, optimizer, later, 8)
        again, resumed = start(comm.duplicate())
        for part, state in zip((again, resumed), saved, strict=True):
            part.load_state_dict(state)
        go_on(again, resumed, later, 8)
        for one, other in zip(params, again, strict=True):
            assert same_bytes(one, other)
        for each in (optimizer, resumed):
            each.close()

    rp.simulate(2, rank)


def test_look_ahead_resumes_within_the_first_interval_after_a_flush() -> None:
    """A step had been made since, but no exchange: the resumed one chose by a residual of zeros, and sent nothing."""

    def start(comm: Any) -> tuple[nn.Module, rp.DistributedOptimizer]:
        model = make_model()
        return model, wrap(model, comm, rp.IWP(0.1, roots="all", lookahead=True, local_steps=2))

    def rank(comm: Any) -> None:
        model, optimizer = start(comm)
        run(model, optimizer, comm.rank, 2)
        optimizer.flush()
        run(model, optimizer, comm.rank, 1, start=2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        run(model, optimizer, comm.rank, 1, start=3)
        again, resumed = start(comm.duplicate())
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        run(again, resumed, comm.rank, 1, start=3)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert same_bytes(one, other)
        for each in (optimizer, resumed):
            each.close()

    rp.simulate(2, rank)


@pytest.mark.parametrize(
    ("bad", "error"), [("gradient", rp.NonFiniteGradientError), ("step", rp.UsageError)], ids=["gradient", "step"]
)
def test_what_a_rank_has_to_tell_is_in_its_checkpoint(bad: str, error: type[Exception]) -> None:
    """A NaN, or a failed step, was told at the end of the interval, but not where the run was resumed in between."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    def rank(comm: Any) -> None:
        model, again = make_model(), make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=3))
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1 and bad == "step":
                patch.setattr(optimizer._inner, "step", fails)
            elif comm.rank == 1:
                next(model.parameters()).grad.fill_(torch.nan)
            optimizer.step()
        resumed = wrap(again, comm.duplicate(), rp.Dense(local_steps=3))
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, wrapper in ((model, optimizer), (again, resumed)):
            with pytest.raises(error, match="rank 1"):
                run(each, wrapper, comm.rank, 2, start=1)
            wrapper.close()

    rp.simulate(2, rank)


def test_tables_alone_can_be_flushed_with_local_steps() -> None:
    """There was nothing to subtract from nothing, which torch refuses."""

    def rank(comm: rp.comm.Communicator) -> None:
        table = rp.ShardedEmbedding(20, 4, comm=comm.duplicate())
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), comm=comm, policy=rp.Dense(local_steps=2)
        )
        table(torch.tensor([comm.rank, 5])).sum().backward()
        optimizer.step()
        optimizer.flush()

    rp.simulate(2, rank)


def test_a_checkpoint_loaded_into_the_plain_optimizer_does_not_part_the_wrapper_from_it() -> None:
    """Loading makes new param groups: a scheduler on the wrapper went on with the old ones, to no effect."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        plain = sgd(model.parameters())
        optimizer = rp.DistributedOptimizer(plain, model.named_parameters(), policy="dense", comm=comm)
        run(model, optimizer, comm.rank, 1)
        plain.load_state_dict(copy.deepcopy(plain.state_dict()))
        run(model, optimizer, comm.rank, 1, start=1)
        assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state

    rp.simulate(2, rank)


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_a_wrapper_is_neither_copied_nor_pickled(make: Any) -> None:
    """The copy had neither hooks nor communicator, and said so at its first use, as an AttributeError."""

    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.UsageError, match=r"save its state_dict\(\)"):
            make(wrap(make_model(), comm, "dense"))

    rp.simulate(1, rank)


def test_checkpoint_hooks_that_the_wrapper_was_given_run() -> None:
    """They were kept on the wrapper, whose state is made by the wrapped optimizer: no checkpoint ever met them."""

    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, rp.Dense())
        seen: list[str] = []

        def saving(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "epoch": 7}

        def loading(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            seen.append(f"epoch {state['epoch']}")

        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_state_dict_post_hook(saving)
        optimizer.register_load_state_dict_pre_hook(loading)
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["save", "epoch 7", "loaded"]

    rp.simulate(2, rank)


@pytest.mark.parametrize("statistics", [False, True])
def test_a_rank_that_does_not_load_in_the_first_interval_is_found(statistics: bool) -> None:
    """Its weights and its number of exchanges are the same, and at the end of the interval the others waited for it."""

    def model_of() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64) if statistics else nn.Tanh(), nn.Linear(64, 10))
        for param in model.parameters():
            param.data.fill_(0.01)
        return model

    def wrapped(model: nn.Module, comm: rp.comm.Communicator) -> rp.DistributedOptimizer:
        policy = rp.IWP(0.1, local_steps=4)
        return rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )

    def rank(comm: rp.comm.Communicator) -> None:
        model, again = model_of(), model_of()
        optimizer = wrapped(model, comm)
        run(model, optimizer, comm.rank, 2)
        resumed = wrapped(again, comm.duplicate())
        if comm.rank == 1:
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(rp.RankMismatchError, match="rank 0 continues at step 0, rank 1 in the first interval"):
            run(again, resumed, comm.rank, 4)

    rp.simulate(2, rank)


def test_ranks_that_stopped_at_other_steps_of_one_interval_go_on() -> None:
    """Nothing makes them wait for each other there: a signal may find one a step ahead."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model, again = make_model(), make_model(seed=7)
        optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=4))
        run(model, optimizer, comm.rank, 5 + comm.rank)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        run(model, optimizer, comm.rank, 3 - comm.rank, start=5 + comm.rank)
        resumed = wrap(again, comm.duplicate(), rp.IWP(0.1, local_steps=4))
        for part, state in zip((again, resumed), saved, strict=True):
            part.load_state_dict(state)
        run(again, resumed, comm.rank, 3 - comm.rank, start=5 + comm.rank)
        return weights(model), weights(again)

    (first, second), (third, fourth) = rp.simulate(2, rank)
    assert same_bytes(first, second)
    assert same_bytes(third, fourth)
    assert same_bytes(first, third)


def test_a_step_that_is_made_and_then_refused_ends_a_flush() -> None:
    """Averages beyond float16 are found after the exchange: what it kept back was taken for flushed."""

    def rank(comm: rp.comm.Communicator) -> list[bool]:
        model = nn.Linear(64, 64, bias=False).half()
        model.weight.data.fill_(0.01)
        optimizer = wrap(model, comm, rp.IWP(0.05), op="sum")
        told = []
        for value in (1.0, 6e4):
            optimizer.zero_grad()
            (model.weight * torch.linspace(0.5, 1, 4096).view(64, 64).half() * value).sum().backward()
            with pytest.raises(rp.NonFiniteGradientError) if value > 1 else nullcontext():
                optimizer.step()
            if value == 1:
                optimizer.flush()
            told.append(optimizer.state_dict()["ringprune"]["flushed"])
        return told

    assert rp.simulate(2, rank) == [[True, False]] * 2


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_look_ahead_resumes_from_a_flush_that_a_step_nobody_made_came_after(nonfinite: str) -> None:
    """The checkpoint said that something might be held back: the first set was then chosen by a residual of zeros."""
    policy = rp.IWP(0.05, lookahead=True)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy, nonfinite=nonfinite)
        run(model, optimizer, comm.rank, 2)
        optimizer.flush()
        with suppress(rp.NonFiniteGradientError):
            optimizer.zero_grad()
            (loss_of(model, next(batches(comm.rank, 1))) * float("nan")).backward()
            optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        run(model, optimizer, comm.rank, 2, start=2)
        again = make_model(seed=7)
        resumed = wrap(again, comm.duplicate(), policy, nonfinite=nonfinite)
        for part, state in zip((again, resumed), saved, strict=True):
            part.load_state_dict(state)
        run(again, resumed, comm.rank, 2, start=2)
        assert same_bytes(weights(again), weights(model))

    rp.simulate(2, rank)


def test_rows_alone_load_on_any_rank() -> None:
    """How much the ranks' rows had overlapped is the same on all, and was taken for something that is kept back."""

    def model_of() -> nn.Module:
        model = nn.Sequential(nn.Embedding(64, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1))
        for param in model.parameters():
            param.data.fill_(0.01)
        return model

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = model_of()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            policy=rp.Parallax(),
            comm=comm,
            model=model,
        )
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved[0]))
        optimizer.zero_grad()
        model(torch.tensor([[comm.rank, 5], [7, 8]])).sum().backward()
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict())

    saved: list[dict[str, Any]] = []
    saved = rp.simulate(4, rank)
    rp.simulate(2, rank)


@pytest.mark.parametrize(
    "policy", [rp.IWP(0.1, local_steps=1), rp.MIPD(density=0.1, local_steps=1)], ids=["iwp", "mipd"]
)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_checkpoint_mends_an_exchange_of_which_a_message_was_damaged(
    hierarchical: bool, policy: rp.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, the exchange raised the old error at each of its steps again, for ever."""
    decode, bad = wire.IndexCode.decode, {"now": False}

    def damaged(code: Any, message: Tensor, *, name: str) -> Tensor:
        if bad["now"]:
            raise rp.CommunicatorError(f"{name}: it is damaged")
        return decode(code, message, name=name)

    monkeypatch.setattr(wire.IndexCode, "decode", damaged)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy, bucket_bytes=13_000, hierarchical=hierarchical)
        run(model, optimizer, comm.rank, 4)
        saved = copy.deepcopy(optimizer.state_dict())
        run(model, optimizer, comm.rank, 3, 4)
        wanted = weights(model)
        comm.barrier(name="from here on messages arrive damaged")
        bad["now"] = True
        with pytest.raises(rp.CommunicatorError):
            run(model, optimizer, comm.rank, 1, 7)
        comm.barrier(name="no longer")
        bad["now"] = False
        optimizer.load_state_dict(saved)
        run(model, optimizer, comm.rank, 3, 4)
        assert same_bytes(weights(model), wanted)

    rp.simulate(4, rank, ranks_per_node=2, timeout=30)
