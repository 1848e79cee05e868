"""An embedding whose rows live on their owners: a rank keeps a share of the table, and pulls what a batch looks up."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ringprune.comm import connect
from ringprune.comm.communicator import Communicator, is_communicator
from ringprune.counter_rng import words
from ringprune.errors import ArgumentTypeError, ConfigurationError, RingPruneError
from ringprune.plan import gather_texts, shake_hands
from ringprune.reduction import Mean
from ringprune.sharding import NodeMessages, Owners, RowMessages, RowValues, Wire, dtype_of
from ringprune.validation import as_int, flag, one_of, whole_number

__all__ = ["ShardedEmbedding", "any_embeddings", "embedding_of"]

BLOCK = 1 << 16
"""Rows of the table that are drawn at a time, so that all of it never is in memory."""

_embeddings: "WeakSet[ShardedEmbedding]" = WeakSet()
"""All that there are: an optimizer knows only their weights."""

_embeddings_lock = Lock()
"""Held while they are added to or looked through: simulated ranks are threads."""


class ShardedEmbedding(nn.Module):
    """``nn.Embedding`` for tables of which a batch touches little (Parallax's sparse path, arXiv 1808.02621).

    Every rank owns a share of the rows. A forward pass pulls the rows that the batch looks up, each once, from their
    owners; the backward pass pushes their gradients back, and the owner's ``weight.grad`` is the average over all
    ranks, sparse. Whatever optimizer has ``weight`` steps on it: one that takes sparse gradients (SGD, Adagrad,
    SparseAdam), inside a :class:`ringprune.DistributedOptimizer` or beside it. A rank sends 2 (P-1)/P of its batch's
    unique rows per step, where a gather of gradients sends (P-1) times its own.

    All ranks make each call together, whether training or evaluating: construct, forward, backward, ``state_dict()``.
    A rank without a batch looks up an empty tensor.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: entries of a row.
        padding_idx: a row that gets no gradient; zero at first.
        comm: a communicator, which is duplicated; the name of one, or None for the default of
            :func:`ringprune.connect`.
        partitions: how many parts the table is cut into, one after the other on the ranks; None is one per rank
            (see :func:`ringprune.search_partitions`).
        hierarchical: only the first rank of each node owns rows; a node's ranks ask for what they look up together, and
            sum their gradients, before anything leaves the node.
        values: how rows and gradients travel between owners: ``"fp32"`` as they are; ``"fp16"`` or ``"bf16"`` rounded,
            and what rounding drops is not kept.
        average: average gradients over the ranks, as ``hvd.Average`` does; False sums them.
        seed: of the first values, normal as ``nn.Embedding``'s; they do not depend on the number of ranks.
        device: where rows live.
        dtype: of the rows; torch's default.

    Attributes:
        weight: shape ``(rows of this rank, embedding_dim)``, this rank's share.
        owners: who owns which row.
        lookups: entries looked up by this rank, of which ``pulled`` rows were pulled.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
        RankMismatchError: on all ranks, when they give different arguments.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        comm: Communicator | str | None = None,
        partitions: int | None = None,
        hierarchical: bool = False,
        values: RowValues = "fp32",
        average: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where, own = torch.device(device or "cpu"), _communicator(comm)
        num_embeddings, embedding_dim, padding_idx = map(as_int, (num_embeddings, embedding_dim, padding_idx))
        try:
            self.num_embeddings = whole_number("num_embeddings", num_embeddings, 1)
            self.embedding_dim = whole_number("embedding_dim", embedding_dim, 1)
            self.padding_idx = _row("padding_idx", padding_idx, num_embeddings)
            self.values = cast(RowValues, one_of("values", values, ("fp32", "fp16", "bf16")))
            self.average = flag("average", average)
            number = None if partitions is None else whole_number("partitions", partitions, 1, self.num_embeddings)
            divided, first = flag("hierarchical", hierarchical), whole_number("seed", seed, 0)
            _check_dtype(dtype)
        except RingPruneError as error:
            _refuse(error, own, where)
        fact = f"ShardedEmbedding({num_embeddings}, {embedding_dim}, {self.padding_idx}, partitions={number}, "
        fact += f"hierarchical={divided}, values={values!r}, average={average}, seed={seed}, dtype={dtype})"
        shake_hands([fact], own, where)
        self._wire = Wire(own, divided=divided, device=where)
        self.owners = Owners(num_embeddings, number or min(self._wire.owners, num_embeddings), self._wire.owners)
        self.lookups = self.pulled = 0
        shape = (len(self._owned()), self.embedding_dim)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters(first)
        _remember(self)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> "ShardedEmbedding":
        """An embedding with the rows of ``embeddings``, shape ``(rows, dim)``, of which each rank keeps its own.

        Args:
            embeddings: the table, alike on all ranks.
            freeze: its rows are not trained.
            **options: of the constructor.

        Raises:
            ConfigurationError: it is no table; the other ranks hear of it, as of what the constructor refuses.
        """
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
            is_tensor = isinstance(embeddings, Tensor)
            found = f"a tensor of shape {list(embeddings.shape)}" if is_tensor else type(embeddings).__name__
            error = ConfigurationError(f"embeddings: a table is a tensor of shape (rows, dim), not {found}")
            _refuse(error, _communicator(options.get("comm")), embeddings.device if is_tensor else torch.device("cpu"))
        made = cls(*embeddings.shape, device=embeddings.device, dtype=embeddings.dtype, **options)
        made._take(embeddings)
        made.weight.requires_grad = not freeze
        return made

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the rows anew, those of ``padding_idx`` zero; sends nothing, and leaves torch's generators alone."""
        rows, order = self._owned().sort()
        order = order.to(self.weight.device)
        starts = range(0, self.num_embeddings, BLOCK)
        ends = torch.searchsorted(rows, torch.tensor([first + BLOCK for first in starts], device="cpu")).tolist()
        begin = 0
        for first, end in zip(starts, ends, strict=True):
            generator = torch.Generator().manual_seed(int(words(1, seed, first)[0] >> 1))
            count = min(BLOCK, self.num_embeddings - first)
            drawn = torch.randn(count, self.embedding_dim, generator=generator, dtype=torch.float32, device="cpu")
            self.weight[order[begin:end]] = drawn[rows[begin:end] - first].to(self.weight)
            begin = end
        if self.padding_idx is not None:
            self._own(self.padding_idx).zero_()

    @torch._disable_dynamo  # type: ignore[attr-defined]  # private; torch.compile, of a model, fails on the messages
    def forward(self, indices: Tensor) -> Tensor:
        """Look ``indices`` up, int32 or int64 of any shape; returns shape ``(*indices.shape, embedding_dim)``.

        Raises:
            IndexRangeError: an ``IndexError`` on all ranks, where one has an index that is no row.
        """
        problem = self._problem(indices)
        rows = torch.empty(0, dtype=torch.int64, device=self.weight.device)
        inverse = rows
        if problem is None:
            rows, inverse = torch.unique(indices.detach().long(), return_inverse=True)
        request = self._rows().ask(rows, problem)
        self.lookups, self.pulled = self.lookups + indices.numel(), self.pulled + len(rows)
        pulled: Tensor = _Pull.apply(self.weight, self, request)  # type: ignore[no-untyped-call]  # torch's, without annotations
        # Rows of 16 bits are float32 from here on, so that their gradients are added in that.
        return nn.functional.embedding(inverse, pulled).to(self.weight.dtype)

    def _problem(self, indices: Any) -> str | None:
        """Why ``indices`` cannot be looked up."""
        if not isinstance(indices, Tensor):
            return f"indices to look up have to be a tensor of int32 or int64, not {type(indices).__name__}"
        if indices.dtype not in (torch.int32, torch.int64):
            return f"indices to look up have to be int32 or int64, not {str(indices.dtype).removeprefix('torch.')}"
        if not indices.numel():
            return None
        least, most = (int(end) for end in torch.aminmax(indices))
        wrong = least if least < 0 else most
        if 0 <= wrong < self.num_embeddings:
            return None
        return f"index {wrong} is out of range: the table has rows 0 to {self.num_embeddings - 1}"

    def gathered(self) -> Tensor:
        """The whole table on every rank, shape ``(num_embeddings, embedding_dim)``; all ranks call this."""
        return self.gather(self.weight.detach())

    def gather(self, own: Tensor) -> Tensor:
        """What all ranks keep of their rows, in the order of the table; all ranks call this.

        Args:
            own: shape ``(rows of this rank, ...)``, one entry for each: the rows, or an optimizer's state of them.
        """
        return self._rows().table(own.to_dense() if own.is_sparse else own)

    def told(self, text: str) -> list[str]:
        """What every rank says, in rank order; all ranks call this."""
        return gather_texts(text, self._wire.comm, self.weight.device, name="embedding, what ranks have")

    def share_of(self, table: Tensor) -> Tensor:
        """This rank's rows of a whole table; sends nothing."""
        return table[self._owned().to(table.device)]

    def close(self) -> None:
        """Give back the communicator, of its copies too; they look nothing up any more. All ranks call this."""
        self._wire.comm.close()

    def stats(self) -> dict[str, float]:
        """What this rank has sent, inside its node where it is told apart, looked up, and pulled.

        ``lookups`` counts entries of ``indices``, ``pulled`` the different rows of each.
        """
        sent, inside = self._wire.bytes_sent()
        return {"bytes_sent": sent, "bytes_inside_node": inside, "lookups": self.lookups, "pulled": self.pulled}

    def _rows(self) -> RowMessages | NodeMessages:
        return self._wire.rows(self.owners, dtype_of(self.values, self.weight.dtype))

    def _owned(self) -> Tensor:
        """The rows that this rank owns, int64, in the order in which it has them."""
        place = self._wire.place
        return torch.empty(0, dtype=torch.int64, device="cpu") if place is None else self.owners.rows_of(place)

    def _own(self, row: int) -> Tensor:
        """The row, if this rank owns it: shape ``(1 or 0, dim)``."""
        which = torch.tensor([row], device="cpu")
        if int(self.owners.rank_of(which)) != self._wire.place:
            return self.weight[:0]
        at = int(self.owners.position_of(which))
        return self.weight[at : at + 1]

    @torch.no_grad()
    def _take(self, table: Tensor) -> None:
        self.weight.copy_(self.share_of(table))

    def _push(self, request: Any, gradients: Tensor) -> Tensor:
        """This rank's sparse gradient."""
        positions, found = self._rows().push(request, gradients)
        if self.padding_idx is not None and len(self._own(self.padding_idx)):
            kept = positions != int(self.owners.position_of(torch.tensor([self.padding_idx], device="cpu")))
            positions, found = positions[kept], found[kept]
        summed = torch.sparse_coo_tensor(
            positions[None], found, self.weight.shape, device=found.device, check_invariants=False
        ).coalesce()
        Mean(self.average).scale(summed.values(), self._wire.comm.size)
        return summed.to(self.weight.dtype)

    # -- nn.Module ----------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # what a subclass has besides
        destination[prefix + "weight"] = self.gathered()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take this rank's rows of the table in a checkpoint, of however many ranks."""
        key, shape = prefix + "weight", (self.num_embeddings, self.embedding_dim)
        own, found = dict(state_dict), state_dict.get(key)
        if found is not None and tuple(found.shape) == shape:
            own[key] = self.share_of(found)
        elif found is not None:
            own[key] = self.weight.detach()
            error_msgs.append(f"{key} has shape {list(found.shape)} in the checkpoint, the table here {list(shape)}")
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def extra_repr(self) -> str:
        """For ``repr``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        over = f"partitions={self.owners.partitions}, owners={self.owners.ranks}, values={self.values!r}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {over}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedEmbedding":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _remember(made)
        return made


def any_embeddings() -> bool:
    """Whether there are any in this process: then backward passes wait for other ranks."""
    return bool(_embeddings)


def _communicator(comm: Any) -> Communicator:
    """What carries pulls and pushes: they come between an exchange's messages, at other places on every rank."""
    if not (comm is None or isinstance(comm, str) or is_communicator(comm)):
        raise ArgumentTypeError(f"comm={comm!r}: a communicator from ringprune.connect, its kind as a string, or None")
    made = connect(comm) if comm is None or isinstance(comm, str) else comm.duplicate()
    if not made.size:
        raise ConfigurationError("comm: this rank is not part of the group that is to own the rows")
    return made


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"dtype={dtype}: rows are trained, so one of floating point, such as torch.float32")


def _refuse(error: RingPruneError, comm: Communicator, device: torch.device) -> NoReturn:
    """Raise the error; the other ranks, which shake hands, hear of it."""
    with suppress(RingPruneError):
        shake_hands(["nothing"], comm, device, f"{type(error).__name__}: {error}")
    raise error


def _remember(embedding: ShardedEmbedding) -> None:
    with _embeddings_lock:
        _embeddings.add(embedding)


def embedding_of(param: Tensor) -> ShardedEmbedding | None:
    """The sharded embedding whose weight ``param`` is; None where it is that of none."""
    if not _embeddings:  # asked for every parameter at every step
        return None
    with _embeddings_lock:
        return next((embedding for embedding in _embeddings if embedding.weight is param), None)


class _Pull(torch.autograd.Function):
    """Rows from their owners; backward, their gradients to the owners."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, embedding: ShardedEmbedding, request: Any) -> Tensor:
        ctx.embedding, ctx.request = embedding, request
        pulled: Tensor = embedding._rows().pull(request, weight.detach())
        return pulled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.embedding._push(ctx.request, grads[0]), None, None


def _row(name: str, value: int | None, rows: int) -> int | None:
    """A row of the table, or None; counted from the end where it is negative, as torch does."""
    if value is None:
        return None
    if not -rows <= whole_number(name, value, -rows) < rows:
        raise ConfigurationError(f"{name}={value}: a row of the table, which has {rows}, or None")
    return value % rows
