"""Bugs in what the wrapped optimizer steps with, and in steps that fail, each with its story."""

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.exchange import exchange
from ringprune.reduction import RingChoice
from ringprune.sharing import OWN
from tests.training import batches, loss_of, make_model, run, same_bytes, sgd, weights, wrap

Settings = dict[str, float]


def moved(settings: list[Settings], policy: rp.Policy | None, stop_at: int | None = None) -> Tensor:
    """A tensor after one step of SGD on ones and then steps of no gradient, each with settings of its own.

    Args:
        settings: of the param group, before each of those steps; the first at construction.
        policy: with which it is wrapped after the first step; None is plain SGD.
        stop_at: where to save, and to go on with what was loaded.
    """

    def start() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        param = nn.Parameter(torch.zeros(64, 64))
        return param, torch.optim.SGD([param], lr=0.1, **settings[0])

    def rank(comm: rp.comm.Communicator) -> Tensor:
        param, inner = start()
        param.grad = torch.ones_like(param)
        inner.step()
        param.grad = None
        optimizer: Any = inner
        if policy is not None:
            optimizer = rp.DistributedOptimizer(inner, [("p", param)], policy=policy, comm=comm)
        for step, group in enumerate(settings):
            if step == stop_at:
                saved, values = optimizer.state_dict(), param.detach().clone()
                param, inner = start()
                with torch.no_grad():
                    param.copy_(values)
                optimizer = rp.DistributedOptimizer(inner, [("p", param)], policy=policy or rp.Dense(), comm=comm)
                optimizer.load_state_dict(saved)
            optimizer.param_groups[0].update(group)
            optimizer.zero_grad()
            (param.sum() * 0).backward()
            optimizer.step()
        return param.detach().clone()

    return rp.simulate(1, rank)[0]


RISING = [{"momentum": 0.5}] + 59 * [{"momentum": 0.99}]
DECAYING = [{"momentum": 0.5, "weight_decay": 1.0 if 36 <= step < 40 else 0.0} for step in range(60)]


@pytest.mark.parametrize("stop_at", [None, 30])
@pytest.mark.parametrize("settings", [RISING, DECAYING], ids=["momentum rises", "decay for a while"])
@pytest.mark.parametrize("policy", [rp.IWP(0.1), rp.IWP(1.0)], ids=["pruned", "whole"])
def test_momentum_from_before_lasts_as_long_as_it_is_there(
    policy: rp.Policy, settings: list[Settings], stop_at: int | None
) -> None:
    """It was dropped after a number of steps that the first momentum said; with a higher one most of it was left."""
    assert torch.allclose(moved(settings, policy, stop_at), moved(settings, None), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("check_every", [0, 1])
@pytest.mark.parametrize(
    "policy", [rp.Dense(), rp.IWP(0.05), rp.IWP(0.05, lookahead=True)], ids=["dense", "iwp", "look-ahead"]
)
def test_a_step_that_fails_on_one_rank_is_told_to_all_at_the_next(policy: rp.Policy, check_every: int) -> None:
    """Where the script went on after the error, ranks had other weights from then on, and nobody knew.

    The rank that failed took no part in what follows a step, and the others waited there for it.
    """

    def rank(comm: rp.comm.Communicator) -> list[str]:
        model, errors = make_model(), []
        inner, made = sgd(model.parameters()), [0]

        def hook(*_: Any) -> None:
            made[0] += 1
            if made[0] == 2 and comm.rank == 1:
                raise OSError("a disk of the user's")

        inner.register_step_pre_hook(hook)
        named, options = model.named_parameters(), {"check_every": check_every, "bucket_bytes": 1}
        optimizer = rp.DistributedOptimizer(inner, named, policy=policy, comm=comm, **options)
        for step, batch in enumerate(batches(comm.rank, 3 if check_every else 4)):
            try:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            except (OSError, rp.RingPruneError) as error:
                errors.append(f"{step} {type(error).__name__} {error}")
        return errors

    first, second = rp.simulate(2, rank)
    if check_every:  # it finds other weights, and all raise that
        assert first[0] == second[0] and first.pop(0).startswith("1 RankMismatchError ")
    else:
        assert second[0] == "1 OSError a disk of the user's"
    assert first == second[1:] and len(first) == 1
    assert first[0].startswith("2 UsageError ") and "rank 1: OSError in step() of the wrapped optimizer" in first[0]
    assert "go back to a checkpoint" in first[0]


def test_weights_that_overflow_are_not_to_be_skipped() -> None:
    """The error advised nonfinite="skip", which had been given."""

    def rank(comm: rp.comm.Communicator) -> None:
        param = nn.Parameter(torch.ones(3, 3))
        inner = torch.optim.SGD([param], lr=1e38)
        optimizer = rp.DistributedOptimizer(inner, policy=rp.Dense(local_steps=1), comm=comm, nonfinite="skip")
        (100 * param).sum().backward()
        with pytest.raises(rp.NonFiniteGradientError, match="go back to a checkpoint, with a lower learning rate"):
            optimizer.step()

    rp.simulate(2, rank)


def test_a_scheduled_step_in_inference_mode_is_refused() -> None:
    """Torch's error was about an in-place update, of a tensor that the user has not made."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=rp.P3(), comm=comm, model=model
        )
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        with torch.inference_mode(), pytest.raises(rp.UsageError, match="inference_mode"):
            optimizer.step()
        optimizer.step()
        optimizer.synchronize()

    rp.simulate(2, rank)


@pytest.mark.parametrize(
    "policy",
    [rp.IWP(0.05), rp.IWP(0.05, lookahead=True), rp.IWP(0.05, local_steps=2)],
    ids=["gradients", "lookahead", "local steps"],
)
def test_wrapped_stepped_and_flushed_in_inference_mode(policy: rp.Policy) -> None:
    """As where a program evaluates. Torch's error came later, about an in-place update of what the wrapper had made."""

    def rank(comm: rp.comm.Communicator, inside: bool) -> list[Tensor]:
        model = make_model()
        with torch.inference_mode(inside):
            optimizer = rp.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm
            )
        for i, batch in enumerate(batches(comm.rank, 4)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            with torch.inference_mode(inside):
                optimizer.step()
                if i == 1:
                    optimizer.flush()
        return [param.detach().clone() for param in model.parameters()]

    for plain, inside in zip(*(rp.simulate(2, partial(rank, inside=mode))[0] for mode in (False, True)), strict=True):
        assert torch.equal(plain, inside)


@pytest.mark.parametrize("policy", [rp.IWP(0.05), rp.IWP(0.05, local_steps=4)], ids=["gradients", "local steps"])
def test_after_a_layer_was_unfrozen_too_early_what_the_error_says_works(policy: rp.Policy) -> None:
    """flush() made its step with each rank's own gradient of the layer, and the next wrapper found other weights."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        inner, layer = sgd(model.parameters()), next(model.children())
        layer.requires_grad_(False)
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm)
        data = iter(batches(comm.rank, 30))

        def steps(number: int) -> None:
            for _ in range(number):
                optimizer.zero_grad()
                loss_of(model, next(data)).backward()
                optimizer.step()

        steps(4)
        layer.requires_grad_(True)
        with pytest.raises(rp.UsageError, match=r"freeze it, flush\(\) and close\(\) the wrapper"):
            steps(4)
        layer.requires_grad_(False)
        optimizer.flush()
        optimizer.close()
        layer.requires_grad_(True)
        if policy.local_steps is not None:  # it has moved, on each rank alone
            rp.broadcast_parameters(model.state_dict(), comm=comm)
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm)
        steps(8)
        return torch.cat([param.detach().view(-1) for param in model.parameters()])

    first, second = rp.simulate(2, rank, timeout=60)
    assert torch.equal(first, second)


def test_optimizers_that_need_a_closure_are_refused() -> None:
    """One got None, called it, and failed in its own step."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # as SAM's is: not to be left out
            closure()
            return super().step(closure)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        with pytest.raises(rp.ConfigurationError, match=r"Twice: step\(\) wants a closure"):
            rp.DistributedOptimizer(Twice(model.parameters(), lr=0.1), model.named_parameters(), comm=comm)

    rp.simulate(1, rank)


def _channels_last(policy: rp.Policy | None, fused: bool, *, closing: bool = False) -> Tensor:
    """The weight of a convolution in channels_last after steps, a flush and, ``closing``, steps without the wrapper."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        model = nn.Conv2d(8, 16, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.randn(model.weight.shape, generator=generator))
        model.to(memory_format=torch.channels_last)
        images = torch.randn(4, 8, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)

        def steps(optimizer: torch.optim.Optimizer) -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(images).square().mean().backward()
                optimizer.step()

        if policy is None:
            steps(inner)
        else:
            given = {"model": model} if policy.schedule else {}
            optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm, **given)
            steps(optimizer)
            optimizer.flush()
            if closing:
                optimizer.close()
                inner.param_groups[0]["foreach"] = False
        if closing:
            steps(inner)
        return model.weight.detach().clone()

    return rp.simulate(1, rank)[0]


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        rp.Dense(),
        rp.IWP(1.0, min_numel=1),
        rp.IWP(0.05, min_numel=1),
        rp.IWP(0.05, min_numel=1, correction="global"),
        rp.P3(),
    ],
    ids=["dense", "all", "pruned", "error feedback", "P3"],
)
def test_fused_optimizers_step_on_weights_in_channels_last(policy: rp.Policy, closing: bool) -> None:
    """They read weight, gradient and momentum as flat memory: our averages, contiguous, went to other weights."""
    fused, plain = (_channels_last(policy, fused, closing=closing) for fused in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    if policy == rp.Dense():
        torch.testing.assert_close(fused, _channels_last(None, fused=True, closing=closing), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "clear",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    ],
    ids=["to None", "to zeros", "the model's", "loaded"],
)
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05), rp.P3()], ids=["dense", "iwp", "p3"])
def test_averages_that_were_thrown_away_are_no_step(policy: rp.Policy, clear: Any) -> None:
    """A rank without a batch took them for those of its next step, made it alone, and the others waited for ever."""

    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        named = model.named_parameters()
        optimizer = rp.DistributedOptimizer(sgd(model.parameters()), named, policy=policy, comm=comm, model=model)
        for step, batch in enumerate(batches(comm.rank, 4)):
            if step != 1 or comm.rank == 0:
                loss_of(model, batch).backward()
            if step == 0:
                optimizer.synchronize()
                clear(model, optimizer)
            else:
                optimizer.step()
                optimizer.zero_grad()
        if policy.schedule is not None:
            optimizer.synchronize()  # layers step when they are needed
        return [param.detach().clone() for param in model.parameters()]

    first, second = rp.simulate(2, rank, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["Rprop", "ASGD", "SGD", "AdamW", "Adagrad"])
def test_state_that_is_made_for_a_broadcast_knows_the_learning_rate(name: str) -> None:
    """Rprop went on with steps of 1e-6, and ASGD's first moved nothing: the step that makes it was one of rate 0."""

    def make(params: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.01)
        return made

    def rank(comm: rp.comm.Communicator) -> None:
        model, other = make_model(), make_model()
        inner, plain = make(model.parameters()), make(other.parameters())
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=rp.Dense(), comm=comm)
        before = [param.detach().clone() for param in model.parameters()]
        for param in (*model.parameters(), *other.parameters()):
            param.grad = torch.zeros_like(param)
        assert optimizer._mode is not None
        optimizer._mode.initialise()  # as hvd.broadcast_optimizer_state has it made
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for one, expected in zip(model.parameters(), other.parameters(), strict=True):
            made, wanted = inner.state[one], plain.state[expected]
            assert made.keys() == wanted.keys()
            for key, value in wanted.items():
                if isinstance(value, Tensor) and key != "ax":  # ASGD's mean of the weights, which the plain step decays
                    assert torch.equal(made[key], value)

    rp.simulate(1, rank)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("policy", [rp.IWP(1.0), rp.IWP(1.0, min_numel=10**6)], ids=["packed", "dense"])
def test_momentum_that_is_switched_on_begins_with_nothing(policy: rp.Policy, nesterov: bool) -> None:
    """It began with the last gradient of the time without, which had been sent."""

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=nesterov))
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.5)):
            for group in optimizer.param_groups:
                group["momentum"] = momentum
            run(model, optimizer, comm.rank, 1, start=step)
        return weights(model)

    expected, *_ = rp.simulate(2, lambda comm: rank(comm, rp.Dense()))
    for found in rp.simulate(2, lambda comm: rank(comm, policy)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_schedule_goes_on_in_another_memory_format() -> None:
    """Pieces of a weight that had become channels_last failed, though nothing was to be compared."""

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> Tensor:
        model = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 64, 4))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            model.named_parameters(),
            policy=policy,
            comm=comm,
            model=model,
        )
        model.to(memory_format=torch.channels_last)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 8, 8, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        if policy.schedule is not None:
            optimizer.synchronize()
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    expected = rp.simulate(2, lambda comm: rank(comm, rp.Dense()))[0]
    for found in rp.simulate(2, lambda comm: rank(comm, rp.P3(slice_bytes=4096))):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("policy", "longest"), [(rp.IWP(0.5), 4 * 4096 * 0.5), (rp.DGC(0.5), 4 * 602.0)])
def test_the_ring_is_measured_for_sums_that_are_made(
    policy: rp.Policy, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each rank sends entries of its own, messages as long as a shared set's were timed, and made by nobody."""
    asked: list[float] = []

    def measure(comm: rp.comm.Communicator, nbytes: float, device: torch.device) -> RingChoice:
        asked.append(nbytes)
        return RingChoice.never()

    monkeypatch.setattr(exchange, "choose_ring", measure)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        run(model, wrap(model, comm, policy, bucket_bytes=4 * 4096), 0, 1)

    rp.simulate(1, rank)
    assert asked == [longest]


@pytest.mark.parametrize("policy", [rp.IWP(0.05, roots="all"), rp.Dense(local_steps=2)], ids=["gradients", "updates"])
def test_a_loop_that_is_compiled_as_a_whole_trains_the_same(policy: rp.Policy) -> None:
    """torch.compile went into hooks and step(), and failed on what is coded there."""

    def trained(*, compiled: bool) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy)

            def step(batch: tuple[Tensor, Tensor]) -> None:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

            one = torch.compile(step, backend="eager") if compiled else step
            for batch in batches(comm.rank, 4):
                one(batch)
            return weights(model)

        return rp.simulate(1, rank, timeout=60)[0]

    assert same_bytes(trained(compiled=True), trained(compiled=False))


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0), rp.Dense(local_steps=1)])
def test_state_and_groups_that_the_wrapper_is_given_are_the_wrapped_optimizer_s(policy: rp.Policy) -> None:
    """``optimizer.state = ...``, to begin with new moments, was undone by the next step, and new groups likewise."""

    def rank(comm: rp.comm.Communicator, policy: rp.Policy | None) -> Tensor:
        model = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        if policy is not None:
            optimizer = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy, comm=comm)
        run(model, optimizer, 0, 2)
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [dict(group, lr=1e-3) for group in optimizer.param_groups]
        assert optimizer.state_dict()["state"] == {}
        run(model, optimizer, 0, 2)
        return weights(model)

    expected = rp.simulate(1, lambda comm: rank(comm, None))[0]
    for found in rp.simulate(2, lambda comm: rank(comm, policy)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_an_optimizer_whose_groups_are_a_property_is_wrapped() -> None:
    """Some pass on those of one inside, and cannot be given any: nothing is, where they are the same already."""

    class Around(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base
            vars(self).update((name, value) for name, value in vars(base).items() if name not in OWN)

        param_groups = property(lambda self: self.base.param_groups)
        state = property(lambda self: self.base.state)
        defaults = property(lambda self: self.base.defaults)

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    def rank(comm: rp.comm.Communicator, *, around: bool) -> Tensor:
        model = make_model()
        inner = sgd(model.parameters())
        optimizer = rp.DistributedOptimizer(
            Around(inner) if around else inner, model.named_parameters(), policy="dense", comm=comm
        )
        run(model, optimizer, comm.rank, 3)
        return weights(model)

    expected = rp.simulate(2, lambda comm: rank(comm, around=False))[0]
    assert torch.equal(rp.simulate(2, lambda comm: rank(comm, around=True))[0], expected)


H = 2


@pytest.mark.parametrize("policy", [rp.IWP(0.05), rp.Dense(local_steps=H)])
def test_gradients_of_torch_func_are_handed_over_as_the_error_says(policy: rp.Policy) -> None:
    """It told of a backward pass that was missing, and not how gradients get in that come from elsewhere."""

    def rank(comm: rp.comm.Communicator, *, elsewhere: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        params = list(model.parameters())
        for number, batch in enumerate(batches(comm.rank, 4)):
            grads = torch.autograd.grad(loss_of(model, batch), params)
            if elsewhere and not number:
                for param in params:
                    param.grad = torch.zeros_like(param)
                with pytest.raises(rp.UsageError, match=r"by hand: torch\.autograd\.backward\(parameters, gradients\)"):
                    for _ in range(H):
                        optimizer.step()
            optimizer.zero_grad()
            if elsewhere:
                torch.autograd.backward(params, grads)
            else:
                loss_of(model, batch).backward()
            optimizer.step()
        return weights(model)

    expected = rp.simulate(2, lambda comm: rank(comm, elsewhere=False))
    for found, plain in zip(rp.simulate(2, lambda comm: rank(comm, elsewhere=True)), expected, strict=True):
        assert same_bytes(found, plain)


@pytest.mark.parametrize(
    ("name", "why"), [("Adafactor", "its square"), ("Adadelta", "its square"), ("Rprop", "step sizes follow signs")]
)
def test_optimizers_that_gradients_kept_back_harm_are_warned_of(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Adam there was a warning; these lost as much or more, in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        for policy in (rp.Dense(), rp.IWP(0.05, local_steps=1), rp.IWP(0.05)):
            assert not caplog.messages
            wrap(model, comm, policy, getattr(torch.optim, name)).close()

    rp.simulate(1, rank)
    assert [f"{name} with gradients at density 0.05" in said and why in said for said in caplog.messages] == [True]


class LookAhead(torch.optim.Optimizer):
    """Around another optimizer, as some are that go about: it sets what it has itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's own looks for what its constructor makes."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # torch leaves it without a name for what closures return
        """The weights go half of the way, and the state has where they come to."""
        self.inner.step()
        for param in (param for group in self.param_groups for param in group["params"]):
            slow = self.state[param].setdefault("slow", param.clone())
            param.copy_(slow.lerp_(param, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """Of both, without the names that torch gives."""
        return {"slow": [entry["slow"] for entry in self.state.values()], "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` made."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.update((param, {"slow": slow}) for param, slow in zip(params, state_dict["slow"], strict=True))


def test_an_optimizer_around_another_trains_and_resumes() -> None:
    """Without what torch's constructor makes it was an AttributeError; with a format of its own it could not save."""

    def around(params: Any) -> torch.optim.Optimizer:
        return LookAhead(torch.optim.SGD(params, lr=0.05))

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(), around)
        run(model, optimizer, 0, 3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = make_model(seed=5)
        optimizer = wrap(model, comm, rp.Dense(), around)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run(model, optimizer, 0, 3, start=3)
        return weights(model)

    plain = make_model()
    run(plain, around(plain.parameters()), 0, 6)
    for result in rp.simulate(2, rank):
        assert same_bytes(result, weights(plain))
