"""Save and resume: one file per rank, so that what a rank keeps to itself is kept too."""

import argparse
import os
from pathlib import Path
from typing import Any

import ranks
import torch

__all__ = ["Checkpoint"]

SAME = ("policy", "density", "density_warmup", "roots", "local_steps", "seed", "lr", "clip", "batch_size")


class Checkpoint:
    """The files ``PATH.rank0``, ``PATH.rank1``, ... of one run; a run that continues equals one that never stopped.

    Each rank saves all it has: the residuals of RingPrune and the running statistics of batch normalisation differ
    from rank to rank. Without ``--checkpoint`` nothing is saved.

    Args:
        args: the options of the run; ``--checkpoint`` is what the names of the files start with.
        steps: how many steps the run has.
        parts: what is saved, by name: anything with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, args: argparse.Namespace, steps: int, **parts: Any) -> None:
        self.run = {key: getattr(args, key) for key in SAME} | {"steps": steps, "ranks": ranks.size()}
        self.parts = parts
        path: Path | None = args.checkpoint
        self.file = path and path.with_name(f"{path.name}.rank{ranks.rank()}")

    def save(self, step: int) -> None:
        """Write the state after ``step`` steps; the files are replaced only when every rank has written its own."""
        if self.file is None:
            return
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"step": step, "run": self.run, "random": torch.get_rng_state()}
        state |= {"random_on_gpus": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_name(self.file.name + ".new")
        torch.save(state, fresh)
        ranks.barrier()
        os.replace(fresh, self.file)

    def load(self) -> int:
        """Continue where the files left off and return the number of steps done; 0 where there are none.

        Raises:
            ValueError: on every rank, with the reason of each rank that has one.
        """
        if self.file is None:
            return 0
        state, objection = self._read()
        found = ranks.gather((state and state["step"], objection))
        steps = {step for step, _ in found}
        objections = [reason for _, reason in found if reason]
        if objections or len(steps) > 1:
            raise ValueError("; ".join(objections) or f"{self.file}: the ranks' files are of different steps: {steps}")
        if state is None:
            return 0
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        if len(on_gpus := state.get("random_on_gpus", [])) == torch.cuda.device_count():  # else on another machine
            torch.cuda.set_rng_state_all(on_gpus)
        return int(state["step"])

    def _read(self) -> tuple[dict[str, Any] | None, str | None]:
        """What this rank's file holds, and why it cannot be continued from, if it cannot."""
        assert self.file is not None
        if not self.file.exists():
            return None, None
        try:
            state = torch.load(self.file, weights_only=True)
            return state, self._objection(state)
        except Exception as error:  # damaged, no checkpoint, or not this script's: the other ranks wait to hear of it
            reason = str(error).partition("\n")[0]
            return None, f"{self.file} is no checkpoint of this script ({type(error).__name__}: {reason})"

    def _objection(self, state: dict[str, Any]) -> str | None:
        """Why this rank cannot continue from ``state``, if it cannot."""
        if state["run"] == self.run:
            return None
        before = {key: value for key, value in state["run"].items() if value != self.run.get(key)}
        now = {key: self.run.get(key) for key in before}
        return f"{self.file} was written with {before}, this run has {now}; use another --checkpoint"
