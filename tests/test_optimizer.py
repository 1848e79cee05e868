"""The wrapper as users use it: torch's and Horovod's ways of training."""

import inspect
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


# -- Horovod's and torch's ways ----------------------------------------------------------------------------------------


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


# -- parameters of all kinds -------------------------------------------------------------------------------------------


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


# -- around the wrapper ------------------------------------------------------------------------------------------------


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
    wanted |= {
        "dense_equivalent_bytes",
        "steady_wire_ratio",
        "steady_bytes_sent",
        "steady_dense_equivalent_bytes",
        "value_ratio",
        "density",
        "realised_density",
        "seconds",
        "selection",
    }
    assert wanted <= stats.keys()
    assert {"accumulate", "select", "agree", "pack", "reduce", "unpack"} <= stats["seconds"].keys()
