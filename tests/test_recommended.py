"""What the name "iwp" stands for is what the battery measures, for each optimizer, and trains as local steps do."""

import logging

import pytest
import torch

import ringprune as rp
from ringprune.policies import POLICIES
from ringprune.simulation.methods import METHODS
from ringprune.simulation.spec import parse
from tests.training import MakeOptimizer, adamw, make_model, run, sgd

RECOMMENDED = next(method for method in METHODS if method.name == "iwp")


def policy_of(text: str) -> rp.Policy:
    spec = parse(text)
    return POLICIES[spec.name](**dict(spec.arguments))


def test_for_sgd_it_is_what_the_battery_runs() -> None:
    wanted = policy_of(f"{RECOMMENDED.spec},density=0.3")
    assert rp.recommended(sgd(make_model().parameters())) == wanted


def test_for_adamw_it_is_what_the_battery_runs() -> None:
    wanted = policy_of(RECOMMENDED.other["gpt-adamw"])
    assert rp.recommended(adamw(make_model().parameters())) == wanted


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_name_trains_as_what_is_recommended(make: MakeOptimizer, caplog: pytest.LogCaptureFixture) -> None:
    """To the last bit; and who is surprised by ranks that differ was told, once."""

    def rank(comm: rp.comm.Communicator) -> list[torch.Tensor]:
        trained = []
        for named in (True, False):
            model = make_model()
            inner = make(model.parameters())
            policy = "iwp" if named else rp.recommended(inner)
            optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), comm=comm, policy=policy)
            run(model, optimizer, comm.rank, 6)
            optimizer.flush()
            trained.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
            optimizer.close()
        return trained

    with caplog.at_level(logging.WARNING, "ringprune"):
        results = rp.simulate(3, rank, timeout=60)
    assert all(torch.equal(results[0][0], weights) for result in results for weights in result)
    told = [record.message for record in caplog.records if 'policy "iwp"' in record.message]
    assert len(told) == 1
    every = "every 2 steps, and more rarely as the learning rate falls" if make is adamw else "every 4 steps ranks"
    assert every in told[0] and "shared_weights()" in told[0]


def test_momentum_is_shared_where_there_is_one_to_share() -> None:
    params = list(make_model().parameters())
    for optimizer, momentum in (
        (torch.optim.SGD(params, 0.1, momentum=0.9), "shared"),
        (torch.optim.SGD(params, 0.1), "own"),
        (torch.optim.AdamW(params), "shared"),
        (torch.optim.Adagrad(params), "own"),
    ):
        policy = rp.recommended(optimizer)
        assert policy.local_steps is not None
        assert policy.local_steps.momentum == momentum
