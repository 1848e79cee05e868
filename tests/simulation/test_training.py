"""Single runs: fair to every method, repeatable, and their bytes are those of the formula."""

from collections.abc import Callable

import pytest
import torch

from ringprune.comm import Communicator
from ringprune.optimizer import DistributedOptimizer
from ringprune.simulation import training
from ringprune.simulation.spec import parse
from ringprune.simulation.tasks import TASKS, Task
from ringprune.simulation.training import Outcome, train
from tests.simulation.tiny import RANKS, TINY, Teacher

SPECS = ("dense", "iwp:density=0.1,roots=all", "dgc:density=0.1", "random_k:density=0.1,flush=1")
ENTRIES = 64 * 64 + 64 + 64 * 40 + 40


def made(spec: str, seed: int = 0, rate: float = 0.1, data: Teacher | None = None, task: Task = TINY) -> Outcome:
    return train(task, parse(spec), data or Teacher(), rate=rate, seed=seed, ranks=RANKS, steps=task.steps)


def test_all_methods_see_the_same_data_and_start_from_the_same_weights() -> None:
    seen, starts = [], []
    for spec in SPECS:
        data = Teacher()
        outcome = made(spec, data=data)
        seen.append(data.seen)
        starts.append(outcome.curve[0])
    order = Teacher().order(TINY.steps, RANKS, TINY.batch, 0)
    assert sum(seen[0].values()) == TINY.steps * RANKS
    assert set(seen[0]) == {tuple(batch) for step in order.tolist() for batch in step}
    assert all(other == seen[0] for other in seen)
    assert all(start == starts[0] for start in starts)


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_run_has_the_same_outcome(spec: str) -> None:
    one, other = made(spec), made(spec)
    assert (one.value, one.curve, one.bytes_sent, one.parts) == (
        other.value,
        other.curve,
        other.bytes_sent,
        other.parts,
    )


def test_seeds_differ() -> None:
    assert made("dense").value != made("dense", seed=1).value


def test_dense_sends_what_the_formula_says() -> None:
    outcome = made("dense")
    formula = TINY.steps * 2 * (RANKS - 1) / RANKS * 4 * ENTRIES
    assert outcome.dense_bytes == formula
    assert outcome.parts["bytes_dense"] == formula
    assert outcome.bytes_sent == formula + outcome.parts["bytes_headers"]
    assert outcome.curve[-1] == (TINY.steps, outcome.bytes_sent, outcome.loss)


def test_a_schedule_changes_nothing() -> None:
    """Ranks waited for each other for ever: with gradients clipped after backward, most buckets were never sent."""
    scheduled, dense = made("p3"), made("dense")
    assert (scheduled.value, scheduled.parts["bytes_dense"]) == (dense.value, dense.parts["bytes_dense"])
    assert [loss for _, _, loss in scheduled.curve] == [loss for _, _, loss in dense.curve]


def test_a_flush_is_counted() -> None:
    kept, flushed = made("random_k:density=0.1"), made("random_k:density=0.1,flush=1")
    packed = 2 * (RANKS - 1) / RANKS * 4 * (64 * 64 + 64 * 40)
    assert flushed.bytes_sent - kept.bytes_sent == pytest.approx(packed, rel=0.05)
    assert flushed.value != kept.value


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_a_run_that_diverges_has_no_value(rate: float) -> None:
    outcome = made("dense", rate=rate)
    assert outcome.value is None
    assert outcome.loss is None


def test_curves_have_points_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "POINTS", 3)
    assert [point[0] for point in made("dense").curve] == [0, 8, 16, 24]
    sent = [point[1] for point in made("dense").curve]
    assert sent == sorted(sent)
    assert sent[0] == 0


def test_one_failing_rank_leaves_nobody_waiting() -> None:
    class Broken(Teacher):
        def loss(self, model: torch.nn.Module, chosen: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
            if draws.initial_seed() == 2:
                raise OSError("disk on fire")
            return super().loss(model, chosen, draws)

    with pytest.raises(OSError, match="disk on fire"):
        made("dense", data=Broken())


def test_the_gradient_of_each_rank_is_clipped_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange starts after backward and clipping, whatever the method."""
    norms: list[float] = []
    step: Callable[..., object] = DistributedOptimizer.step

    def seen(self: DistributedOptimizer) -> object:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))))
        return step(self)

    monkeypatch.setattr(DistributedOptimizer, "step", seen)
    made("iwp:density=0.1")
    assert len(norms) == TINY.steps * RANKS
    assert max(norms) <= 1.0 + 1e-4
    assert max(norms) > 0.99, "the bound is reached"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_learns_and_its_order_is_a_function_of_the_seed(name: str) -> None:
    task = TASKS[name]
    data, random = task.data(), torch.Generator().manual_seed(0)
    assert torch.equal(data.order(4, 2, task.batch, 1), data.order(4, 2, task.batch, 1))
    assert not torch.equal(data.order(4, 2, task.batch, 1), data.order(4, 2, task.batch, 2))
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = task.learning_rates[0] / 20
    batch = data.order(1, 1, task.batch, 0)[0, 0]
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = data.loss(model, batch, random.manual_seed(0))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert min(losses) > 0


def test_the_rank_threads_are_real_ranks() -> None:
    """What is trained is wrapped by the real optimizer on the real simulated communicator, one per rank."""
    kinds: list[tuple[str, int]] = []
    init = DistributedOptimizer.__init__

    def noted(self: DistributedOptimizer, *arguments: object, comm: Communicator, **more: object) -> None:
        kinds.append((comm.kind, comm.rank))
        init(self, *arguments, comm=comm, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedOptimizer, "__init__", noted)
        made("dense")
    assert sorted(kinds) == [("simulated", rank) for rank in range(RANKS)]
