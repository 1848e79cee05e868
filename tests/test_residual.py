"""Residual: what was sent leaves the state once, whoever reads it first; a step that is not made leaves no trace."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune import ops
from ringprune.comm.communicator import Communicator
from ringprune.ops import sent as sent_module
from ringprune.residual import Correction, Residual, Selecting

OFFSETS = [0, 5, 5, 12, 40]
NUMEL = OFFSETS[-1]
CPU = torch.device("cpu")


class Plain:
    """The same state, of which what was sent leaves at once, by the ops for that."""

    def __init__(self, velocity: bool) -> None:
        self.residual, self.velocity = torch.zeros(NUMEL), torch.zeros(NUMEL) if velocity else None

    def copy(self) -> "Plain":
        """Another one."""
        other = Plain(self.velocity is not None)
        other.residual.copy_(self.residual)
        if other.velocity is not None and self.velocity is not None:
            other.velocity.copy_(self.velocity)
        return other

    def accumulate(self, grads: Sequence[Tensor], correction: Correction) -> None:
        """In place."""
        ops.accumulate(
            grads,
            self.residual,
            self.velocity,
            residual_out=self.residual,
            velocity_out=self.velocity,
            factors=correction.factors,
            momentum=correction.momentum,
            nesterov=correction.nesterov,
        )


def taken(state: Residual, indices: Tensor, masks: bool) -> Tensor:
    """Take values lazily, however many they are."""
    values = state.next_residual[indices]
    state.leave(ops.Sent(indices, None, masks and state.next_velocity is not None))
    return values


def same(state: Residual, plain: Plain) -> None:
    """Both read the same, and a second time."""
    for _ in range(2):
        assert torch.equal(state.residual, plain.residual)
        assert (state.velocity is None) == (plain.velocity is None)
        if state.velocity is not None and plain.velocity is not None:
            assert torch.equal(state.velocity, plain.velocity)


@settings(deadline=None)
@given(data=st.data(), velocity=st.booleans(), spare=st.booleans())
def test_it_is_the_state_that_ops_make_at_once(data: st.DataObject, velocity: bool, spare: bool) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    state, plain = Residual(OFFSETS, velocity=velocity, spare=spare, device=CPU), Plain(velocity)
    tensors = len(OFFSETS) - 1
    correction = Correction([1.0] * tensors, [0.9] * tensors, [data.draw(st.booleans())] * tensors)
    for _ in range(data.draw(st.integers(1, 6))):
        grads = [torch.randn(b - a, generator=draw) for a, b in pairwise(OFFSETS)]
        made = not spare or data.draw(st.booleans())
        after = plain.copy()
        after.accumulate(grads, correction)
        if data.draw(st.booleans()):
            state.accumulate(grads, correction)
        else:
            weights, counts = [torch.ones_like(grad) for grad in grads], [min(2, grad.numel()) for grad in grads]
            state.accumulate_select(grads, correction, weights, Selecting("magnitude", [0.0] * tensors, counts))
        indices = (torch.rand(NUMEL, generator=draw) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))).nonzero().view(-1)
        indices, masks = indices.int(), data.draw(st.booleans())
        values = taken(state, indices, masks)
        assert torch.equal(values, ops.take(after.residual, after.velocity if masks else None, indices, OFFSETS))
        if data.draw(st.booleans()):
            assert torch.equal(state.next_residual, after.residual)  # somebody looks before the rest is there
        if data.draw(st.booleans()):
            rest = torch.randn(indices.numel(), generator=draw)
            state.give_back(indices, rest)
            ops.give_back(after.residual, indices, rest)
        if made:
            state.commit()
            plain = after
        else:
            state.rollback()
        if data.draw(st.booleans()):
            same(state, plain)
    same(state, plain)


def test_a_second_set_does_not_displace_the_first() -> None:
    """Every rank may send entries of its own beside the agreed ones; a rest belongs to those that were rounded."""
    state = Residual([0, 6], velocity=False, spare=True, device=CPU)
    state.accumulate([torch.arange(1.0, 7.0)], Correction([1.0], [0.0], [False]))
    agreed, own = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for indices in (agreed, own):
        state.leave(ops.Sent(indices))
        assert not state.waits
    state.give_back(agreed, torch.tensor([0.5, 0.25]))
    state.commit()
    assert state.residual.tolist() == [0.5, 2.0, 0.25, 0.0, 5.0, 6.0]


def test_a_set_is_let_go_with_the_state_it_left() -> None:
    state = Residual([0, 6], velocity=False, spare=True, device=CPU)
    alive: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        state.accumulate([torch.ones(6)], Correction([1.0], [0.0], [False]))
        indices, rest = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2)
        alive += [weakref.ref(indices), weakref.ref(rest)]
        state.leave(ops.Sent(indices))
        state.give_back(indices, rest)
        state.commit()
        del indices, rest
        assert [here() is None for here in alive] == [True] * (len(alive) - 2) + [False] * 2


@pytest.mark.parametrize("spare", [False, True])
def test_the_low_pass_filter_sees_what_has_left(spare: bool) -> None:
    state = Residual([0, 2], velocity=True, spare=spare, device=CPU, low_pass=0.5)
    assert not state.waits
    for _ in range(2):
        state.accumulate([torch.ones(2)], Correction([1.0], [0.5], [False]))
        state.leave(ops.Sent(torch.zeros(1, dtype=torch.int32), None, True))
        state.commit()
    assert state.residual.tolist() == [0.0, 1.25]  # 0, 0.5 * 1, then 0.5 + 0.5 * 1.5
    assert state.velocity is not None
    assert state.velocity.tolist() == [0.0, 1.5]


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("velocity", [False, True])
def test_a_step_begins_from_what_is_expected_of_a_state_that_all_sent_has_left(velocity: bool, spare: bool) -> None:
    state, correction = Residual([0, 2], velocity=velocity, spare=spare, device=CPU), Correction([1.0], [0.5], [False])
    state.expected = torch.tensor([0.25, 0.5])
    assert state.waits is not velocity
    state.accumulate([torch.ones(2)], correction)
    state.leave(ops.Sent(torch.zeros(1, dtype=torch.int32), None, velocity))
    state.commit()
    for made in [False, True] if spare else [True]:  # a step that is not made leaves no trace
        state.accumulate([torch.ones(2)], correction)
        assert state.next_residual.tolist() == [0.75, 1.5 if velocity else 1.0]
        (state.commit if made else state.rollback)()
    assert state.residual.tolist() == [0.75, 1.5 if velocity else 1.0]


@pytest.mark.parametrize("share", [1e-3, 0.1, 0.5, 0.7, 0.999])
def test_the_low_pass_filter_rounds_each_operation(device: str, share: float) -> None:
    """As torch does one after the other, also where the loop is shared out among threads."""
    numel, draw = 200_000, torch.Generator().manual_seed(5)
    state = Residual([0, numel], velocity=False, spare=True, device=torch.device(device), low_pass=share)
    kept = torch.zeros(numel, device=device)
    for _ in range(3):
        grad = torch.randn(numel, generator=draw).to(device)
        state.accumulate([grad], Correction([1.0], [0.0], [False]))
        kept = ((kept + grad) - kept) * share + kept
        state.commit()
        assert torch.equal(state.residual, kept)


def test_a_plain_step_writes_nothing_entry_by_entry(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this is for; where another step reads the state in between, it leaves at once."""
    calls: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: calls.append(name) or op(*given)

    for module, name in ((ops, "take"), (sent_module, "take"), (ops, "give_back")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))

    def train(comm: Communicator, density: float) -> None:
        model = torch.nn.Linear(40, 30, bias=False, device=device)
        torch.nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        policy = rp.IWP(density, min_numel=1, warmup=rp.Warmup(steps=0), values="fp16")
        optimizer = rp.DistributedOptimizer(sgd, model.named_parameters(), policy=policy, comm=comm)
        for _ in range(3):
            model(torch.randn(2, 40, device=device)).square().sum().backward()
            optimizer.step()
        optimizer.close()

    rp.simulate(2, partial(train, density=0.01), timeout=60)
    assert not calls
    rp.simulate(2, partial(train, density=0.3), timeout=60)
    assert calls.count("take") == calls.count("give_back") == 6  # ranks times steps
