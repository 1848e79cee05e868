"""Bugs that were found in local steps, each as the story of what a training script did."""

import copy
import logging
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.arguments import DENSE_ONLY
from tests.training import adamw, batches, loss_of, make_model, plain_sgd, run, same_bytes, sgd, weights, wrap

H = 2


def normed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for param in model.parameters():
        param.data.fill_(0.5)
    return model


def wrap_normed(model: nn.Module, comm: rp.comm.Communicator, **options: Any) -> rp.DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return rp.DistributedOptimizer(
        optimizer, model.named_parameters(), policy=rp.Dense(local_steps=H), comm=comm, model=model, **options
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().sum().backward()
    optimizer.step()


def data_of(rank: int, number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def test_ranks_without_a_step_flush_with_those_that_have_made_one() -> None:
    """The first step of a model with BatchNorm averaged its statistics, and a rank that flushed before it did not."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed()
        optimizer = wrap_normed(model, comm)
        for number in range(comm.rank):
            step(model, optimizer, data_of(comm.rank, number))
        optimizer.flush()
        return torch.cat([weights(model), model.get_buffer("1.running_mean")])

    assert same_bytes(*rp.simulate(2, rank))


def test_statistics_resume_from_before_the_first_step() -> None:
    """A checkpoint of step 0 was taken for one whose ranks had averaged them already."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed()
        state = wrap_normed(model, comm).state_dict()
        again = normed()
        optimizer = wrap_normed(again, comm.duplicate())
        optimizer.load_state_dict(state)
        step(again, optimizer, data_of(comm.rank, 0))
        with optimizer.shared_weights():
            return again.get_buffer("1.running_mean").clone()

    first, second = rp.simulate(2, rank)
    assert same_bytes(first, second)
    assert first.abs().max() > 0


@pytest.mark.parametrize("trained", [0, H])
def test_a_model_that_is_loaded_is_judged_with_the_statistics_it_came_with(trained: int) -> None:
    """shared_weights() once had the weights that were loaded, and the statistics of before."""
    best = normed()
    with torch.no_grad():
        best.get_parameter("0.weight").fill_(2.0)
        best.get_buffer("1.running_mean").fill_(7.0)
    data = torch.ones(2, 4)

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model = normed()
        optimizer = wrap_normed(model, comm)
        for number in range(trained):
            step(model, optimizer, data_of(comm.rank, number))
        model.load_state_dict(best.state_dict())
        model.eval()
        with optimizer.shared_weights(), torch.no_grad():
            return model(data), model.get_buffer("1.running_mean").clone()

    expected = best.eval()(data)
    for found, mean in rp.simulate(2, rank):
        assert same_bytes(found, expected.detach())
        assert same_bytes(mean, best.get_buffer("1.running_mean"))


def test_weights_that_are_normalised_after_every_step_do_not_bring_a_rank_s_own_statistics() -> None:
    """Any change of weights was taken for loading, after a forward pass that had made the statistics its own."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed()
        optimizer = wrap_normed(model, comm)
        for number in range(2 * H + 1):
            step(model, optimizer, data_of(comm.rank, number))
            with torch.no_grad():
                weight = model.get_parameter("0.weight")
                weight.div_(weight.norm())
        with optimizer.shared_weights():
            return model.get_buffer("1.running_mean").clone()

    assert same_bytes(*rp.simulate(2, rank))


def test_a_bad_batch_of_one_rank_leaves_the_statistics_of_all_finite(caplog: pytest.LogCaptureFixture) -> None:
    """Its step was left out, and the infinite mean of its forward pass was everybody's from then on."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed()
        optimizer = wrap_normed(model, comm, nonfinite="skip")
        for number in range(2 * H):
            data = data_of(comm.rank, number)
            if (comm.rank, number) == (1, H):
                data[0, 0] = float("inf")
            step(model, optimizer, data)
        return model.get_buffer("1.running_mean").clone()

    with caplog.at_level(logging.CRITICAL, "ringprune"):
        results = rp.simulate(3, rank)
    assert all(found.isfinite().all() and same_bytes(found, results[0]) for found in results)


def test_statistics_in_float64_are_averaged_in_float64() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed().double()
        optimizer = wrap_normed(model, comm)
        for number in range(H - 1):
            step(model, optimizer, data_of(0, number).double())
        optimizer.zero_grad()
        model(data_of(0, H - 1).double()).square().sum().backward()
        before = model.get_buffer("1.running_mean").clone()
        optimizer.step()
        return model.get_buffer("1.running_mean") - before

    assert rp.simulate(1, rank)[0].abs().max() == 0


def test_flushing_twice_is_flushing_once_with_outer_momentum_too() -> None:
    """Each flush was an outer step of its own, by which the weights coasted on."""

    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=rp.LocalSteps(4, outer_lr=0.7, outer_momentum=0.9)))
        run(model, optimizer, comm.rank, 8)
        found = []
        for _ in range(3):
            optimizer.flush()
            found.append(weights(model))
        return found

    for first, second, third in rp.simulate(2, rank):
        assert same_bytes(first, second)
        assert same_bytes(first, third)


def test_what_was_found_before_a_checkpoint_is_loaded_is_forgotten() -> None:
    """A rank's NaN was told at the exchange after all had gone back: about a gradient of steps that had been undone."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=4))
        run(model, optimizer, comm.rank, 4)
        saved = optimizer.state_dict()
        optimizer.zero_grad()
        (loss_of(model, next(batches(comm.rank, 1, 4))) * (float("nan") if comm.rank else 1.0)).backward()
        optimizer.step()
        optimizer.load_state_dict(saved)
        run(model, optimizer, comm.rank, 4, start=5)

    rp.simulate(2, rank)


def test_growing_intervals_are_counted_alike_after_a_flush_that_one_rank_came_to_early() -> None:
    """It had missed the step of the highest rate, and counted every later interval by another one."""
    rising = [0.1, 0.2, 0.3, 0.4]

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=rp.LocalSteps(6, growth=1)), plain_sgd)
        for number in range(60):
            if number == len(rising):
                optimizer.flush()
            if number == len(rising) - 1 and comm.rank == 1:
                continue
            optimizer.param_groups[0]["lr"] = (rising + [0.3] * 60)[number]
            run(model, optimizer, comm.rank, 1, start=number)
        optimizer.flush()

    rp.simulate(2, rank)


@pytest.mark.parametrize(
    ("density", "dip", "steps", "values"),
    [(0.3, 1e-4, 4, "book4"), (0.3, 1e-6, 16, "book4"), (0.1, 1e-6, 48, "book4"), (0.3, 1e-6, 48, "book2")],
)
def test_shared_momentum_survives_a_dip_of_the_learning_rate(
    density: float, dip: float, steps: int, values: Any
) -> None:
    """What rounding had dropped of fast steps was divided by the rates of slow ones: weights grew to 235."""

    def largest(momentum: Any) -> float:
        policy = rp.IWP(
            density,
            values=values,
            dense_values=values,
            roots="all",
            local_steps=rp.LocalSteps(4, momentum=momentum),
        )

        def rank(comm: rp.comm.Communicator) -> float:
            model = make_model()
            optimizer = wrap(model, comm, policy, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9))
            for number in range(64 + steps):
                optimizer.param_groups[0]["lr"] = dip if 32 <= number < 32 + steps else 0.02
                run(model, optimizer, comm.rank, 1, start=number)
            return float(weights(model).abs().max())

        return rp.simulate(2, rank)[0]

    # What is right has no bound of its own; with each rank's own momentum training is the same but for noise.
    assert largest("shared") <= 2 * largest("own")


def test_weights_that_differ_are_told_until_they_are_alike() -> None:
    """They were told once; who caught that error trained on with ranks apart."""

    def rank(comm: rp.comm.Communicator) -> list[bool]:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=H))
        told = []
        for interval in range(5):
            if interval == 1 and comm.rank == 1:
                model.get_parameter("0.weight").data.add_(1.0)
            if interval == 4:
                rp.broadcast_parameters(model.state_dict(), comm=comm)
            try:
                run(model, optimizer, comm.rank, H, start=H * interval)
                told.append(False)
            except rp.RankMismatchError:
                told.append(True)
        return told

    assert rp.simulate(2, rank) == [[False, True, True, True, False]] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_who_mends_weights_that_differ_at_the_start_can_go_on(overlap: bool) -> None:
    """The wrapper stayed in the middle of the exchange that had been refused."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model(seed=comm.rank)
        optimizer = wrap(model, comm, rp.IWP(0.1, roots="all"), overlap=overlap)
        with pytest.raises(rp.RankMismatchError):
            run(model, optimizer, comm.rank, 1)
        rp.broadcast_parameters(model.state_dict(), comm=comm)
        run(model, optimizer, comm.rank, 2, start=1)
        return weights(model)

    assert same_bytes(*rp.simulate(2, rank))


def test_a_parameter_that_is_taken_out_of_its_group_rests() -> None:
    """Shared momentum looked its learning rate up: a KeyError of a number."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=rp.LocalSteps(H, momentum="shared")))
        run(model, optimizer, comm.rank, H)
        optimizer.param_groups[0]["params"].pop()
        run(model, optimizer, comm.rank, H, start=H)

    rp.simulate(2, rank)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_parameter_that_is_frozen_and_wrapped_again_rests(kind: type[torch.optim.Optimizer]) -> None:
    """Where gradients are set to zero, and not to None, each rank's own momentum went on moving it: they parted."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = normed()
        bias = model[1].bias
        inner = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        for frozen in (False, True):
            bias.requires_grad_(not frozen)
            policy = rp.Dense(local_steps=1)
            optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm)
            before = bias.detach().clone()
            for number in range(2):
                optimizer.zero_grad(set_to_none=False)
                model(data_of(comm.rank, number)).square().sum().backward()
                optimizer.step()
            assert torch.equal(before, bias) is frozen
            optimizer.flush()
            optimizer.close()
        return bias.detach().clone()

    assert same_bytes(*rp.simulate(2, rank))


def test_without_a_learning_rate_what_goes_by_it_is_refused_and_a_flush_works() -> None:
    """Optimizers such as Adafactor may have lr=None; the first step failed after the weights had moved."""

    class NoRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": None})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.01)

    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ConfigurationError, match="has no learning rate of its own, lr=None"):
            wrap(make_model(), comm, "iwp", NoRate)
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1), NoRate)
        run(model, optimizer, comm.rank, 2)
        optimizer.flush()

    rp.simulate(2, rank)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_of_another_dtype_than_the_parameter_s_are_refused_but_for_local_steps() -> None:
    """They were exchanged, and could not be written back."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model().bfloat16()
        for param in model.parameters():
            param.grad_dtype = torch.float32
        for policy in (rp.Dense(), rp.IWP(0.1)):
            with pytest.raises(rp.ConfigurationError, match=r"'0\.weight' is torch\.bfloat16 with a grad_dtype of"):
                wrap(model, comm, policy)
        wrap(model, comm, rp.Dense(local_steps=H))

    rp.simulate(1, rank)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_momentum_of_local_steps_is_not_taken_for_one_that_all_share(make: Any) -> None:
    """A script that went from local steps to gradients, flushed and closed, had ranks that drifted apart for good."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        inner = make(model.parameters())

        def wrapped(policy: rp.Policy) -> rp.DistributedOptimizer:
            return rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm)

        optimizer = wrapped(rp.Dense(local_steps=H))
        run(model, optimizer, comm.rank, 3)
        optimizer.flush()
        optimizer.close()
        optimizer = wrapped(rp.Dense())
        with pytest.raises(rp.RankMismatchError, match="After local steps each rank has its own"):
            run(model, optimizer, comm.rank, 1)
        optimizer.zero_grad()
        names = [(number, name) for number, state in enumerate(inner.state.values()) for name in state]
        held = list(inner.state.values())
        rp.broadcast_parameters([(f"{number} {name}", held[number][name]) for number, name in names], comm=comm)
        run(model, optimizer, comm.rank, 3)
        return weights(model)

    assert same_bytes(*rp.simulate(2, rank))


def test_a_flush_after_the_pass_of_another_loss_says_what_to_do() -> None:
    """A generator's loss had reached the discriminator's parameters: an exchange was said to be under way."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(local_steps=H))
        run(model, optimizer, comm.rank, 3)
        loss_of(model, next(batches(comm.rank, 1))).backward()
        with pytest.raises(rp.UsageError, match=r"flush\(\) after backward\(\) .*call step\(\), or zero_grad\(\)"):
            optimizer.flush()
        optimizer.zero_grad()
        optimizer.flush()

    rp.simulate(2, rank)


@pytest.mark.parametrize("options", [{}, {"hierarchical": True}], ids=["ranks", "nodes"])
@pytest.mark.parametrize(
    "policy",
    [rp.Dense("book2", local_steps=H), rp.IWP(0.3, values="book4", dense_values="book2", local_steps=H)],
    ids=["dense", "pruned"],
)
def test_a_flush_sends_what_rounding_dropped_of_dense_tensors(policy: rp.Policy, options: dict[str, Any]) -> None:
    """It was made the same on all ranks, and left out of the weights: in 2 bits much of what they had moved by."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda params: torch.optim.SGD(params, lr=1.0), **options)
        moved, before = torch.zeros_like(weights(model)), weights(model)
        for number in range(5):
            draw = torch.Generator().manual_seed(10 * comm.rank + number)
            gradients = [torch.randn(param.shape, generator=draw) for param in model.parameters()]
            optimizer.zero_grad()
            torch.autograd.backward(list(model.parameters()), gradients)
            optimizer.step()
            moved += torch.cat([gradient.reshape(-1) for gradient in gradients])
        optimizer.flush()
        return moved, before - weights(model)

    results = rp.simulate(4, rank, ranks_per_node=2)
    mean = torch.stack([moved for moved, _ in results]).mean(0)
    assert all(torch.allclose(change, mean, atol=1e-5) for _, change in results)


def test_a_flush_comes_after_a_pass_that_the_models_zero_grad_has_thrown_away() -> None:
    """A GAN's discriminator is given gradients by the generator's loss: nobody calls the wrapper's zero_grad() then."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=2))
        run(model, optimizer, comm.rank, 3)
        loss_of(model, next(batches(comm.rank, 1))).backward()
        with pytest.raises(rp.UsageError, match="of the wrapper"):
            optimizer.flush()
        model.zero_grad()
        optimizer.flush()
        run(model, optimizer, comm.rank, 2)

    rp.simulate(2, rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state_dict()


by_horovod = types.FunctionType(broadcast_optimizer_state.__code__, {"__name__": "horovod.stand_in"})
"""What Horovod's function of that name does to the wrapper first: who calls is known by name and module."""


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_checkpoint_that_rank_0_alone_has_loaded_is_told_to_all_before_horovod_broadcasts(steps: int) -> None:
    """In the first interval rank 0 alone was refused, and the others waited in Horovod's broadcast."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=2))
        run(model, optimizer, comm.rank, steps)
        if comm.rank == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(rp.RankMismatchError, match="of its own checkpoint, rank 1 at step"):
            by_horovod(optimizer)

    rp.simulate(2, rank)


def test_horovods_broadcast_after_a_checkpoint_was_loaded_is_refused_until_a_flush() -> None:
    """In silence rank 0's moments, and what it had not exchanged yet, became every rank's: no run went on as it was."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.1, local_steps=2))
        by_horovod(optimizer)
        run(model, optimizer, comm.rank, 3)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(rp.UsageError, match="broadcast_optimizer_state"):
            by_horovod(optimizer)
        optimizer.flush()
        by_horovod(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        by_horovod(optimizer)

    rp.simulate(2, rank)


def test_a_rows_gradient_whose_values_share_memory_is_counted() -> None:
    """A hook had made it: the step raised that something was not contiguous, on that rank alone."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Embedding(20, 8, sparse=True)
        nn.init.constant_(model.weight, 0.5)
        optimizer = wrap(model, comm, rp.Dense(local_steps=2), plain_sgd_of_rows)
        for _ in range(2):
            model(torch.tensor([3])).sum().backward()
            values = torch.ones(1, 1).expand(1, 8)
            model.weight.grad = torch.sparse_coo_tensor(
                torch.tensor([[3]]), values, (20, 8), is_coalesced=True, check_invariants=False
            )
            optimizer.step()
            optimizer.zero_grad()
        assert float(model.weight[3].detach().max()) < 0.5

    rp.simulate(2, rank)


def plain_sgd_of_rows(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_a_local_step_that_is_skipped_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """It had a line for each parameter, 161 of ResNet-50's, at every bad batch."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        step(model, wrap_normed(model, comm, nonfinite="skip"), torch.full((8, 4), torch.nan))

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(1, rank)
    (told,) = [record.message for record in caplog.records if "skipped" in record.message]
    assert told.startswith("rank 0: local step skipped: the gradient of '0.weight' has 16 of 16 entries")
    assert told.endswith("; and those of 3 more parameters")


def _takes_no_sparse_ones(kind: type[torch.optim.Optimizer]) -> bool:
    param = nn.Parameter(torch.ones(4, 2))
    param.grad = torch.ones(4, 2).to_sparse(1)
    try:
        kind([param]).step()
    except RuntimeError as error:
        assert "sparse" in str(error)
        return True
    return False


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, once in a process
def test_it_is_known_which_of_torchs_optimizers_take_no_sparse_gradients() -> None:
    """Adafactor and Muon were left out: gradients of rows were not made dense for them, and their steps failed."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "LBFGS"}
    assert {name for name, kind in kinds.items() if name != "Optimizer" and _takes_no_sparse_ones(kind)} == DENSE_ONLY


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, partial(torch.optim.Muon, weight_decay=0.0)])
def test_sparse_gradients_are_made_dense_for_adafactor_and_muon(kind: Any) -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.Embedding(20, 8, sparse=True)
        nn.init.constant_(model.weight, 0.5)
        optimizer = wrap(model, comm, rp.Dense(local_steps=H), kind)
        for _ in range(H):
            optimizer.zero_grad()
            model(torch.tensor([3 + comm.rank])).sum().backward()
            optimizer.step()
        return model.weight.detach().mean(1)

    for means in rp.simulate(2, rank):
        assert means.max() == means[0]
        assert means[3:5].max() < means[0]
