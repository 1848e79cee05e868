"""What a run shows and leaves behind: progress on rank 0, curves of the loss, speed, and a JSON file."""

import argparse
import json
import os
import sys
import time
from typing import Any

import ranks
import torch
from account import mean_over_ranks, stats_of
from torch import Tensor
from tqdm import tqdm

__all__ = ["Journal"]


class Journal:
    """Follows one run.

    The clock runs from the end of the first step, and stands still in validation and while a checkpoint is written.
    The loss is kept on the device until a point of the curve is due, so that following the run does not slow it down.

    Args:
        task: what is learned, for example ``"digits"``.
        metric: what validation measures, for example ``"validation accuracy"``.
        args: the options of the run.
        optimizer: as returned by ``distribute``.
        model: what is trained.
        steps: how many steps the run has.
    """

    def __init__(
        self,
        task: str,
        metric: str,
        args: argparse.Namespace,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        steps: int,
    ) -> None:
        self.task, self.metric, self.args, self.steps = task, metric, args, steps
        self.optimizer, self.model = optimizer, model
        self.done = self.resumed_at = 0
        self.bytes_before = 0.0
        self.seconds = 0.0
        self.timed_steps = 0
        self.value = float("nan")
        self.curve: dict[str, list[float]] = {"steps": [], "bytes": [], "loss": []}
        self.validation: dict[str, list[float]] = {"steps": [], "bytes": [], "value": []}
        self._losses: list[Tensor] = []
        self._every = max(1, steps // 100)
        self._last: float | None = None
        self._bar: tqdm[None] | None = None
        if args.log_file and (trouble := ranks.gather(self._trouble())[0]):
            raise SystemExit(trouble)

    def step(self, loss: Tensor) -> None:
        """Take note of one training step and its loss on this rank."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds += now - self._last
            self.timed_steps += 1
        self._last = now
        self.done += 1
        self._losses.append(loss.detach())
        if self.done % self._every == 0 or self.done == self.steps:
            self._point()
        self._show()

    def due(self) -> bool:
        """Whether it is time to validate and to save."""
        every = self.args.validate_every
        return self.done in (self.steps, self.args.stop_at) or (every > 0 and self.done % every == 0)

    def validated(self, value: float) -> None:
        """Take note of the metric, the same number on every rank."""
        self.value = value
        _append(self.validation, steps=self.done, bytes=self._bytes(), value=value)

    def go_on(self) -> None:
        """Start the clock again after something that is not training."""
        self._last = time.perf_counter()

    def finish(self) -> dict[str, Any]:
        """Average what the ranks saw; rank 0 shows the result and writes ``--log-file``. Returns what is written."""
        curves = ranks.gather(self.curve)
        stats = mean_over_ranks(ranks.gather(self._stats()))
        record = {
            "task": self.task,
            "policy": self.args.policy,
            "ranks": ranks.size(),
            "seed": self.args.seed,
            "learning_rate": self.args.lr,
            "batch_size": self.args.batch_size,
            "metric": self.metric,
            "value": self.value,
            "steps": self.done,
            "steps_per_second": self.timed_steps / self.seconds if self.seconds else 0.0,
            "stats": stats,
            "curve": {key: _mean_of_lists([curve[key] for curve in curves]) for key in self.curve},
            "validation": self.validation,
        }
        if ranks.rank() == 0:
            self._write(record)
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {key: vars(self)[key] for key in self._kept} | {"bytes_before": self._bytes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the journal of an earlier run; the stats count from here on, the curves continue."""
        vars(self).update(state)
        self.resumed_at = self.done

    _kept = ("done", "seconds", "timed_steps", "value", "curve", "validation", "_losses")

    def _stats(self) -> dict[str, Any]:
        return stats_of(self.optimizer, self.model, self.args.policy, ranks.size(), self.done - self.resumed_at)

    def _bytes(self) -> float:
        sent: float = self._stats()["bytes_sent"]
        return self.bytes_before + sent

    def _point(self) -> None:
        loss = torch.stack(self._losses).mean().item()
        self._losses.clear()
        _append(self.curve, steps=self.done, bytes=self._bytes(), loss=loss)

    def _show(self) -> None:
        """On a terminal a bar; elsewhere, as under mpirun, a line for every twentieth of the way."""
        if ranks.rank() != 0:
            return
        loss = self.curve["loss"][-1] if self.curve["loss"] else float("nan")
        if sys.stderr.isatty():
            self._bar = self._bar or tqdm(total=self.steps, initial=self.done - 1, unit="step", desc=self.task)
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update()
        elif self.done * 20 // self.steps > (self.done - 1) * 20 // self.steps:
            speed = f"  {self.timed_steps / self.seconds:.1f} steps/s" if self.seconds else ""
            _say(f"{self.task}: step {self.done}/{self.steps}  loss {loss:.3f}{speed}")

    def _trouble(self) -> str | None:
        """Why rank 0 could not write ``--log-file``: told now, not when all has been trained."""
        path = self.args.log_file
        if ranks.rank() != 0:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--log-file {path}: {error.strerror}"
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            return f"--log-file {path} is no file that can be written"
        return None

    def _write(self, record: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.close()
        stats = record["stats"]
        sent = stats["bytes_sent"] / max(1, stats["steps"]) / 1e3
        _say(
            f"{self.task}, {self.args.policy} on {ranks.size()} ranks: {self.metric} {self.value:.4f}, "
            f"{record['steps_per_second']:.1f} steps/s, {sent:,.1f} kB per rank and step, "
            f"wire ratio {stats['wire_ratio']:.1f} ({stats['steady_wire_ratio']:.1f} after warm-up)"
        )
        if self.args.log_file:
            self.args.log_file.write_text(json.dumps(record, indent=1) + "\n")


def _say(line: str) -> None:
    """Text and line end in one write: horovodrun puts its tag between two."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _append(curve: dict[str, list[float]], **point: float) -> None:
    for key, number in point.items():
        curve[key].append(number)


def _mean_of_lists(lists: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*lists, strict=True)]
