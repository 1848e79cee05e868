"""Settings whose effect shows only over several steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune.wire import index_code
from tests.training import make_model, run, same_bytes, sgd, train, weights, wrap

IWP = rp.IWP(0.05)


def only(fn: Any) -> Any:
    """Run on a single rank, where everything but the network is the same."""
    return rp.simulate(1, fn)[0]


def test_the_rms_serves_fifty_steps_and_is_then_read_again() -> None:
    def rank(comm: rp.comm.Communicator) -> list[float]:
        model = make_model()
        optimizer = wrap(model, comm, IWP, sgd)
        history = []
        for start in range(52):
            run(model, optimizer, comm.rank, 1, start=start)
            history.append(float(optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["rms"]))
        assert history[0] == pytest.approx(float(make_model()[0].weight.detach().double().square().mean().sqrt()))
        return history

    for history in rp.simulate(2, rank):
        assert len(set(history[:50])) == 1
        assert history[50] != history[49]
        assert history[50] == history[51]


def test_resuming_across_a_reading_of_the_rms() -> None:
    def resumed(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        first = wrap(model, comm, IWP)
        run(model, first, comm.rank, 45)
        again = make_model(seed=5)
        second = wrap(again, comm, IWP)
        again.load_state_dict(model.state_dict())
        second.load_state_dict(first.state_dict())
        run(again, second, comm.rank, 15, start=45)
        return weights(again)

    expected = rp.simulate(2, lambda comm: train(comm, IWP, steps=60)[0])
    assert same_bytes(rp.simulate(2, resumed)[0], expected[0])


def test_the_steady_ratio_leaves_warm_up_out() -> None:
    steps, warmup, numels = 12, 4, [4096, 3072]
    policy = rp.IWP(0.05, warmup=rp.Warmup(warmup))
    stats = rp.simulate(2, lambda comm: train(comm, policy, steps=steps)[1].stats())[0]
    k = sum(round(0.05 * n) for n in numels)
    per_step = index_code(k, sum(numels)).size / 2 + 4 * k + 4 * 602 + 12
    dense = 4 * (sum(numels) + 602)
    assert stats["steady_wire_ratio"] == pytest.approx(dense / per_step)
    assert stats["wire_ratio"] < stats["steady_wire_ratio"]
    assert stats["realised_density"] == pytest.approx(k / sum(numels))


def test_flushed_is_what_the_last_step_left() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        run(model, optimizer, comm.rank, 2)
        optimizer.flush()
        saved = optimizer.state_dict()
        assert saved["ringprune"]["flushed"]
        other = wrap(make_model(), comm, IWP)
        other.load_state_dict(saved)
        assert other.state_dict()["ringprune"]["flushed"]
        run(model, optimizer, comm.rank, 1)
        assert not optimizer.state_dict()["ringprune"]["flushed"]

    rp.simulate(2, rank)


@pytest.mark.parametrize("policy", [rp.IWP(1.0, clip_norm=0.01), rp.IWP(1.0, clip_norm_per_tensor=0.01)])
def test_the_bound_of_clipping_is_divided_by_the_root_of_the_ranks(policy: rp.Policy) -> None:
    """All ranks have the same batch, so that the average is as long as each rank's gradient."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=1.0))
        run(model, optimizer, 0, 1)
        norms = torch.stack([param.grad.norm() for param in model.parameters()])
        return norms.norm() if policy.clipping.norm else norms.max()

    for norm in rp.simulate(4, rank):
        assert float(norm) == pytest.approx(0.01 / 2, rel=1e-5)


def test_explored_positions_change_from_step_to_step() -> None:
    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05, explore=1.0))
        seen = []
        for start in range(3):
            run(model, optimizer, comm.rank, 1, start=start)
            seen.append(model[0].weight.grad.reshape(-1).nonzero().squeeze())
        return seen

    first, second, third = rp.simulate(2, rank)[0]
    assert len(first) == round(0.05 * 4096)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_groups_in_one_bucket_keep_their_own_nesterov() -> None:
    def loop(comm: rp.comm.Communicator | None) -> Tensor:
        model = make_model()
        groups = [
            {"params": list(model[0].parameters()), "nesterov": True},
            {"params": list(model[2].parameters()) + list(model[4].parameters()), "momentum": 0.5},
        ]
        optimizer: Any = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if comm is not None:
            optimizer = rp.DistributedOptimizer(optimizer, policy=rp.IWP(1.0), comm=comm)
        run(model, optimizer, 0, 10)
        return weights(model)

    assert torch.allclose(only(loop), loop(None), atol=2e-6)
