"""The wrapper as users use it: torch's and Horovod's ways of training, and what wrong use is told."""

import gc
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from tests.training import batches, loss_of, make_model, nesterov, run, same_bytes, sgd, train, weights, wrap

IWP = rp.IWP(0.05)


def only(fn: Any) -> Any:
    """Run on a single rank, where everything but the network is the same."""
    return rp.simulate(1, fn)[0]


# -- Horovod's and torch's ways ---------------------------------------------------------------------------------------


def test_methods_take_torch_parameter_names() -> None:
    """Horovod 0.28.1's zero_grad takes no set_to_none, so trainers that pass it fail."""
    for name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        ours = inspect.signature(getattr(rp.DistributedOptimizer, name)).parameters
        theirs = inspect.signature(getattr(torch.optim.Optimizer, name)).parameters
        assert list(ours) == list(theirs), name


def test_it_is_an_optimizer_that_shares_the_wrapped_ones_groups_and_state() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = torch.optim.AdamW(model.parameters())
        optimizer = rp.DistributedOptimizer(inner, named_parameters=model.named_parameters(), policy=IWP, comm=comm)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
        run(model, optimizer, 0, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state

    only(rank)


@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_synchronize_then_step_is_step(policy: rp.Policy) -> None:
    def split(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, nesterov)
        for batch in batches(comm.rank, 6):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                optimizer.step()
        return weights(model)

    expected = rp.simulate(2, lambda comm: train(comm, policy, nesterov, 6)[0])
    assert same_bytes(rp.simulate(2, split)[1], expected[1])


def test_averages_are_the_same_on_all_ranks_after_synchronize() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        optimizer.synchronize()
        assert int((model[0].weight.grad != 0).sum()) == round(0.05 * 4096)
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    results = rp.simulate(3, rank)
    assert all(same_bytes(result, results[0]) for result in results)


@pytest.mark.parametrize("policy", [rp.Dense(), IWP, rp.IWP(0.05, clip_norm=10.0)])
def test_gradients_of_several_backward_passes_are_summed(policy: rp.Policy) -> None:
    def rank(comm: rp.comm.Communicator, passes: int) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, backward_passes_per_step=passes)
        parts = list(batches(comm.rank, 4))
        for first, second in zip(parts[::2], parts[1::2], strict=True):
            optimizer.zero_grad()
            if passes == 2:
                loss_of(model, first).backward()
                loss_of(model, second).backward()
            else:
                (loss_of(model, first) + loss_of(model, second)).backward()
            optimizer.step()
        return weights(model)

    one, two = (rp.simulate(2, lambda comm, p=p: rank(comm, p))[0] for p in (1, 2))
    assert torch.allclose(one, two, atol=1e-6)


def test_fewer_backward_passes_than_announced_are_exchanged_as_with_horovod() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        return train(comm, IWP, steps=3, backward_passes_per_step=4)[0]

    assert same_bytes(rp.simulate(2, rank)[0], rp.simulate(2, lambda comm: train(comm, IWP, steps=3)[0])[0])


def test_set_backward_passes_per_step_takes_effect_at_the_next_step() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        run(model, optimizer, comm.rank, 1)
        optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        for batch in batches(comm.rank, 2):
            loss_of(model, batch).backward()
        optimizer.step()
        with pytest.raises(rp.ConfigurationError, match="passes=0"):
            optimizer.set_backward_passes_per_step(0)

    rp.simulate(2, rank)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, IWP, nesterov)
        for batch in batches(comm.rank, 4):
            calls = []

            def closure(batch: Any = batch, calls: list[Tensor] = calls) -> Tensor:
                optimizer.zero_grad()
                calls.append(loss_of(model, batch))
                calls[-1].backward()
                return calls[-1]

            with torch.no_grad():
                loss = optimizer.step(closure)
            assert len(calls) == 1 and loss is calls[0]
        return weights(model)

    expected = rp.simulate(2, lambda comm: train(comm, IWP, nesterov, 4)[0])
    assert same_bytes(rp.simulate(2, rank)[0], expected[0])


def test_param_groups_keep_their_own_settings_and_schedulers_work() -> None:
    """At density 1 two groups and two schedulers give what plain torch gives on the averaged gradient."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights_, biases = (
            [p for p in model.parameters() if p.dim() > 1],
            [p for p in model.parameters() if p.dim() == 1],
        )
        return torch.optim.SGD(
            [{"params": weights_, "weight_decay": 1e-2}, {"params": biases, "lr": 0.2, "momentum": 0.5}],
            lr=0.05,
            momentum=0.9,
        )

    def loop(model: nn.Module, optimizer: Any) -> Tensor:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=12)
        for batch in batches(0, 10):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
        return weights(model)

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        return loop(model, wrap(model, comm, rp.IWP(1.0), lambda _: make(model)))

    model = make_model()
    expected = loop(model, make(model))
    assert torch.allclose(only(rank), expected, atol=2e-6)


# -- parameters of all kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_parameters_without_a_gradient_behave_as_with_horovod(policy: rp.Policy) -> None:
    """Unused here: zeros take part. Frozen: left alone. Unused everywhere: the gradient becomes zero."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)})
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        model["c"].requires_grad_(False)
        frozen, unused = model["c"].weight.clone(), model["b"].weight.clone()
        optimizer = wrap(model, comm, policy)
        for _ in range(2):
            optimizer.zero_grad()
            if comm.rank == 0:
                model["a"](torch.ones(1, 64)).sum().backward()
            elif comm.rank == 1:
                model["a"].weight.sum().backward()
            optimizer.step()
        assert same_bytes(model["c"].weight, frozen) and model["c"].weight.grad is None
        assert same_bytes(model["b"].weight.detach(), unused) and not model["b"].weight.grad.any()
        return weights(model)

    results = rp.simulate(3, rank)
    assert all(same_bytes(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_train_and_keep_float32_state(dtype: torch.dtype) -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model().to(dtype)
        optimizer = wrap(model, comm, rp.IWP(0.05), nesterov)
        for x, y in batches(comm.rank, 5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
        parameters = optimizer.state_dict()["ringprune"]["parameters"]
        packed = [entry for entry in parameters.values() if "residual" in entry]
        assert len(packed) == (0 if dtype == torch.float64 else 2)
        assert all(entry["residual"].dtype == entry["velocity"].dtype == torch.float32 for entry in packed)
        return weights(model).float()

    results = rp.simulate(2, rank)
    assert same_bytes(*results) and results[0].isfinite().all()


def test_float64_models_are_averaged_in_float64() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.Linear(4, 4).double()
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        optimizer = wrap(model, comm, rp.Dense(), lambda p: torch.optim.SGD(p, lr=1.0))
        ((1 + 2.0**-40 * comm.rank) * model.weight.sum()).backward()
        optimizer.step()
        return model.weight.detach()

    assert float(rp.simulate(2, rank)[0][0, 0]) == -(1 + 2.0**-41)


def test_empty_scalar_channels_last_and_shared_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last)
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.first = nn.Linear(64, 64, bias=False)
            self.second = nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for param in self.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            image = self.conv(x.reshape(1, 16, 8, 8).to(memory_format=torch.channels_last))
            return self.scale * (image.sum() + self.second(self.first(x[:64])).sum()) + self.empty.sum()

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model = Model()
        optimizer = wrap(model, comm, rp.IWP(1.0), sgd)
        plain = Model()
        reference = sgd(plain.parameters())
        for step in range(4):
            x = torch.randn(1024, generator=torch.Generator().manual_seed(step)) * 0.1
            for m, o in ((model, optimizer), (plain, reference)):
                o.zero_grad()
                m(x).backward()
                o.step()
        return weights(model), weights(plain)

    for got, expected in rp.simulate(2, rank):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_sparse_gradients_are_made_dense() -> None:
    def rank(comm: rp.comm.Communicator, sparse: bool) -> Tensor:
        model = nn.Embedding(100, 64, sparse=sparse)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6400.0).view(100, 64) / 6400)
        optimizer = wrap(model, comm, IWP, sparse_as_dense=sparse)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([step, 7, 7 + comm.rank])).square().sum().backward()
            optimizer.step()
        return weights(model)

    sparse, dense = (rp.simulate(2, lambda comm, s=s: rank(comm, s))[0] for s in (True, False))
    assert same_bytes(sparse, dense)


def test_a_tensor_sent_whole_keeps_its_velocity() -> None:
    """Masking clears velocity only where selection left something out of that tensor; here k = numel."""

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = nn.Linear(2, 2, bias=False)
        optimizer = wrap(model, comm, rp.IWP(0.6, min_numel=1, warmup=None))
        # k = round(0.6 * 4) = 2 of 4 are sent here; in the other layer below, 1 of 1.
        single = nn.Linear(1, 1, bias=False)
        other = wrap(single, comm, rp.IWP(0.6, min_numel=1))
        for m, o in ((model, optimizer), (single, other)):
            o.zero_grad()
            m.weight.sum().backward()
            o.step()
        return {
            "partly": optimizer.state_dict()["ringprune"]["parameters"]["weight"]["velocity"],
            "whole": other.state_dict()["ringprune"]["parameters"]["weight"]["velocity"],
        }

    velocities = only(rank)
    assert int((velocities["partly"] == 0).sum()) == 2
    assert float(velocities["whole"]) == 1.0


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaled_loop(comm: rp.comm.Communicator, policy: rp.Policy, clip: bool, bad: set[int], **options: Any) -> Any:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    optimizer = wrap(model, comm, policy, nesterov, scaler=scaler, **options)
    for step, batch in enumerate(batches(comm.rank, 6)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (math.inf if step in bad and comm.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale(), optimizer.stats()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_a_power_of_two_scale_changes_no_bits(policy: rp.Policy, overlap: bool, clip: bool) -> None:
    expected = rp.simulate(2, lambda comm: train(comm, policy, nesterov, 6)[0])
    got = rp.simulate(2, lambda comm: scaled_loop(comm, policy, clip, set(), overlap=overlap))
    assert same_bytes(got[0][0], expected[0]) and got[0][1] == 1024.0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_an_overflow_on_one_rank_skips_the_step_and_lowers_the_scale_on_all(
    policy: rp.Policy, overlap: bool, clip: bool
) -> None:
    results = rp.simulate(2, lambda comm: scaled_loop(comm, policy, clip, {0, 3}, overlap=overlap))
    for _, scale, stats in results:
        assert scale == 256.0 and stats["skipped_steps"] == 2 and stats["steps"] == 4
    assert same_bytes(results[0][0], results[1][0]) and results[0][0].isfinite().all()


def test_residuals_are_in_unscaled_units_when_the_scale_changes() -> None:
    """Halving the scale between two steps must not change what the residual means."""

    def rank(comm: rp.comm.Communicator, scales: list[float]) -> Tensor:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
        optimizer = wrap(model, comm, IWP, nesterov, scaler=scaler)
        for scale, batch in zip(scales, batches(comm.rank, len(scales)), strict=True):
            scaler.update(scale) if scale != scaler.get_scale() else None
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    steady = rp.simulate(2, lambda comm: rank(comm, [64.0, 64.0, 64.0, 64.0]))
    moving = rp.simulate(2, lambda comm: rank(comm, [64.0, 32.0, 4096.0, 2.0]))
    assert same_bytes(steady[0], moving[0])


def test_a_disabled_scaler_is_no_scaler() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = wrap(model, comm, IWP, scaler=scaler)
        for batch in batches(0, 3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    assert same_bytes(only(rank), only(lambda comm: train(comm, IWP, steps=3)[0]))


def test_a_scaler_that_was_not_given_is_noticed() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = wrap(model, comm, IWP)
        scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
        with pytest.raises(rp.UsageError, match="scaler="):
            scaler.step(optimizer)

    only(rank)


# -- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_clipping_bounds_what_a_rank_contributes(size: int) -> None:
    bound = 0.01

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=1.0))
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        raw = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return [torch.stack([g.norm() for g in raw]), torch.stack([p.grad.norm() for p in model.parameters()])]

    local = bound / math.sqrt(size)
    for raw, sent in rp.simulate(size, lambda comm: rank(comm, rp.IWP(1.0, clip_norm_per_tensor=bound))):
        assert (raw > local).all() and (sent <= local * (1 + 1e-5)).all()
    for raw, sent in rp.simulate(size, lambda comm: rank(comm, rp.IWP(1.0, clip_norm=bound))):
        assert raw.norm() > local and sent.norm() <= local * (1 + 1e-5)
    if size == 1:
        assert sent.norm() == pytest.approx(local, rel=1e-5)


# -- wrong use --------------------------------------------------------------------------------------------------------


def test_more_backward_passes_than_announced_are_told_to_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        for batch in batches(comm.rank, 2 if comm.rank == 1 else 1):
            loss_of(model, batch).backward()
        with pytest.raises(rp.UsageError, match=r"rank 1: .*backward_passes_per_step=1"):
            optimizer.step()
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 1)

    rp.simulate(3, rank)


def test_step_before_backward_is_an_error_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        with pytest.raises(rp.UsageError, match="before backward"):
            optimizer.step()
        run(model, optimizer, comm.rank, 1)
        with pytest.raises(rp.UsageError, match="before backward"):
            optimizer.step()

    rp.simulate(2, rank)


def test_zero_grad_flush_and_load_are_refused_between_backward_and_step() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        loss_of(model, next(iter(batches(0, 1)))).backward()
        for call in (
            optimizer.zero_grad,
            optimizer.flush,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: optimizer.set_backward_passes_per_step(2),
        ):
            with pytest.raises(rp.UsageError, match="backward"):
                call()
        with pytest.raises(rp.UsageError, match="synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()

    only(rank)


def test_two_wrappers_on_one_model_are_refused_until_the_first_is_closed_or_gone() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        first = wrap(model, comm, IWP)
        with pytest.raises(rp.ConfigurationError, match=r"'0.weight' belongs to another"):
            wrap(model, comm, IWP)
        first.close()
        second = wrap(model, comm, IWP)
        run(model, second, 0, 1)
        with pytest.raises(rp.UsageError, match="closed"):
            first.step()
        del second
        gc.collect()
        run(model, wrap(model, comm, IWP), 0, 1)

    only(rank)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "iwq"}, "did you mean 'iwp'"),
        ({"policy": 3}, "policy=3"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"bucket_bytes": 2**40}, "bucket_bytes=1099511627776: a whole number of at least 1 and at most"),
        ({"scaler": 1.0}, "scaler=1.0"),
        ({"model": "resnet"}, "model='resnet'"),
        ({"groups": 2}, "groups=2"),
        ({"num_groups": 2}, "num_groups=2"),
        ({"overlap": "yes"}, "overlap='yes'"),
        ({"compression": "fp16"}, "compression='fp16'"),
        ({"op": "adasum"}, "Adasum"),
        ({"op": "max"}, "op=Max"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"op": "sum", "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"sparse_as_dense": 1}, "sparse_as_dense=1"),
        ({"policy": rp.IWP(roots=2)}, "roots=2 with 1 ranks"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], said: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError)) as caught:
            rp.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), comm=comm, **options)
        assert said in str(caught.value)

    only(rank)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"density": 0.0}, "density=0.0"),
        ({"density": 1.5}, "density=1.5"),
        ({"density": math.nan}, "density=nan"),
        ({"density": "0.01"}, "density='0.01'"),
        ({"roots": 0}, 'roots (or "all")=0'),
        ({"roots": "some"}, "'some'"),
        ({"explore": None}, "explore=None"),
        ({"warmup": 100}, "warmup=100: a ringprune.Warmup"),
        ({"mask_velocity": 1}, "mask_velocity=1"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"explore": 1.1}, "explore=1.1"),
        ({"min_numel": 0}, "min_numel=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"clip_norm_per_tensor": -1.0}, "clip_norm_per_tensor=-1.0"),
        ({"density": 0.5, "warmup": (3, 0.1)}, "start=0.1"),
        ({"warmup": (-1, 1.0)}, "steps=-1"),
        ({"warmup": (1, 0.0)}, "start=0.0"),
    ],
)
def test_wrong_settings_of_a_policy_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError)) as caught:
        if isinstance(arguments.get("warmup"), tuple):
            arguments = arguments | {"warmup": rp.Warmup(*arguments["warmup"])}
        rp.IWP(**arguments)
    assert said in str(caught.value)


def test_wrong_optimizers_and_names_are_named() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        named = list(model.named_parameters())
        cases: list[tuple[Any, Any, str]] = [
            (torch.optim.LBFGS(model.parameters()), named, "LBFGS"),
            (torch.optim.SparseAdam(model.parameters()), named, "SparseAdam"),
            (model, named, "torch.optim.Optimizer"),
            (sgd(model.parameters()), named[:-1], "unnamed"),
            (sgd(model.parameters()), [("a", p) for _, p in named], "names twice: a"),
            (sgd(model.parameters()), model.parameters(), "pairs"),
            (torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, dampening=0.5), named, "dampening"),
            (torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), None, "floating-point"),
        ]
        for optimizer, names, said in cases:
            with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=said):
                rp.DistributedOptimizer(optimizer, names, comm=comm)
        wrapped = wrap(model, comm, IWP)
        with pytest.raises(rp.ConfigurationError, match="already"):
            rp.DistributedOptimizer(wrapped, named, comm=comm)
        with pytest.raises(rp.UsageError, match="after wrapping"):
            wrapped.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    only(rank)


def test_parameters_without_names_are_numbered() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = rp.DistributedOptimizer(sgd(make_model().parameters()), comm=comm)
        assert "parameter 0" in optimizer.state_dict()["ringprune"]["parameters"]

    only(rank)


def zeroed(saved: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        name: {kind: torch.zeros_like(tensor) for kind, tensor in entry.items()}
        for name, entry in saved["parameters"].items()
    }
    return saved | {"parameters": parameters}


def test_checkpoints_that_do_not_fit_are_refused_whole() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model, other = make_model(), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 50), nn.Linear(50, 300))
        optimizer, foreign = wrap(model, comm, IWP), wrap(other, comm, IWP)
        run(model, optimizer, comm.rank, 2)
        before = optimizer.state_dict()
        with pytest.raises(rp.CheckpointError) as caught:
            optimizer.load_state_dict(foreign.state_dict())
        for part in ("Missing: 4.bias.momentum", "Unexpected: 3.bias.momentum", "Other shape: 2.bias.momentum ([50]"):
            assert part in str(caught.value)
        after = optimizer.state_dict()
        assert torch.equal(
            before["ringprune"]["parameters"]["0.weight"]["residual"],
            after["ringprune"]["parameters"]["0.weight"]["residual"],
        )
        with pytest.raises(rp.CheckpointError, match="no 'ringprune' entry"):
            optimizer.load_state_dict(sgd(model.parameters()).state_dict())
        with pytest.raises(rp.CheckpointError, match="format 99"):
            optimizer.load_state_dict(before | {"ringprune": before["ringprune"] | {"format": 99}})
        groups = before["param_groups"][0] | {"params": before["param_groups"][0]["params"][:-1]}
        with pytest.raises(ValueError, match="size of optimizer's group"):
            optimizer.load_state_dict(
                optimizer.state_dict() | {"param_groups": [groups], "ringprune": zeroed(before["ringprune"])}
            )
        assert optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["residual"].any()
        moved = before["ringprune"] | {"rank": 1 - comm.rank}
        with pytest.raises(rp.CheckpointError, match=r"residuals of rank .* of 2, .*flush\(\)"):
            optimizer.load_state_dict(before | {"ringprune": moved})

    rp.simulate(2, rank)


def test_a_checkpoint_loaded_on_one_rank_only_is_noticed() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        run(model, optimizer, comm.rank, 2)
        saved, state = optimizer.state_dict(), model.state_dict()
        again = make_model()
        again.load_state_dict(state)
        optimizer.close()
        other = wrap(again, comm, IWP)
        if comm.rank == 0:
            other.load_state_dict(saved)
        with pytest.raises(rp.RankMismatchError, match="rank 0 continues at step 2, rank 1 at step 0"):
            run(again, other, comm.rank, 1)

    rp.simulate(2, rank)


# -- stories of bugs --------------------------------------------------------------------------------------------------


def test_unscaling_before_the_exchange_is_refused() -> None:
    """Gradients were divided by the scale twice where the exchange came after backward: 0.67 instead of 684."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(model, comm, IWP, scaler=scaler, overlap=False)
        scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(rp.UsageError, match="unscale_"):
            scaler.step(optimizer)

    only(rank)


def test_averages_come_even_where_the_gradient_was_dropped_after_backward() -> None:
    """model.zero_grad() between backward and step met a bare assertion."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        if comm.rank == 1:
            model.zero_grad()
        optimizer.step()
        return weights(model)

    results = rp.simulate(2, rank)
    assert same_bytes(*results)
    assert not same_bytes(results[0], weights(make_model()))


def test_synchronize_without_step_discards_the_averages() -> None:
    """The next step() then complained of skip_synchronize()."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense())
        loss_of(model, next(iter(batches(comm.rank, 1, 77)))).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 3)
        return weights(model)

    expected = rp.simulate(2, lambda comm: train(comm, rp.Dense(), steps=3)[0])
    assert same_bytes(rp.simulate(2, rank)[0], expected[0])


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_parameters_that_were_not_agreed_on_are_noticed(how: str) -> None:
    """They would have been updated from each rank's own gradient, and the ranks would have drifted apart."""

    def rank(comm: rp.comm.Communicator) -> None:
        model, extra = make_model(), nn.Linear(64, 64)
        inner = sgd(model.parameters())
        extra.weight.requires_grad_(how == "added")
        if how == "thawed":
            inner.add_param_group({"params": [extra.weight]})
        optimizer = rp.DistributedOptimizer(inner, policy=IWP, comm=comm)
        run(model, optimizer, comm.rank, 1)
        if how == "added":
            inner.add_param_group({"params": [extra.weight]})
        extra.weight.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        with pytest.raises(rp.UsageError, match=r"shape \[64, 64\] in param group 1 requires a gradient"):
            optimizer.step()

    rp.simulate(2, rank)


def test_flush_at_learning_rate_zero_is_refused() -> None:
    """A cosine schedule ends there, and all that was held back was thrown away in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        run(model, optimizer, comm.rank, 2)
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(rp.UsageError, match="learning rate 0"):
            optimizer.flush()
        assert optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["residual"].any()

    rp.simulate(2, rank)


def test_momentum_from_before_wrapping_goes_on() -> None:
    """It was dropped without a word. At density 1, five plain steps and then five wrapped ones are ten plain steps."""

    def loop(comm: rp.comm.Communicator | None) -> Tensor:
        model = make_model()
        optimizer = nesterov(model.parameters())
        run(model, optimizer, 0, 5)
        if comm is not None:
            optimizer.zero_grad()
            wrapped = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=rp.IWP(1.0), comm=comm)
            run(model, wrapped, 0, 5, start=5)
            again = make_model()
            resumed = wrap(again, comm, rp.IWP(1.0), nesterov)
            resumed.load_state_dict(wrapped.state_dict())
        else:
            run(model, optimizer, 0, 5, start=5)
        return weights(model)

    assert torch.allclose(only(loop), loop(None), atol=2e-6)


def test_weight_decay_switched_on_later_survives_a_checkpoint() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP, sgd)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        run(model, optimizer, comm.rank, 2)
        other = wrap(make_model(), comm, IWP, sgd)
        other.load_state_dict(optimizer.state_dict())
        saved = other.state_dict()["ringprune"]["parameters"]["0.weight"]
        assert saved["momentum"].any()

    only(rank)


def test_a_damaged_checkpoint_entry_is_named() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        state = optimizer.state_dict()
        del state["ringprune"]["step"]
        with pytest.raises(rp.CheckpointError, match="lacks step"):
            optimizer.load_state_dict(state)

    only(rank)


# -- around the wrapper -----------------------------------------------------------------------------------------------


def test_broadcast_parameters_gives_every_rank_the_root_s_tensors() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.BatchNorm1d(4), nn.Linear(4, 4).half())
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(comm.rank)
        rp.broadcast_parameters(model.state_dict(), root_rank=2, comm=comm)
        return torch.cat([t.double().reshape(-1) for t in model.state_dict().values()])

    for result in rp.simulate(3, rank):
        assert (result == 2).all()


def test_sum_and_predivide_are_horovod_s() -> None:
    def rank(comm: rp.comm.Communicator, **options: Any) -> Tensor:
        return train(comm, rp.Dense(), lambda p: torch.optim.SGD(p, lr=0.01), 3, **options)[0]

    average = rp.simulate(2, rank)[0]
    divided = rp.simulate(2, lambda comm: rank(comm, gradient_predivide_factor=2.0))[0]
    assert same_bytes(average, divided)
    summed = rp.simulate(2, lambda comm: rank(comm, op="sum"))[0]
    start = weights(make_model())
    assert torch.allclose((summed - start).norm() / (average - start).norm(), torch.tensor(2.0), rtol=0.1)


def test_stats_are_plain_numbers() -> None:
    stats = only(lambda comm: train(comm, IWP, steps=2)[1].stats())
    wanted = {"steps", "bytes_sent", "bytes_values", "bytes_indices", "bytes_dense", "bytes_headers", "wire_ratio"}
    wanted |= {"dense_equivalent_bytes", "steady_wire_ratio", "value_ratio", "density", "realised_density", "seconds"}
    assert wanted <= stats.keys()
    assert {"accumulate", "score", "select", "agree", "pack", "reduce", "unpack"} <= stats["seconds"].keys()
