"""Residual: what was sent leaves the state once, whoever reads it first; a step that is not made leaves no trace."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops, packing
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
        values, sent = packing.pack(state.next_residual, state.next_velocity if masks else None, indices, OFFSETS)
        state.leave(sent)
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
    taken: list[Any] = []
    for indices in (agreed, own):
        values, sent = packing.pack(state.next_residual, None, indices, [0, 6])
        state.leave(sent)
        taken.append(values.tolist())
    state.give_back(agreed, torch.tensor([0.5, 0.25]))
    state.commit()
    assert taken == [[1.0, 3.0], [4.0]]
    assert state.residual.tolist() == [0.5, 2.0, 0.25, 0.0, 5.0, 6.0]


def test_the_low_pass_filter_sees_what_has_left() -> None:
    state = Residual([0, 2], velocity=True, spare=False, device=CPU, low_pass=0.5)
    for _ in range(2):
        state.accumulate([torch.ones(2)], Correction([1.0], [0.0], [False]))
        values, sent = packing.pack(state.next_residual, state.next_velocity, torch.zeros(1, dtype=torch.int32), [0, 2])
        state.leave(sent)
        state.commit()
    assert values.tolist() == [1.0]  # nothing was left over of the first step
    assert state.residual.tolist() == [0.0, 1.0]  # 0, 0.5 * 1, then 0.5 + 0.5 * 1
    assert state.velocity is not None and state.velocity.tolist() == [0.0, 1.0]
