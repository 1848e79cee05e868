"""Ranks that no longer hold the same hear of it, all of them: which tensor, after which exchange, on which ranks."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune import drift
from ringprune.drift import fingerprint
from ringprune.exchange import Exchange
from tests.training import batches, loss_of, make_model, run, same_bytes, sgd, train, weights, wrap

POLICIES = {
    "iwp": rp.IWP(0.05),
    "dgc": rp.DGC(0.05),
    "oktopk": rp.OkTopk(0.05),
    "dense": rp.Dense(),
    "local steps": rp.IWP(0.05, local_steps=2),
    "explored": rp.SlimDP(0.05, explore_by="rank"),
    "warm-up": rp.IWP(0.05, warmup=rp.Warmup(3)),
}


# -- the hash ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.data())
def test_one_entry_or_two_exchanged_change_the_hash(numel: int, data: st.DataObject) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    place, other = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, numel - 1))
    changed, exchanged = tensor.clone(), tensor.clone()
    changed[place] *= -1
    exchanged[[place, other]] = tensor[[other, place]]
    assert fingerprint(changed) != fingerprint(tensor)
    assert (fingerprint(exchanged) == fingerprint(tensor)) == (place == other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64, torch.bool]
)
def test_any_dtype_has_a_hash(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).to(dtype).view(3, 20)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert dtype == torch.bool or fingerprint(tensor) != fingerprint(tensor.flip(0))


def test_blocks_have_factors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tensors are hashed in parts; parts that change places are seen, and so is what follows the last."""
    monkeypatch.setattr(drift, "BLOCK", 64)
    drift._factors.cache_clear()
    tensor = torch.arange(256.0)
    try:
        hashes = {int(fingerprint(t)) for t in (tensor, tensor.roll(64), torch.cat([tensor, torch.zeros(1)]))}
    finally:
        drift._factors.cache_clear()
    assert len(hashes) == 3


def test_nan_equals_nan_and_nothing_is_nothing() -> None:
    assert fingerprint(torch.full((3,), torch.nan)) == fingerprint(torch.full((3,), torch.nan))
    assert fingerprint(torch.empty(0)) == 0 != fingerprint(torch.zeros(1))


# -- in training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_hold_the_same_train_on(policy: str) -> None:
    """It costs 16 bytes per rank and comparison, and changes nothing."""
    results = rp.simulate(3, lambda comm: train(comm, POLICIES[policy], sgd, 12))
    checked = rp.simulate(3, lambda comm: train(comm, POLICIES[policy], sgd, 12, check_every=3))
    assert torch.equal(checked[0][0], results[0][0])
    headers = [r[0][1].stats()["bytes_headers"] for r in (results, checked)]
    exchanges = 6 if policy == "local steps" else 12
    assert headers[1] - headers[0] == pytest.approx(exchanges // 3 * 2 * 16)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["iwp", "dense"])
def test_a_parameter_that_drifts_on_one_rank_raises_on_all(policy: str, overlap: bool) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[str, Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], overlap=overlap, check_every=4)
        run(model, optimizer, comm.rank, 2)
        saved = deepcopy([model.state_dict(), optimizer.state_dict()])
        if comm.rank == 1:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-6
        with pytest.raises(rp.RankMismatchError) as caught:
            run(model, optimizer, comm.rank, 5, start=2)
        assert optimizer.stats()["steps"] == 4
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run(model, optimizer, comm.rank, 6, start=2)  # goes on from the checkpoint, as the error asks for
        return str(caught.value), weights(model)

    messages, ends = zip(*rp.simulate(3, rank), strict=True)
    assert len(set(messages)) == 1 and all(same_bytes(ends[0], end) for end in ends)
    assert messages[0].startswith("after exchange 4 the ranks no longer hold the same: parameter '2.weight' on rank 1.")


def test_with_two_ranks_the_other_one_is_named() -> None:
    def rank(comm: rp.comm.Communicator) -> str:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["dense"], check_every=1)
        run(model, optimizer, comm.rank, 1)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(comm.rank)
        with pytest.raises(rp.RankMismatchError) as caught:
            run(model, optimizer, comm.rank, 1, start=1)
        return str(caught.value)

    message = rp.simulate(2, rank)[0]
    assert message.count("on rank 1") == drift.SHOWN and "and 3 more" in message


def test_local_weights_may_differ_and_shared_ones_may_not() -> None:
    def rank(comm: rp.comm.Communicator) -> str:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["local steps"], check_every=1)
        run(model, optimizer, comm.rank, 5)  # in the middle of an interval: weights differ
        assert optimizer._mode is not None
        with torch.no_grad():
            optimizer._mode._shared[0][0, 0] += comm.rank == 2
        with pytest.raises(rp.RankMismatchError) as caught:
            run(model, optimizer, comm.rank, 1, start=5)
        return str(caught.value)

    assert (
        "after exchange 3 the ranks no longer hold the same: the shared weight of '0.weight' on rank 2"
        in rp.simulate(3, rank)[0]
    )


@pytest.mark.parametrize("policy", ["iwp", "dgc", "oktopk"])
def test_an_index_set_that_differs_names_its_bucket(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = Exchange.agreed

    def spoilt(exchange: Exchange) -> dict[str, Tensor | None]:
        sets = agreed(exchange)
        return {k: v.flip(0) if exchange._setting.comm.rank == 2 and v is not None else v for k, v in sets.items()}

    monkeypatch.setattr(Exchange, "agreed", spoilt)

    def rank(comm: rp.comm.Communicator) -> str:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], check_every=2)
        with pytest.raises(rp.RankMismatchError) as caught:
            run(model, optimizer, comm.rank, 2)
        return str(caught.value)

    assert (
        "after exchange 2 the ranks no longer hold the same: the index set of bucket 0 on rank 2."
        in rp.simulate(4, rank)[0]
    )


@pytest.mark.parametrize("policy", ["iwp", "oktopk"])
def test_in_a_hierarchy_only_the_first_of_a_node_has_index_sets(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        return train(comm, POLICIES[policy], sgd, 6, hierarchical=True, check_every=2)[1].stats()

    assert rp.simulate(4, rank, ranks_per_node=2)[0]["steps"] == 6


def test_after_a_step_that_all_skip_the_count_goes_on_alike() -> None:
    def rank(comm: rp.comm.Communicator) -> int:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"], nonfinite="skip", check_every=2)
        for step, batch in enumerate(batches(comm.rank, 6)):
            optimizer.zero_grad()
            (loss_of(model, batch) * (torch.nan if step == comm.rank else 1.0)).backward()
            optimizer.step()
        return int(optimizer.stats()["steps"])

    assert set(rp.simulate(3, rank)) == {3}


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_period_that_is_none_is_refused(value: Any) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match="check_every"):
            wrap(make_model(), comm, "iwp", check_every=value)

    rp.simulate(1, rank)
