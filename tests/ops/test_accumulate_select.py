"""accumulate_select: one pass gives the bits of accumulate, importance and select, whatever it remembers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.ops import Hints
from tests.ops.cases import (
    FLOATS,
    INSTRUCTIONS,
    Backend,
    assert_same_bits,
    fill,
    flat_tensors,
    tensor_lists,
)
from tests.ops.definitions import SCORES, accumulated, scored, selected

INF, NAN = float("inf"), float("nan")


@dataclass
class Step:
    """One call: what it is given, and state that goes on from call to call."""

    grads: list[Tensor]
    weights: list[Tensor]
    residual: Tensor
    velocity: Tensor | None
    counts: list[int]
    score: str = "ratio"
    parameters: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    momentum: list[float] = field(default_factory=list)
    nesterov: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        tensors = len(self.grads)
        self.parameters = self.parameters or [0.05] * tensors
        self.factors = self.factors or [1.0] * tensors
        self.momentum = self.momentum or [0.9] * tensors
        self.nesterov = self.nesterov or [False] * tensors

    def expected(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Positions, residual, velocity, and numbers of entries that are not finite, by the definitions."""
        numbers = (self.factors, self.momentum, self.nesterov)
        residual, velocity = accumulated(self.grads, self.residual, self.velocity, *numbers)
        scores = scored(residual, self.weights, self.score, self.parameters)
        offsets = [0]
        for grad in self.grads:
            offsets.append(offsets[-1] + grad.numel())
        nonfinite = torch.tensor([int((~grad.isfinite()).sum()) for grad in self.grads], dtype=torch.int64)
        return selected(scores, offsets, self.counts), residual, velocity, nonfinite

    def run(self, backend: Backend, hints: Hints, *, in_place: bool = False) -> tuple[Tensor, ...]:
        """Make the call on copies on the backend's device; the same results as :meth:`expected`, on the CPU."""
        to = backend.device
        residual = self.residual.to(to, copy=True)
        velocity = None if self.velocity is None else self.velocity.to(to, copy=True)
        out, velocity_out = residual, velocity
        if not in_place:
            out = torch.full_like(residual, 7.0)
            velocity_out = None if velocity is None else torch.full_like(velocity, 7.0)
        function = backend.op("accumulate_select")
        remembered: dict[str, Any] = {"hints": hints}
        if backend.name == "reference":
            remembered = {"hints": hints.keys, "tally": hints.tally}
        positions, nonfinite = function(
            [grad.to(to) for grad in self.grads],
            residual,
            velocity,
            [weight.to(to) for weight in self.weights],
            residual_out=out,
            velocity_out=velocity_out,
            factors=self.factors,
            momentum=self.momentum,
            nesterov=self.nesterov,
            score=self.score,
            parameters=self.parameters,
            counts=self.counts,
            **remembered,
        )
        results = positions, out, velocity_out, nonfinite
        return tuple(x if x is None else x.cpu() for x in results)

    def check(self, backend: Backend, hints: Hints, *, in_place: bool = False) -> Tensor:
        """Compare :meth:`run` with :meth:`expected`; returns the positions."""
        found = self.run(backend, hints, in_place=in_place)
        for got, wanted in zip(found, self.expected(), strict=True):
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert_same_bits(got, wanted)
        return found[0]


def forgetful(backend: Backend, tensors: int) -> Hints:
    return Hints.none(tensors, torch.device(backend.device))


@pytest.mark.parametrize("score", SCORES)
@given(data=st.data())
def test_small_buckets(backend: Backend, score: str, data: st.DataObject) -> None:
    grads = data.draw(tensor_lists())
    tensors, numel = len(grads), sum(grad.numel() for grad in grads)
    several = {"min_size": tensors, "max_size": tensors}
    step = Step(
        grads,
        [fill(tuple(grad.shape), data.draw(st.sampled_from(FLOATS)), "specials", i) for i, grad in enumerate(grads)],
        data.draw(flat_tensors(numel)),
        data.draw(st.none() | flat_tensors(numel)),
        [data.draw(st.integers(0, grad.numel())) for grad in grads],
        score,
        data.draw(st.lists(st.sampled_from([0.0, 1e-8, 0.1, 1e30]), **several)),
        data.draw(st.lists(st.sampled_from([1.0, 1 / 3, 0.0]), **several)),
        data.draw(st.lists(st.sampled_from([0.9, 1.0, 1 / 3]), **several)),
        data.draw(st.lists(st.booleans(), **several)),
    )
    hints = forgetful(backend, tensors)
    for in_place in (True, False, True):  # with hints from the second on
        step.check(backend, hints, in_place=in_place)


def reading(step: Step, backend: Backend, hints: Hints) -> None:
    """Compare a large step with torch.topk: the definitions in Python would take minutes."""
    positions, residual, velocity, _ = step.run(backend, hints)
    numbers = (step.factors, step.momentum, step.nesterov)
    wanted, wanted_velocity = accumulated(step.grads, step.residual, step.velocity, *numbers)
    assert_same_bits(residual, wanted)
    assert (velocity is None) == (wanted_velocity is None)
    scores = scored(residual, step.weights, step.score, step.parameters)
    start = written = 0
    for grad, count in zip(step.grads, step.counts, strict=True):
        mine = scores[start : start + grad.numel()]
        chosen = positions[written : written + count].long() - start
        order = torch.sort(mine, descending=True, stable=True).indices[:count]  # stable: ties by position
        assert torch.equal(chosen, order.sort().values)
        start, written = start + grad.numel(), written + count
    step.residual, step.velocity = residual, velocity
    step.residual[positions.long()] = 0.0


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_large_buckets_over_many_steps(backend: Backend, density: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [70_001, 300, 5, 120_000, 1, 64, 9_000]
    hints = forgetful(backend, len(numels))
    numel = sum(numels)
    step = Step(
        [],
        [torch.randn(n, generator=generator).to(dtype) for n in numels],
        torch.zeros(numel),
        torch.zeros(numel),
        [max(1, round(density * n)) for n in numels],
        parameters=[0.8] * len(numels),
        factors=[1.0] * len(numels),
        momentum=[0.9] * len(numels),
        nesterov=[False] * len(numels),
    )
    for _ in range(8):
        step.grads = [(torch.randn(n, generator=generator) * n**-0.5).to(dtype) for n in numels]
        reading(step, backend, hints)
    assert hints.counts()["tensors"] == 8 * len(numels)


@pytest.mark.parametrize("with_velocity", [True, False])
def test_results_that_go_past_the_caches(backend: Backend, with_velocity: bool) -> None:
    """From about four million entries on, outputs apart from the inputs are written past the CPU's caches."""
    generator = torch.Generator().manual_seed(0)
    numels = [1_000_003, 2, 61, 0, 3_300_001 if backend.name != "emulated" else 300_001]
    state = torch.randn(sum(numels), generator=generator)
    step = Step(
        [torch.randn(n, generator=generator) for n in numels],
        [torch.randn(n, generator=generator) for n in numels],
        state,
        state.flip(0) if with_velocity else None,
        [n // 100 for n in numels],
    )
    apart = step.run(backend, forgetful(backend, len(numels)))
    in_place = step.run(backend, forgetful(backend, len(numels)), in_place=True)
    for got, wanted in zip(apart, in_place, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(got, wanted)
    numbers = (step.factors, step.momentum, step.nesterov)
    residual, velocity = accumulated(step.grads, step.residual, step.velocity, *numbers)
    assert_same_bits(apart[1], residual)
    if velocity is not None:
        assert_same_bits(apart[2], velocity)


@pytest.mark.parametrize("others", [0, 2_000_000], ids=["small", "large"])
def test_a_hint_that_lets_few_through_is_followed_by_one_that_fits(backend: Backend, others: int) -> None:
    """Where scores lie close together, as after a hundred steps of training, a guess let five times as many through.

    They thin out exponentially, so the next hint is known from how many this one lets through: fewer than aimed at.
    What chance does to it, of a few hundred keys between threshold and hint, is a fortieth.
    """
    if backend.name == "reference":
        pytest.skip("the reference keeps no hints")
    n, count = 200_000, 2_000
    generator = torch.Generator().manual_seed(0)
    scores = 1 + 0.05 * torch.empty(n).exponential_(generator=generator)
    grads = [scores, torch.zeros(others)]
    step = Step(
        grads, [torch.ones_like(grad) for grad in grads], torch.zeros(n + others), None, [count, 0], "magnitude"
    )
    hints = forgetful(backend, 2)
    hints.keys[0] = torch.tensor([int(torch.topk(scores, 2_300).values[-1].view(torch.int32)), 1280])
    reading(step, backend, hints)
    key, margin = hints.keys[0].tolist()
    aim = count * margin / 1024
    aim += 3 * aim**0.5
    assert 0.9 * aim < int((scores.view(torch.int32) >= key).sum()) < 1.1 * aim
    assert hints.counts() == {"tensors": 1, "cold": 0, "missed": 0, "overflowed": 0}


@pytest.mark.parametrize("jump", [1e-3, 0.5, 3.0, 1e3])
def test_hints_that_do_not_fit_cost_a_read_and_no_entry(backend: Backend, jump: float) -> None:
    """Gradients grow or shrink from one step to the next, so that hints are far too low or far too high."""
    generator = torch.Generator().manual_seed(1)
    n = 200_000
    weights = [torch.randn(n, generator=generator)]
    hints = forgetful(backend, 1)
    scale = 1.0
    for _ in range(4):
        grads = [torch.randn(n, generator=generator) * scale]
        reading(Step(grads, weights, torch.zeros(n), None, [2_000]), backend, hints)
        scale *= jump
    seen = hints.counts()
    if backend.name == "reference":
        return
    assert seen["tensors"] == 4
    assert seen["cold"] == 1
    assert seen["missed"] == (3 if jump < 1 else 0)
    if jump != 3.0:  # then they fit where several threads have room each, and do not where there is one
        assert (seen["overflowed"] > 0) == (jump > 1)


@pytest.mark.parametrize(
    ("n", "count"), [(64, 1), (2_048, 20), (4_000, 40), (9_408, 9), (9_408, 94), (100_000, 100), (200_000, 10_000)]
)
@pytest.mark.parametrize("disturbance", [1.0, 1e-3, 1e3, NAN])
def test_steady_scores_are_found_at_the_first_read(backend: Backend, n: int, count: int, disturbance: float) -> None:
    """And a step that is out of the way (a spike, an overflow of the loss scale) is forgotten within three steps."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=generator)]
    hints = forgetful(backend, 1)
    for number in range(25):
        grads = [torch.randn(n, generator=generator) * (disturbance if number == 5 else 1.0)]
        step = Step(grads, weights, torch.zeros(n), None, [count], parameters=[1.0])
        if number == 5:
            step.run(backend, hints)
        else:
            reading(step, backend, hints)
        if number == 9:
            seen = hints.counts()
    assert seen["missed"] + seen["overflowed"] <= (0 if disturbance == 1.0 else 4)
    last = hints.counts()
    if backend.name != "reference":
        assert last == seen | {"tensors": 25} and last["cold"] == 1


@pytest.mark.parametrize("n", [50, 3_000, 50_000, 300_000])
@pytest.mark.parametrize("values", [(1.0,), (0.0, 1.0), (1.0, 2.0), (0.0, 1e-45), (INF, 1.0), (NAN, 1.0)])
def test_ties_without_number(backend: Backend, n: int, values: tuple[float, ...]) -> None:
    """Far more equal scores than are wanted: the lowest positions win, hint or no hint."""
    generator = torch.Generator().manual_seed(2)
    grads = [torch.tensor(values)[torch.randint(0, len(values), (n,), generator=generator)]]
    hints = forgetful(backend, 1)
    for _ in range(3):
        step = Step(grads, [torch.ones(n)], torch.zeros(n), None, [n // 50], "magnitude")
        positions = step.run(backend, hints)[0]
        scores = grads[0].abs()
        keys = torch.where(scores.isnan(), INF, scores)
        order = torch.sort(keys, descending=True, stable=True).indices[: n // 50]
        assert torch.equal(positions.long(), order.sort().values)


def test_fewer_come_back_than_have_a_score(backend: Backend) -> None:
    n = 100_000
    grads = [torch.zeros(n), torch.zeros(0), torch.zeros(n), torch.zeros(3)]
    grads[0][::1000] = 1.0
    hints = forgetful(backend, 4)
    for _ in range(3):
        step = Step(grads, [torch.ones_like(g) for g in grads], torch.zeros(2 * n + 3), None, [500, 0, 1_000, 3])
        positions = step.run(backend, hints)[0].tolist()
        assert positions[:100] == list(range(0, n, 1000))
        assert positions[100:] == [ops.PAD] * 1403
    seen = hints.counts()
    assert seen["missed"] == seen["overflowed"] == 0


def test_nothing_wanted_is_accumulated_all_the_same(backend: Backend) -> None:
    hints = forgetful(backend, 2)
    grads = [torch.ones(40_000), torch.ones(2)]
    step = Step(grads, [torch.ones(40_000), torch.ones(2)], torch.zeros(40_002), torch.zeros(40_002), [0, 0])
    positions = step.check(backend, hints)
    assert positions.shape == (0,)
    assert hints.counts() == {"tensors": 0, "cold": 0, "missed": 0, "overflowed": 0}
    assert hints.keys.count_nonzero() == 0


@pytest.mark.parametrize(
    ("grad", "weight", "parameter", "count", "expected"),
    [
        pytest.param([1.0, 2.0, 0.0], [0.0, 0.0, 0.0], 0.0, 2, [0, 2], id="zero weights: NaN, then infinities tie"),
        pytest.param([1.0, 2.0, 0.0], [0.0, 0.0, 0.0], 0.0, 1, [2], id="0 / 0 is NaN and first"),
        pytest.param([1e-45, 2e-45, 0.0], [1.0, 1.0, 1.0], 0.0, 3, [0, 1, -1], id="denormals count, zero does not"),
        pytest.param([NAN, INF, 1.0], [1.0, 1.0, 1.0], 0.0, 2, [0, 1], id="NaN, then infinity"),
        pytest.param([1.0, 1.0, 1.0], [INF, NAN, 1.0], 0.0, 3, [1, 2, -1], id="weights that are not finite"),
        pytest.param([1.0, -3.0, 2.0], [1.0, 1.0, 1.0], 0.0, 3, [0, 1, 2], id="all of them"),
        pytest.param([5.0], [2.0], 0.0, 1, [0], id="one entry"),
    ],
)
def test_special_numbers(
    backend: Backend, grad: list[float], weight: list[float], parameter: float, count: int, expected: list[int]
) -> None:
    hints = forgetful(backend, 1)
    for _ in range(2):
        step = Step(
            [torch.tensor(grad)], [torch.tensor(weight)], torch.zeros(len(grad)), None, [count], parameters=[parameter]
        )
        assert step.check(backend, hints).tolist() == expected


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [150_000, 3, 100_000]
    step = Step(
        [torch.randn(n, generator=generator).round(decimals=2) for n in numels],
        [torch.randn(n, generator=generator).round(decimals=1) for n in numels],
        torch.zeros(sum(numels)),
        torch.zeros(sum(numels)),
        [7_000, 1, 1_000],
    )
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        hints = forgetful(backend, 3)
        results += [step.run(backend, hints), step.run(backend, hints)]
    for result in results:
        for got, first in zip(result, results[0], strict=True):
            assert_same_bits(got, first)


@pytest.mark.parametrize(("most", "name"), INSTRUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_instruction_set_gives_the_same_bits(
    instructions: Callable[[int], str], most: int, name: str, dtype: torch.dtype
) -> None:
    if instructions(most) != name:
        pytest.skip(f"this processor has no {name}")
    native = Backend("native")
    for style in ("normal", "ties", "specials"):
        for score in SCORES:
            for nesterov, with_velocity in ((False, False), (False, True), (True, True)):
                n = 2_600
                step = Step(
                    [fill((n,), dtype, style, 1)],
                    [fill((n,), dtype, style, 2)],
                    fill((n,), torch.float32, style, 3),
                    fill((n,), torch.float32, style, 4) if with_velocity else None,
                    [300],
                    score,
                    nesterov=[nesterov],
                )
                hints = forgetful(native, 1)
                step.check(native, hints)
                step.check(native, hints)
