"""One run: N ranks as threads of this process train a task's model through the real exchange."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringprune.comm import Communicator, simulate
from ringprune.errors import NonFiniteGradientError
from ringprune.optimizer import DistributedOptimizer
from ringprune.simulation.spec import Spec
from ringprune.simulation.tasks import Data, Score, Task

__all__ = ["Outcome", "train"]

POINTS = 8
"""How often a run is judged on its way."""

ON_THE_WAY = 0.25
"""Share of the data held out that is used for that; at the end it is all."""

HOPELESS = 1.5
"""A run whose loss is this many times that of the untrained model is given up."""

PARTS = ("bytes_sent", "bytes_values", "bytes_indices", "bytes_dense", "bytes_headers")


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        value: what the task is judged by, of the model at the end; None if the run diverged.
        loss: nats per label on all data held out; None if the run diverged.
        bytes_sent: mean over the ranks, everything counted.
        dense_bytes: what dense fp32 would have sent in the same steps.
        parts: ``bytes_sent`` by content.
        curve: steps so far, bytes sent so far, loss on a part of the data held out, at the end on all of it.
        realised_density: share of the packed entries that were sent.
        seconds: of wall time.
        cpu_seconds: of processor time of the whole process.
    """

    value: float | None = None
    loss: float | None = None
    bytes_sent: float = 0.0
    dense_bytes: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    realised_density: float = 1.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def train(task: Task, spec: Spec, data: Data, *, rate: float, seed: int, ranks: int, steps: int) -> Outcome:
    """Train and judge.

    Every method sees the same: weights at the start, order of the data, clipping of each rank's own gradient and
    schedule are functions of task, seed, ranks and steps alone.

    Args:
        task: what is trained.
        spec: with which policy.
        data: the task's.
        rate: learning rate at its highest.
        seed: of weights, order and the policy's own draws.
        ranks: how many.
        steps: how many.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
    run = _Run(task, spec, data, model, data.order(steps, ranks, task.batch, seed), rate, seed)
    started, worked, diverged = time.perf_counter(), time.process_time(), False
    try:
        simulate(ranks, run.rank, timeout=None, one_at_a_time=True)
    except NonFiniteGradientError:
        diverged = True
    outcome = run.outcome(diverged=diverged)
    outcome.seconds, outcome.cpu_seconds = time.perf_counter() - started, time.process_time() - worked
    return outcome


class _Run:
    """What the ranks of one run share."""

    def __init__(
        self, task: Task, spec: Spec, data: Data, model: nn.Module, order: Tensor, rate: float, seed: int
    ) -> None:
        self.task, self.spec, self.data, self.order, self.rate, self.seed = task, spec, data, order, rate, seed
        self.steps, self.ranks = order.shape[0], order.shape[1]
        self.stats: list[dict[str, Any]] = [{} for _ in range(self.ranks)]
        self.final: Score | None = None
        self.losses: dict[int, float] = {}  # of rank 0's model, by the steps made until then
        self.sent: list[dict[int, float]] = [{} for _ in range(self.ranks)]
        self._model = model
        points = POINTS if self.steps >= 8 * POINTS else 1
        self._points = {round(self.steps * (i + 1) / points) for i in range(points)}

    def rank(self, comm: Communicator) -> None:
        """What one rank does."""
        model = copy.deepcopy(self._model)
        optimizer = DistributedOptimizer(
            self.task.optimizer(model.parameters()),
            named_parameters=model.named_parameters(),
            policy=self.spec.policy(),
            comm=comm,
            model=model,
            seed=self.seed,
            overlap=False,  # every method clips each rank's own gradient, which is there only after backward
        )
        draws = torch.Generator().manual_seed(self.seed * self.ranks + comm.rank)
        goes_on = self._judge(comm, 0, model, optimizer)
        for step in range(self.steps):
            if not goes_on:
                return
            self._step(step, comm.rank, model, optimizer, draws)
            if step + 1 == self.steps and self.spec.flush:
                optimizer.flush()
            if step + 1 in self._points:
                goes_on = self._judge(comm, step + 1, model, optimizer)

    def _step(
        self, step: int, rank: int, model: nn.Module, optimizer: DistributedOptimizer, draws: torch.Generator
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.task.rate(step, self.steps, self.rate)
        optimizer.zero_grad()
        torch.autograd.backward(self.data.loss(model, self.order[step, rank], draws))
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.task.clip)
        optimizer.step()

    def _judge(self, comm: Communicator, step: int, model: nn.Module, optimizer: DistributedOptimizer) -> bool:
        """Rank 0 judges its model, on the weights that all ranks share, and tells all whether to go on.

        All take those weights: with a schedule they make what is left of the last step together.
        """
        goes_on = torch.ones(1)
        with _judging(model, optimizer):
            self.stats[comm.rank] = optimizer.stats()
            self.sent[comm.rank][step] = float(self.stats[comm.rank]["bytes_sent"])
            if comm.rank == 0:
                score = self.data.score(model, 1.0 if step == self.steps else ON_THE_WAY)
                self.losses[step] = score.loss
                goes_on[0] = score.loss <= HOPELESS * self.losses[0]
                self.final = score if step == self.steps and goes_on else None
        return bool(comm.broadcast(goes_on, 0, name="whether to go on").wait())

    def outcome(self, *, diverged: bool) -> Outcome:
        """What it came to, of a run that was made to its end or given up."""
        made, ranks = max(self.losses), self.ranks
        mean = {key: sum(each[key] for each in self.stats) / ranks for key in PARTS}
        final = None if diverged else self.final
        return Outcome(
            value=None if final is None else final.value,
            loss=None if final is None else final.loss,
            bytes_sent=mean.pop("bytes_sent"),
            dense_bytes=made * 2 * (ranks - 1) / ranks * 4 * sum(p.numel() for p in self._model.parameters()),
            parts=mean,
            curve=[
                (step, sum(sent[step] for sent in self.sent) / ranks, loss)
                for step, loss in self.losses.items()
                if math.isfinite(loss)
            ],
            realised_density=self.stats[0]["realised_density"],
        )


@contextmanager
def _judging(model: nn.Module, optimizer: DistributedOptimizer) -> Iterator[None]:
    """Evaluation mode, on the weights that all ranks have in common."""
    shared = getattr(optimizer, "shared_weights", nullcontext)
    model.eval()
    with shared():
        yield
    model.train()
