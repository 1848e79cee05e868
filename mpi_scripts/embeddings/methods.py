"""How a table's gradients are exchanged: Horovod's two ways, and RingPrune's."""

import difflib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from exchanges.errors import CannotRun
from exchanges.job import Job
from replays.model import Nothing
from torch import Tensor, nn

import ringprune as rp
from embeddings.words import Size, WordModel

__all__ = ["DEFAULTS", "HOROVOD", "METHODS", "Method", "Trained", "named"]

RATE = 1e-3
HOROVOD = "horovod"


class Trained(Protocol):
    """A model in training on one rank."""

    model: WordModel

    def step(self, words: Tensor) -> None:
        """One step of training."""
        ...

    def counted(self) -> float | None:
        """Bytes that this rank has sent for the table so far, by our own counters; None of Horovod, which has none."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


Build = Callable[[Job, Size, float, str], Trained]


@dataclass(frozen=True)
class Method:
    """One line of the table.

    Attributes:
        name: what it is called.
        about: one line.
        build: makes it on each rank.
    """

    name: str
    about: str
    build: Build


class _Horovod:
    def __init__(self, size: Size, scale: float, *, dense: bool) -> None:
        hvd = initialised()
        self.model = WordModel(nn.Embedding(size.rows, size.dim, sparse=True), size, scale)
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._optimizer: Any = hvd.DistributedOptimizer(
            inner, named_parameters=self.model.named_parameters(), sparse_as_dense=dense
        )

    def step(self, words: Tensor) -> None:
        self.model(words).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def counted(self) -> None:
        return None

    def close(self) -> None:
        del self.model, self._optimizer
        gc.collect()


class _Ours:
    """A table that is sharded, or one on every rank whose gradients travel as rows."""

    def __init__(self, job: Job, size: Size, scale: float, communicator: str, values: Any) -> None:
        join(job, communicator)
        self._comm = rp.connect(communicator)
        torch.manual_seed(0)  # the same table on all ranks
        table: nn.Module
        if values is None:
            table = nn.Embedding(size.rows, size.dim, sparse=True)
        else:
            table = rp.ShardedEmbedding(size.rows, size.dim, comm=self._comm, values=values)
        self.model = WordModel(table, size, scale)
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._optimizer = rp.DistributedOptimizer(
            inner,
            self.model.named_parameters(),
            policy="parallax" if values is None else "dense",
            comm=self._comm,
            model=self.model,
        )

    def step(self, words: Tensor) -> None:
        self.model(words).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def counted(self) -> float:
        stats = self._optimizer.stats()
        name = "table.weight"
        if name in stats["embeddings"]:
            return float(stats["embeddings"][name]["bytes_sent"])
        return float(sum(stats["parameters"][name].values()))

    def close(self) -> None:
        self._optimizer.close()
        self._comm.close()
        del self.model, self._optimizer
        gc.collect()


class _Alone:
    """Nothing is exchanged."""

    def __init__(self, size: Size, scale: float) -> None:
        self.model = WordModel(nn.Embedding(size.rows, size.dim, sparse=True), size, scale)
        self._optimizer = Nothing(self.model.parameters())

    def step(self, words: Tensor) -> None:
        self.model(words).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def counted(self) -> float:
        return 0.0

    def close(self) -> None:
        del self.model, self._optimizer
        gc.collect()


def _ours(values: str | None) -> Build:
    return lambda job, size, scale, communicator: _Ours(job, size, scale, communicator, values)


_TABLE = (
    Method(
        HOROVOD,
        "hvd.DistributedOptimizer as it is: an allgather of every token's row",
        lambda job, size, scale, communicator: _Horovod(size, scale, dense=False),
    ),
    Method(
        "horovod-dense",
        "the same with sparse_as_dense=True: an allreduce of the whole table",
        lambda job, size, scale, communicator: _Horovod(size, scale, dense=True),
    ),
    Method("parallax", "policy Parallax: rows added on each rank, then gathered or summed by owners", _ours(None)),
    Method("sharded", "ringprune.ShardedEmbedding: rows pulled from their owners, gradients pushed", _ours("fp32")),
    Method("sharded-fp16", "the same with rows and gradients of 16 bits", _ours("fp16")),
    Method("alone", "nothing is exchanged", lambda job, size, scale, communicator: _Alone(size, scale)),
)
METHODS = {method.name: method for method in _TABLE}
"""Every method by name."""

DEFAULTS = [name for name in METHODS if name != "alone"]
"""What is compared if nobody says."""


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names.

    Raises:
        ValueError: there is no such; says which there are.
    """
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name!r}: one of {', '.join(METHODS)}{hint}")
    return [METHODS[name] for name in dict.fromkeys(names)]


def join(job: Job, communicator: str) -> None:
    """Start the library that a communicator needs."""
    if communicator == "horovod":
        initialised()
    elif communicator == "torch":
        job.join_torch()


def initialised() -> Any:
    """Horovod, started.

    Raises:
        CannotRun: it is not installed.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise CannotRun(f"Horovod cannot be used here ({error})") from error
    if not hvd.is_initialized():
        hvd.init()
    return hvd
