"""Wrong arguments, wrong order, wrong checkpoints: what the user is told, and on which ranks."""

import dataclasses
import gc
import math
import re
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import ringprune as rp
from tests.training import batches, loss_of, make_model, plain_sgd, run, same_bytes, sgd, weights, wrap

IWP = rp.IWP(0.05)


def only(fn: Any) -> Any:
    """Run on a single rank, where everything but the network is the same."""
    return rp.simulate(1, fn)[0]


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("density", r"no argument 'density'; it is a policy's: policy=ringprune.IWP\(density=...\)"),
        ("named_params", "no argument 'named_params'; did you mean 'named_parameters'"),
        ("xyz", "no argument 'xyz'$"),
    ],
)
def test_an_argument_that_is_none_is_told_to_all_ranks(name: str, said: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        more: Any = {name: 1} if comm.rank == 1 else {}
        with pytest.raises(rp.ArgumentTypeError if comm.rank == 1 else rp.RingPruneError, match=said):
            rp.DistributedOptimizer(plain_sgd(make_model().parameters()), comm=comm, **more)

    rp.simulate(2, rank)


def test_arguments_by_position_as_horovod_takes_them_are_told_to_all_ranks() -> None:
    """Python's own error came on that rank alone, where the others waited for it."""
    said = "got 3 arguments by position: only the optimizer and named_parameters go so; name the others"

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        more: Any = ["Compression.none"] if comm.rank == 1 else []
        with pytest.raises(rp.ArgumentTypeError if comm.rank == 1 else rp.RingPruneError, match=said):
            rp.DistributedOptimizer(plain_sgd(model.parameters()), model.named_parameters(), *more, comm=comm)

    rp.simulate(2, rank)


def test_horovods_wrapper_around_ours_is_told() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        # As horovod.torch.DistributedOptimizer does it: a class derived from the optimizer's, made of its groups.
        derived: Any = type("DistributedOptimizer", (type(optimizer),), {})
        with pytest.raises(rp.ArgumentTypeError, match=r"as from hvd\.DistributedOptimizer around this one: .* once$"):
            derived(optimizer.param_groups)

    only(rank)


def test_mistakes_of_calls_are_told_with_what_was_meant() -> None:
    model = make_model()
    wrong_optimizer: Any = model
    with pytest.raises(rp.ArgumentTypeError, match=r"takes the optimizer to wrap, not a \w+"):
        rp.recommended(wrong_optimizer)
    for density, share in ((5, "0.05"), (1.5, "0.015")):
        with pytest.raises(rp.ConfigurationError, match=rf"it is a share; {density:g} % is {share}$"):
            rp.IWP(density)

    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ArgumentTypeError, match=r"call it: ringprune\.DGC\(\)"):
            wrap(model, comm, rp.DGC)
        wrongs: tuple[Any, ...] = (model, model.parameters(), 3)
        for wrong in wrongs:
            with pytest.raises(rp.ArgumentTypeError, match=r"state_dict\(\) or model\.named_parameters\(\), not a"):
                rp.broadcast_parameters(wrong, comm=comm)

    only(rank)


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
        run(model, optimizer, 0, 1)

    only(rank)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace_one(model: nn.Module) -> None:
    bias = model.get_parameter("4.bias")
    bias.grad = None if bias.grad is None else 2 * bias.grad


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("policy", [rp.Dense(), rp.Dense("bf16"), IWP], ids=["dense", "rounded", "iwp"])
@pytest.mark.parametrize("change", [clip, replace_one, zero], ids=["clipped", "replaced", "zeroed"])
def test_a_gradient_changed_while_it_is_exchanged_is_refused_on_all_ranks(policy: rp.Policy, change: Any) -> None:
    """The change would be lost without a word, or made to what is being sent; Horovod leaves that to the user."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        run(model, optimizer, comm.rank, 1)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        if comm.rank == 1:
            change(model)
        with pytest.raises(
            rp.UsageError, match=r"rank 1: the gradient of '.*changed between backward\(\) and step\(\)"
        ) as caught:
            optimizer.step()
        told = re.findall(r"(clip_\w+) of ([A-Z]\w+(?:, [A-Z]\w+)*(?: and \w+)?)", str(caught.value))
        ways = [(name, maker) for name, makers in told for maker in re.split(", | and ", makers)]
        assert len(ways) == 4 and all(name in signature(getattr(rp, maker)).parameters for name, maker in ways)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 1)

    rp.simulate(2, rank)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", [clip, replace_one, zero], ids=["clipped", "replaced", "zeroed"])
def test_with_a_schedule_the_same_is_told_when_the_step_is_concluded(change: Any, ranks: int) -> None:
    """Not steps later, nor never where it was the last: what ranks tell goes out when step() is called."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = rp.DistributedOptimizer(
            plain_sgd(model.parameters()), model.named_parameters(), policy=rp.P3(), comm=comm, model=model
        )
        run(model, optimizer, comm.rank, 2)
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        if comm.rank == comm.size - 1:
            change(model)
        optimizer.step()
        with pytest.raises(rp.UsageError, match=rf"rank {comm.size - 1}: the gradient of '.*' was changed between"):
            optimizer.synchronize()
        run(model, optimizer, comm.rank, 2)
        optimizer.close()

    rp.simulate(ranks, rank)


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=str)
def test_a_gradient_may_be_changed_where_nothing_is_being_exchanged(options: dict[str, Any]) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(), plain_sgd, **options)
        for step, batch in enumerate(batches(comm.rank, 3)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if options:  # exchanged in step()
                clip(model)
                optimizer.step()
            elif step == 1:  # dropped: the average comes all the same
                model.zero_grad()
                optimizer.step()
                assert all(param.grad is not None and param.grad.any() for param in model.parameters())
            else:
                optimizer.synchronize()
                clip(model)
                with optimizer.skip_synchronize():
                    optimizer.step()

    rp.simulate(2, rank)


def test_wrong_use_on_one_rank_is_told_to_all() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        loss_of(model, next(iter(batches(0, 1)))).backward()
        with pytest.raises(rp.UsageError, match=r"rank 1: step\(\) inside skip_synchronize"):
            if comm.rank == 1:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 1)

    rp.simulate(2, rank)


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
        gc.disable()  # no cycle keeps the wrapper: dropping it is enough
        del second
        gc.enable()
        run(model, wrap(model, comm, IWP), 0, 1)

    only(rank)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "iwq"}, "did you mean 'iwp'"),
        ({"policy": 3}, "policy=3"),
        ({"policy": "IWP"}, "did you mean 'iwp'"),
        ({"policy": "Auto"}, "did you mean 'auto'"),
        ({"policy": "recommended"}, "did you mean 'iwp'"),
        ({"policy": "iwp:density=0.01,roots=2"}, "such as ringprune.IWP(density=0.01,roots=2)"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"bucket_bytes": 2**40}, "bucket_bytes=1099511627776: a whole number of at least 1 and at most"),
        ({"scaler": 1.0}, "scaler=1.0"),
        ({"model": "resnet"}, "model='resnet'"),
        ({"groups": 2}, "groups=2"),
        ({"groups": [[torch.ones(3)]]}, "groups=[...]: tensors are grouped into buckets"),
        ({"num_groups": 2}, "num_groups=2"),
        ({"overlap": "yes"}, "overlap='yes'"),
        ({"compression": "fp16"}, "compression='fp16'"),
        ({"op": "adasum"}, "Adasum"),
        ({"op": "max"}, "op=max"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"op": "sum", "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"sparse_as_dense": 1}, "sparse_as_dense=1"),
        ({"nonfinite": ""}, "nonfinite=''"),
        ({"op": [1]}, "op=[1]"),
        ({"process_set": "x"}, "process_set='x'"),
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
        ({"roots": 0}, "roots=0"),
        ({"roots": "some"}, """roots='some': a whole number of at least 1, or "all\""""),
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


def test_denses_own_argument_is_named() -> None:
    with pytest.raises(rp.ConfigurationError, match=r"^values='fp8': one of 'fp32'"):
        rp.Dense("fp8")


def test_wrong_optimizers_and_names_are_named() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        named = list(model.named_parameters())
        divided = nn.Parameter(torch.zeros(2))
        divided.placements = ()  # what a DTensor has, and no other tensor
        cases: list[tuple[Any, Any, str]] = [
            (sgd([divided]), [("0.weight", divided)], "'0.weight' is a DTensor"),
            (sgd(nn.LazyLinear(2).parameters()), None, "'.*0.*' of a lazy module has no shape yet"),
            (sgd([nn.Parameter(torch.zeros(2, device="meta"))]), None, "'.*0.*' is on the meta device"),
            (torch.optim.LBFGS(model.parameters()), named, "LBFGS"),
            (torch.optim.SparseAdam(model.parameters()), named, "SparseAdam"),
            (model, named, r"a torch.nn\.modules\.container\.Sequential: the plain torch.optim.Optimizer"),
            (torch.optim.SGD, named, r"the class torch\.optim\.sgd\.SGD"),
            (sgd(model.parameters()), dict(named), r"holds str: .*, or the items\(\) of a dict"),
            (sgd(model.parameters()), named[:-1], "unnamed"),
            (sgd(model.parameters()), [("a", p) for _, p in named], "names twice: a"),
            (sgd(model.parameters()), model.parameters(), "pairs"),
            (torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, dampening=0.5), named, "dampening"),
            (torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), None, "floating-point"),
            (sgd(model.parameters()), 5, r"named_parameters is of type int: model\.named_parameters\(\)"),
        ]
        for optimizer, names, said in cases:
            with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=said):
                rp.DistributedOptimizer(optimizer, names, policy=IWP, comm=comm)
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
        told = "load it under that with which it was saved"
        for part in (
            told,
            "Missing: 4.bias.momentum",
            "Unexpected: 3.bias.momentum",
            "Other shape: 2.bias.momentum ([50]",
        ):
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


@pytest.mark.parametrize(
    ("slot", "value", "hint"),
    [
        ("density", 0.05, r"Density\(0.01\)"),
        ("roots", "all", r"Roots\("),
        ("clipping", 1.0, r"Clipping\("),
        ("score", "magnitude", r"Magnitude\(\)"),
    ],
)
def test_a_plain_value_in_a_slot_of_a_policy_is_refused_at_once(slot: str, value: object, hint: str) -> None:
    """``replace(rp.IWP(), density=0.05)`` was taken, and failed at the first step."""
    with pytest.raises(rp.ArgumentTypeError, match=rf"Policy\.{slot}=.*{hint}"):
        dataclasses.replace(rp.IWP(), **{slot: value})


def test_a_score_of_a_formula_that_is_not_there_is_refused_at_once() -> None:
    """A researcher's own score was taken, and refused by the kernel at the first step, on the step's root alone."""

    class Mine:
        name = "mine"

        def parameters(self, rms: torch.Tensor) -> list[float]:
            return [1.0] * len(rms)

    with pytest.raises(rp.ConfigurationError, match=r"Policy\.score\.name='mine': one of 'ratio', 'magnitude'"):
        dataclasses.replace(rp.IWP(), score=Mine())


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_parameter_that_has_changed_its_group_is_told(momentum: float) -> None:
    """Momentum that the wrapper has taken over went on by the settings of the group that it had left, in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP, sgd)
        run(model, optimizer, comm.rank, 2)
        inner = optimizer._inner
        inner.add_param_group({"params": [inner.param_groups[0]["params"].pop(0)], "momentum": momentum})
        with pytest.raises(rp.UsageError, match=r"'0.weight' was in param group 0 .* is in 1 now.*wrap again"):
            run(model, optimizer, comm.rank, 1, start=2)

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW])
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0, correction="global")], ids=["dense", "global"])
def test_it_may_where_momentum_is_the_wrapped_optimizers(policy: rp.Policy, make: Any) -> None:
    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> torch.Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, make)
        run(model, optimizer, comm.rank, 2)
        inner = optimizer._inner
        inner.add_param_group({"params": [inner.param_groups[0]["params"].pop(0)], "lr": 0.01})
        run(model, optimizer, comm.rank, 3, start=2)
        return weights(model)

    dense, *_ = rp.simulate(2, lambda comm: rank(comm, rp.Dense()), timeout=30)
    torch.testing.assert_close(rp.simulate(2, lambda comm: rank(comm, policy), timeout=30)[1], dense)


def test_a_group_that_is_gone_is_told() -> None:
    """It was an IndexError out of backward()."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        groups = [{"params": [param]} for param in model.parameters()]
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(groups, lr=0.1), model.named_parameters(), policy=IWP, comm=comm
        )
        optimizer._inner.param_groups.pop()
        with pytest.raises(rp.UsageError, match=r"was in param group 5 .* is in none now"):
            run(model, optimizer, comm.rank, 1)

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize(
    "policy", [rp.Dense(), rp.IWP(0.05), rp.P3(), rp.Dense(local_steps=2)], ids=["dense", "iwp", "p3", "local steps"]
)
def test_a_model_that_one_rank_converts_later_is_told_to_all(policy: rp.Policy) -> None:
    """That rank alone had a kernel's error, about ``grads[0]``, out of ``backward()``; or trained on, in float32."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )
        run(model, optimizer, comm.rank, 2)
        optimizer.state_dict()  # with a schedule, the step is made whole
        if comm.rank == 1:
            model.double()
        with pytest.raises(rp.UsageError, match=r"rank 1: '0\.weight' was torch\.float32 when .* torch\.float64 now"):
            for batch in batches(comm.rank, 2):
                optimizer.zero_grad()
                loss_of(model, (batch[0].to(next(model.parameters()).dtype), batch[1])).backward()
                optimizer.step()

    rp.simulate(2, rank, timeout=30)


def test_a_group_that_is_added_under_a_schedule_is_told() -> None:
    """It was a ValueError of zip, out of the next forward pass, in which layers step; later a layer lost its step."""

    def rank(comm: rp.comm.Communicator) -> None:
        made = []
        for disturbed in (False, True):
            model = make_model()
            inner = sgd(model.parameters())
            optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=rp.P3(), comm=comm, model=model)
            run(model, optimizer, comm.rank, 2)
            if disturbed:
                inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
                with pytest.raises(rp.UsageError, match="had 1 param groups when its step began, and has 2 now"):
                    run(model, optimizer, comm.rank, 1, start=2)
                del inner.param_groups[1:]
            optimizer.synchronize()  # and the step is made
            made.append(weights(model))
            optimizer.close()
        assert same_bytes(*made)

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05), rp.Dense(local_steps=2), rp.P3(), "auto"])
@pytest.mark.parametrize("frozen", [True, False])
def test_wrapping_what_is_all_frozen_is_warned_of(frozen: bool, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first step said that there was no backward pass before it, or with local steps nothing was said at all."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model().requires_grad_(not frozen)
        optimizer = sgd(model.parameters())
        rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy, comm=comm, model=model)

    rp.simulate(2, rank, timeout=30)
    said = [record.message for record in caplog.records if "nothing is exchanged" in record.message]
    assert len(said) == frozen, "once, by rank 0"


REPLACED = r"rank 1: '4\.weight' has a gradient and was not in the model when the optimizer was wrapped"


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05), rp.Dense(local_steps=2), rp.P3(), "auto"])
def test_a_layer_that_takes_the_place_of_another_is_told_to_all_ranks(policy: Any, steps: int) -> None:
    """It stayed as each rank had made it, in silence: no optimizer had it."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = sgd(model.parameters())
        optimizer = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy, comm=comm, model=model)
        run(model, optimizer, comm.rank, steps)
        optimizer.state_dict()  # with a schedule, the step is made whole
        if comm.rank == 1:
            model[4] = nn.Linear(48, 10)
        with pytest.raises(rp.UsageError, match=REPLACED):
            run(model, optimizer, comm.rank, 4 if steps == 0 else 40, start=steps)

    rp.simulate(2, rank, timeout=60)


def test_parameters_that_are_no_business_of_the_wrapper_are_left_alone() -> None:
    """What was there when it was made, what has no gradient, and what another wrapper or optimizer has."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Sequential(make_model(), nn.Linear(10, 10))  # the second is trained elsewhere
        first, named = model[0], list(model[0].named_parameters())
        optimizer = rp.DistributedOptimizer(sgd(first.parameters()), named, policy="dense", comm=comm, model=model)
        model.append(nn.Linear(10, 10).requires_grad_(False))
        model.append(nn.Linear(10, 10))
        model[1].average = make_model(1)
        for param in model[3].parameters():
            nn.init.constant_(param, 0.1)  # the ranks share torch's generator
        second = wrap(model[3], comm, rp.Dense())
        model.append(nn.Linear(10, 10))  # as an adapter, with an optimizer of its own: this stopped all ranks
        own = sgd(model[4].parameters())
        for batch in batches(comm.rank, 20):
            model.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            second.step()
            own.step()

    rp.simulate(2, rank, timeout=60)


def test_a_learning_rate_in_a_tensor_that_differs_is_told_to_all_ranks() -> None:
    """Numbers were compared, and tensors left out: ranks drifted apart in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        rate = torch.tensor(0.1 * (1 + comm.rank))
        with pytest.raises(rp.RankMismatchError, match=r"'lr': 0\.1.* on rank 0, .*'lr': 0\.2.* on rank 1"):
            wrap(model, comm, rp.Dense(), lambda params: torch.optim.SGD(params, lr=rate))

    rp.simulate(2, rank)
