"""Shared momentum: after an exchange it is the speed at which the ranks have moved on average, brought up to date."""

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune.local_steps import way
from ringprune.shared_momentum import SharedMomentum
from tests.training import (
    batches,
    decayed,
    loss_of,
    make_model,
    maximize,
    nesterov,
    plain_sgd,
    run,
    same_bytes,
    sgd,
    weights,
    wrap,
)

EPS = torch.finfo(torch.float32).eps
H, NAME = 3, "0.weight"
RATES = [0.05, 0.01, 0.03, 0.02, 0.04, 0.01, 0.05, 0.02, 0.03, 0.01, 0.02, 0.04]


def sharing(density: float = 0.1, steps: int = H, momentum: Any = "shared") -> rp.Policy:
    return rp.IWP(density, roots="all", local_steps=rp.LocalSteps(steps, momentum=momentum))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9), amsgrad=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def momentum_of(state: Any) -> Tensor:
    momentum: Tensor = state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"]
    return momentum


def speed(momentum: Tensor, optimizer: Any, param: Tensor) -> Tensor:
    """How far a step at rate 1 would move a weight if the gradient kept ``momentum`` as it is; without weight decay."""
    state, group = optimizer.state[param], optimizer.param_groups[0]
    if "momentum_buffer" in state:
        return momentum
    steps, (beta1, beta2) = float(state["step"]), group["betas"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return momentum / (1 - beta1**steps) / (square.sqrt() / math.sqrt(1 - beta2**steps) + group["eps"])


@pytest.mark.parametrize("make", [sgd, nesterov, maximize, adam, adamw])
@pytest.mark.parametrize(("size", "kind"), [(1, "shared"), (3, "shared"), (3, "mean")])
def test_momentum_is_the_speed_of_the_shared_weights_where_they_moved_and_the_rank_s_own_elsewhere(
    make: Any, size: int, kind: str
) -> None:
    """And, if shared, two thirds, of three steps, of what the rank's own has changed by since its interval's mean.

    T is the sum of the learning rates since an entry was last exchanged, entry by entry.
    """

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, sharing(momentum=kind), make)
        param = model.get_parameter(NAME)
        elapsed, before, seen = torch.zeros_like(param), param.detach().clone(), set()
        interval = 0.0
        for number, batch in enumerate(batches(comm.rank, len(RATES)), 1):
            for group in optimizer.param_groups:
                group["lr"] = RATES[number - 1]
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            plain = _after_a_plain_step(make, optimizer, param) if number % H == 0 else None
            optimizer.step()
            elapsed += RATES[number - 1]
            interval += RATES[number - 1]
            if plain is None:
                continue
            own, place = plain
            moved = before - param.detach()
            arrived = moved != 0
            held = momentum_of(optimizer.state[param])
            after, alone = speed(held, optimizer, param), speed(own, optimizer, param)
            decayed = before * (optimizer.param_groups[0]["weight_decay"] if make is adamw else 0.0)
            keep = 2 / H if kind == "shared" else 0.0
            expected = moved / elapsed - decayed + keep * (alone - ((before - place) / interval - decayed))
            # A movement is known to within the rounding of the weights it is the difference of, and of the exchange.
            slack = (size + 12) * EPS * before.abs().max() / elapsed.clamp(max=interval)
            slack += 64 * EPS * torch.maximum(after.abs().max(), alone.abs().max())
            assert ((after - expected).abs() <= slack)[arrived].all()
            assert same_bytes(held[~arrived], own[~arrived])
            assert 0 < int(arrived.sum()) < param.numel()
            seen.add(len(set(elapsed[arrived].tolist())))
            elapsed[arrived], before, interval = 0.0, param.detach().clone(), 0.0
        assert max(seen) > 1, "entries of several ages were exchanged at once"

    rp.simulate(size, rank)


def _after_a_plain_step(make: Any, optimizer: Any, param: Tensor) -> tuple[Tensor, Tensor]:
    """Momentum and weights after a step of the same optimizer that nobody wraps, from the same state."""
    twin = param.detach().clone().requires_grad_()
    twin.grad = param.grad.clone()
    plain = make([twin])
    plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    state = optimizer.state[param]
    plain.state[twin] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    plain.step()
    return momentum_of(plain.state[twin]), twin.detach()


@pytest.mark.parametrize("make", [sgd, nesterov, maximize, decayed, adam, adamw])
@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_that_move_alike_train_as_if_nothing_were_exchanged(make: Any, steps: int) -> None:
    """Their momentum was set to the speed of the interval's middle: late by half of it, and by Adam's last square.

    Of a movement what is not known is a rounding of the weights, P + 4 of them; over the learning rate it shifts the
    momentum, and with it all later weights, by up to 1 / (1 - 0.9) times as much, at each exchange.
    """
    exchanges = 4

    def trained(policy: rp.Policy) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            run(model, wrap(model, comm, policy, make), 0, exchanges * steps)  # all ranks have the data of rank 0
            return weights(model)

        return rp.simulate(2, rank)[0]

    got, expected = trained(rp.Dense(local_steps=rp.LocalSteps(steps, momentum="shared"))), trained(rp.Dense())
    bound = 10 * exchanges * steps * (2 + 4) * EPS * expected.abs().max()
    assert (got - expected).abs().max() <= bound


@pytest.mark.parametrize("make", [sgd, decayed, maximize])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_local_step_of_everything_is_sgd_with_momentum_on_the_average_gradient(size: int, make: Any) -> None:
    """Then X / T is the average velocity.

    Of each step's movement, what is not known is a rounding of the weights, P + 4 of them; momentum m makes it up to
    1 / (1 - m) times as large in the end, and the gradient's change with it at most twice that.
    """
    steps, m = 24, 0.9

    def trained(policy: rp.Policy) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            run(model, wrap(model, comm, policy, make), comm.rank, steps)
            return weights(model)

        return rp.simulate(size, rank)[0]

    got, expected = trained(sharing(1.0, steps=1)), trained(rp.Dense())
    bound = 2 * steps * (size + 4) * EPS * expected.abs().max() / (1 - m)
    assert (got - expected).abs().max() <= bound


def scalar(comm: rp.comm.Communicator, policy: rp.Policy, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    """One weight, SGD with rate 0.1 and momentum 0.9."""
    weight = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    return weight, rp.DistributedOptimizer(inner, [("weight", weight)], policy=policy, comm=comm, **options)


def step_on(weight: torch.nn.Parameter, optimizer: Any, gradient: float) -> None:
    optimizer.zero_grad()
    (weight * gradient).sum().backward()
    optimizer.step()


def test_a_step_that_one_rank_skips_does_not_slow_that_rank_down() -> None:
    """Time has gone by for all of them, and all ranks' speed is counted in it; the rank's own in the steps it made."""

    def rank(comm: rp.comm.Communicator) -> float:
        policy = rp.Dense(local_steps=rp.LocalSteps(4, momentum="shared"))
        weight, optimizer = scalar(comm, policy, nonfinite="skip")
        for number in range(4):
            step_on(weight, optimizer, math.nan if comm.rank == 0 and number else 1.0)
        return float(optimizer.state[weight]["momentum_buffer"])

    # By hand: 7 ranks move by 0.1 (1 + 1.9 + 2.71 + 3.439), one by 0.1, in four steps at rate 0.1.
    found, way = rp.simulate(8, rank), 1 + 1.9 + 2.71 + 3.439
    all_ranks = (7 * way + 1) / 8 / 4
    expected = [all_ranks + 0.5 * (1 - 1), *[all_ranks + 0.5 * (3.439 - way / 4)] * 7]
    assert found == pytest.approx(expected, rel=64 * EPS)


def test_a_rank_that_makes_no_step_keeps_its_momentum() -> None:
    def rank(comm: rp.comm.Communicator) -> float:
        policy = rp.Dense(local_steps=rp.LocalSteps(2, momentum="shared"))
        weight, optimizer = scalar(comm, policy, nonfinite="skip")
        for number in range(4):
            step_on(weight, optimizer, math.nan if comm.rank == 0 and number >= 2 else 1.0)
        return float(optimizer.state[weight]["momentum_buffer"])

    one, two = rp.simulate(2, rank)
    assert one == pytest.approx(1.9, rel=64 * EPS)
    assert 1.9 < two < 3.439


@pytest.mark.parametrize("kind", ["shared", "mean"])
def test_an_optimizer_whose_hook_drops_gradients_shares_its_momentum_all_the_same(kind: Any) -> None:
    """It was taken for one that had had none, and so had not moved: each rank kept its own."""

    def rank(comm: rp.comm.Communicator, *, dropping: bool) -> float:
        weight, optimizer = scalar(comm, rp.Dense(local_steps=rp.LocalSteps(2, momentum=kind)))
        if dropping:
            optimizer._inner.register_step_post_hook(lambda inner, *arguments: inner.zero_grad())
        for _ in range(4):
            step_on(weight, optimizer, 1.0 + comm.rank)
        return float(optimizer.state[weight]["momentum_buffer"])

    plain, dropped = (rp.simulate(2, lambda comm, d=d: rank(comm, dropping=d)) for d in (False, True))
    assert plain == dropped


def test_steps_of_an_exchange_that_was_refused_do_not_count() -> None:
    def rank(comm: rp.comm.Communicator) -> float:
        weight, optimizer = scalar(comm, rp.Dense(local_steps=rp.LocalSteps(2, momentum="shared")))
        step_on(weight, optimizer, 1.0)
        with pytest.raises(rp.NonFiniteGradientError):
            step_on(weight, optimizer, math.nan)
        optimizer.state.clear()
        for _ in range(2):
            step_on(weight, optimizer, 1.0)
        return float(optimizer.state[weight]["momentum_buffer"])

    assert rp.simulate(2, rank) == pytest.approx([1.9] * 2, rel=64 * EPS)


def test_a_gradient_that_comes_late_sets_out_at_full_speed() -> None:
    """An entry that did not move was exchanged too, where all are sent as they are: its time began anew."""

    def rank(comm: rp.comm.Communicator, policy: Any) -> float:
        weight, optimizer = scalar(comm, policy)
        for number in range(12):
            step_on(weight, optimizer, float(number >= 8))
        return float(weight.detach())

    shared = rp.Dense(local_steps=rp.LocalSteps(1, momentum="shared"))
    got, expected = (rp.simulate(2, lambda comm, p=p: rank(comm, p))[0] for p in (shared, rp.Dense()))
    assert got == pytest.approx(expected, abs=64 * EPS)


def test_sparse_gradients_keep_their_momentum() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        table = torch.nn.Embedding(50, 4, sparse=True, _weight=torch.ones(50, 4))
        inner = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        policy = rp.Dense(local_steps=rp.LocalSteps(2, momentum="shared"))
        optimizer = rp.DistributedOptimizer(inner, table.named_parameters(), policy=policy, comm=comm)
        for number in range(4):
            optimizer.zero_grad()
            table(torch.tensor([comm.rank, number])).sum().backward()
            optimizer.step()
        return table.weight.detach().clone()

    first, second = rp.simulate(2, rank)
    assert same_bytes(first, second)
    assert (first != 1).any()


def test_groups_have_their_own_rates_and_perhaps_no_momentum() -> None:
    def train(comm: rp.comm.Communicator) -> list[Any]:
        quick, slow, bare = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
        groups = [{"params": [quick]}, {"params": [slow], "lr": 0.01}, {"params": [bare], "momentum": 0.0}]
        inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        policy = rp.Dense(local_steps=rp.LocalSteps(2, momentum="shared"))
        optimizer = rp.DistributedOptimizer(inner, policy=policy, comm=comm)
        for _ in range(2):
            optimizer.zero_grad()
            (quick + slow + bare).sum().mul(1.0 + comm.rank).backward()
            optimizer.step()
        return [optimizer.state[param].get("momentum_buffer") for param in (quick, slow, bare)]

    for rank, (quick, slow, bare) in enumerate(rp.simulate(2, train)):
        assert bare is None
        # A movement of 0.01 to 0.6 is known to within some roundings of a weight of 1.
        own, mean = 1.9 * (1 + rank), (1 + 1.9) / 2
        assert float(quick) == pytest.approx(own + 1.5 * mean - (1 + rank) * mean, abs=32 * EPS / 0.1)
        assert float(slow) == pytest.approx(own + 1.5 * mean - (1 + rank) * mean, abs=32 * EPS / 0.01)


@pytest.mark.parametrize("size", [2, 4])
def test_in_a_hierarchy_all_ranks_have_the_momentum_of_what_moved(size: int) -> None:
    """With one step an interval nothing of it is the rank's own, but for what is not known of a movement."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, sharing(1.0, steps=1), hierarchical=True)
        run(model, optimizer, comm.rank, 2 * H)
        held = torch.cat([optimizer.state[param]["momentum_buffer"].flatten() for param in model.parameters()])
        return held * optimizer.param_groups[0]["lr"] / weights(model).abs().max()

    first, *others = rp.simulate(size, rank, ranks_per_node=2)
    assert all((first - other).abs().max() <= (size + 4) * EPS / (1 - 0.9) for other in others)
    assert first.abs().max() > 1000 * EPS


@pytest.mark.parametrize(
    "make", [lambda steps: rp.MIPD(0.05, local_steps=steps), lambda s: rp.ScaleCom(0.05, local_steps=s)]
)
def test_policies_that_do_not_exchange_all_that_moved_are_refused(make: Any) -> None:
    with pytest.raises(rp.ConfigurationError, match=r"shared.*smoothing"):
        make(rp.LocalSteps(H, momentum="shared"))


@pytest.mark.parametrize(
    "make", [plain_sgd, lambda params: torch.optim.RMSprop(params, lr=1e-3), lambda p: torch.optim.Adagrad(p, lr=1e-2)]
)
def test_optimizers_without_such_a_momentum_keep_what_they_have(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And the log says so."""

    def trained(momentum: Any) -> list[Tensor]:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=rp.LocalSteps(H, momentum=momentum)), make)
            run(model, optimizer, comm.rank, 3 * H)
            assert "elapsed" not in optimizer.state_dict()["ringprune"]["parameters"][NAME]
            return weights(model)

        return rp.simulate(2, rank)

    assert all(same_bytes(a, b) for a, b in zip(trained("own"), trained("shared"), strict=True))
    assert sum("changes nothing" in record.message for record in caplog.records) == 1


def test_a_learning_rate_of_zero_leaves_momentum_finite() -> None:
    """An interval without learning rate has no speed."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, sharing(1.0))
        run(model, optimizer, comm.rank, H)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        run(model, optimizer, comm.rank, H, start=H)
        held = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
        assert all(torch.isfinite(tensor).all() for tensor in held)

    rp.simulate(2, rank)


def test_after_a_flush_speeds_are_of_what_follows() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, sharing())
        run(model, optimizer, comm.rank, 2 * H + 1)
        optimizer.flush()
        state = optimizer.state_dict()["ringprune"]["parameters"]
        assert not any(entry["elapsed"].any() or entry["interval"] or entry["time"] for entry in state.values())

    rp.simulate(2, rank)


@pytest.mark.parametrize("momentum", ["private", None, 0.9])
def test_whose_momentum_is_one_of_two(momentum: Any) -> None:
    with pytest.raises((rp.ConfigurationError, rp.errors.ArgumentTypeError), match="momentum"):
        rp.LocalSteps(4, momentum=momentum)


def double_momentum(state: dict[str, Any]) -> None:
    state["momentum_buffer"] = state["momentum_buffer"].double()


def turned_square(state: dict[str, Any]) -> None:
    square = state["exp_avg_sq"]
    state["exp_avg_sq"] = square.t().contiguous().t()


@pytest.mark.parametrize(("make", "change"), [(sgd, double_momentum), (adamw, turned_square)])
def test_state_that_the_op_does_not_take_ends_no_exchange(make: Any, change: Any) -> None:
    """It was refused on the one rank that had it, in the middle of an exchange: ranks went on from other weights."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, sharing(), make)
        run(model, optimizer, comm.rank, 2 * H)
        if comm.rank == 1:
            change(optimizer.state[dict(model.named_parameters())[NAME]])
        run(model, optimizer, comm.rank, 2 * H, start=2 * H)
        with optimizer.shared_weights():
            return weights(model)

    assert same_bytes(*rp.simulate(2, rank))


def test_a_learning_rate_that_is_no_number_ends_no_exchange() -> None:
    """The step was left out, for its gradient was none either; its rate then was refused, on that rank alone."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, sharing(1.0), nonfinite="skip")
        run(model, optimizer, comm.rank, H)
        for batch in batches(comm.rank, H):
            optimizer.zero_grad()
            bad = comm.rank == 1 and optimizer.stats()["steps"] + optimizer.stats()["skipped_steps"] == H
            optimizer.param_groups[0]["lr"] = math.nan if bad else 0.1
            (loss_of(model, batch) * (math.nan if bad else 1.0)).backward()
            optimizer.step()
        with optimizer.shared_weights():
            return weights(model)

    assert same_bytes(*rp.simulate(2, rank))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_copies_of_16_bit_parameters_are_few_at_a_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each had set out and had come to lay there in float32 for all of them at once: 8 bytes an entry."""
    copies: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def watched(shared: Tensor, param: Tensor) -> tuple[Tensor, Tensor]:
        pair = way(shared, param)
        copies.extend(map(weakref.ref, pair))
        counts.append(sum(copy() is not None for copy in copies))
        return pair

    def trained(room: int) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            params = [torch.nn.Parameter(torch.full((40,), 1.0 + i, dtype=torch.bfloat16)) for i in range(8)]
            named = [(str(i), param) for i, param in enumerate(params)]
            optimizer = rp.DistributedOptimizer(make(params), named, policy=sharing(1.0), comm=comm)
            for number in range(2 * H):
                optimizer.zero_grad()
                torch.stack(params).float().square().mul(1 + number).sum().backward()
                optimizer.step()
            return torch.stack([momentum_of(optimizer.state[param]).float() for param in params])

        monkeypatch.setattr("ringprune.shared_momentum.ROOM", room)
        copies.clear()
        counts.clear()
        return rp.simulate(1, rank)[0]

    monkeypatch.setattr("ringprune.shared_momentum.way", watched)
    together, most = trained(1 << 24), max(counts)
    assert most == 16
    assert same_bytes(trained(40), together)
    assert max(counts) <= 6


def test_what_is_loaded_into_its_state_is_what_it_goes_on_from() -> None:
    """A parameter's numbers lie in a vector of all; a checkpoint is copied into what the state names."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 1)]
    shares = SharedMomentum(sgd(params), params, [param.detach().clone() for param in params], late=False)
    for i in range(3):
        for place, (kind, tensor) in enumerate(sorted(shares.state(i).items())):
            assert kind == "elapsed" or tensor.shape == (), "as checkpoints have it"
            tensor.fill_(10 * i + place)
    assert [elapsed.unique().tolist() for elapsed in shares.elapsed] == [[0.0], [10.0], [20.0]]
    assert (shares.interval.tolist(), shares.pace.tolist()) == ([1.0, 11.0, 21.0], [2.0, 12.0, 22.0])
    assert shares.time.tolist() == [3.0, 13.0, 23.0]
