"""What a policy is: a frozen record of choices, one for each stage of an exchange."""

from dataclasses import dataclass
from typing import Any

from ringprune.agreement import Roots
from ringprune.comm.communicator import Ability
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.importance import KERNELS, Score
from ringprune.local_steps import LocalSteps
from ringprune.residual import Clipping
from ringprune.routing import Routing, Rows
from ringprune.schedule import LayerPriority
from ringprune.selection import Density
from ringprune.validation import flag, one_of, real_number, whole_number
from ringprune.wire import INDEX_FORMATS, VALUE_FORMATS

__all__ = ["INDEX_SETS", "Policy"]

INDEX_SETS = ("shared", "gathered", "scattered", "balanced")
EXPLORERS = ("seed", "rank")
LAYERS = ("even", "relevance")
SELECTIONS = ("exact", "sampled")
CORRECTIONS = ("local", "global")
REDUCTIONS = ("auto", "library", "ring")
OWN_SETS_GO_WITH: dict[str, Any] = {
    "explore": 0.0,
    "lookahead": False,
    "values": "fp32",
    "refresh": 1,
    "layers": "even",
    "smoothing": 0.0,
    "turns": 1,
}


@dataclass(frozen=True)
class Policy:
    """A method of exchanging gradients. It holds no tensor; state lives in the exchange.

    Make one with its function (:func:`ringprune.IWP`, :func:`ringprune.Dense`) and change a slot with
    :func:`dataclasses.replace`.

    Attributes:
        name: what tables and messages call it.
        routing: which tensors travel packed.
        density: the share of entries sent, over time.
        score: how important an entry is.
        roots: who proposes indices.
        explore: share of the budget that is drawn with the shared seed instead, 0 to 1.
        correction: ``"local"`` takes the momentum of ``torch.optim.SGD`` over, before the exchange, so that what is
            kept back arrives as if it had been sent in time; ``"global"`` leaves it in place, after the exchange.
        mask_velocity: clear the velocity where a value was sent.
        clipping: local gradient clipping.
        values: how packed values travel, one of :data:`ringprune.wire.VALUE_FORMATS`; what rounding drops stays in the
            residual.
        dense_values: how tensors that travel dense do. With fewer bits they get a residual too.
        index_format: how proposals travel, one of :data:`ringprune.wire.INDEX_FORMATS`.
        index_sets: ``"shared"``: all ranks send at one index set, which the roots propose. ``"gathered"``: each rank at
            its own, and gets everybody's entries. ``"scattered"``: each at its own, summed region by region.
            ``"balanced"``: each proposes its own with their values, and the largest sums of all are sent.
        reduction: who sums float32 values: ``"library"``, the communicator's own allreduce; ``"ring"``, ours, on
            point-to-point messages; ``"auto"``, whichever is faster, measured at the first step if there is a choice.
            Coded values go round the ring only with ``"ring"``; they are then rounded at each hop.
        lookahead: choose a step's index set right after the step before, so that it travels during the forward pass.
        local_steps: update mode: steps that a rank makes alone between two exchanges; None exchanges gradients.
        low_pass: share of a step's change that a residual takes on, above 0, at most 1. Below 1 (ScaleCom) part of each
            gradient is never sent, and part of what was sent stays.
        refresh: steps that an agreed index set serves (Slim-DP): its indices travel once in so many. A step of another
            density than the one before agrees anew.
        explore_by: who draws what is explored: the shared ``"seed"``, the same on every rank; or each ``"rank"`` for
            itself, and sends it with indices (Slim-DP).
        selection: ``"exact"``, the top k of the scores; ``"sampled"``, those above a threshold that a sample tells,
            between 0.8 k and k of them (DGC's published code).
        layers: how a bucket's budget is divided over its tensors: ``"even"``, the same density for all; or by
            ``"relevance"`` (MIPD), in proportion to the sum of ``|weight * residual|``, which all ranks agree on every
            50 exchanges.
        smoothing: weight of the newest step in an estimate of what each entry moves by, 0 to 1 (MIPD). It is applied at
            every step, whether an entry is sent or not, and taken out of all residuals. 0 is no estimate.
        turns: groups of packed tensors that take turns: each is exchanged at every ``turns``-th step (MIPD: 2).
        schedule: send what the next forward pass needs first before the rest, across the barrier between two steps
            (P3); None sends as gradients come.
        rows: how gradients of embeddings with ``sparse=True`` travel, as rows, beside all others; they stay sparse
            (Parallax). None makes them dense.
    """

    name: str
    routing: Routing
    density: Density
    score: Score
    roots: Roots
    explore: float
    correction: str
    mask_velocity: bool
    clipping: Clipping
    values: str = "fp32"
    dense_values: str = "fp32"
    index_format: str = "auto"
    index_sets: str = "shared"
    reduction: str = "auto"
    lookahead: bool = False
    local_steps: LocalSteps | None = None
    low_pass: float = 1.0
    refresh: int = 1
    explore_by: str = "seed"
    selection: str = "exact"
    layers: str = "even"
    smoothing: float = 0.0
    turns: int = 1
    schedule: LayerPriority | None = None
    rows: Rows | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_values()
        self._check_own_sets()
        self._check_schedule()
        self._check_others()

    def _check_kinds(self) -> None:
        for name, value, kind, example in (
            ("density", self.density, Density, "Density(0.01)"),
            ("roots", self.roots, Roots, 'Roots("all")'),
            ("clipping", self.clipping, Clipping, "Clipping(norm=1.0)"),
        ):
            if not isinstance(value, kind):
                raise ArgumentTypeError(
                    f"Policy.{name}={value!r}: a {kind.__module__}.{kind.__name__}, such as {example}; or give the "
                    "plain value to the policy's function, for example ringprune.IWP"
                )
        if not (hasattr(self.score, "parameters") and hasattr(self.score, "name")):
            raise ArgumentTypeError(f"Policy.score={self.score!r}: a score, such as ringprune.importance.Magnitude()")
        one_of("Policy.score.name", self.score.name, KERNELS)
        for name, given, wanted, such in (
            ("local_steps", self.local_steps, LocalSteps, "LocalSteps(4)"),
            ("schedule", self.schedule, LayerPriority, "LayerPriority()"),
            ("rows", self.rows, Rows, "Rows()"),
        ):
            if given is not None and not isinstance(given, wanted):
                raise ArgumentTypeError(
                    f"Policy.{name}={given!r}: a ringprune.{wanted.__name__}, such as {such}, or None"
                )

    def _check_values(self) -> None:
        real_number("explore", self.explore, least=0, most=1)
        one_of("correction", self.correction, CORRECTIONS)
        flag("mask_velocity", self.mask_velocity)
        one_of("values", self.values, VALUE_FORMATS)
        one_of("dense_values", self.dense_values, VALUE_FORMATS)
        one_of("index_format", self.index_format, INDEX_FORMATS)
        one_of("index_sets", self.index_sets, INDEX_SETS)
        one_of("reduction", self.reduction, REDUCTIONS)
        flag("lookahead", self.lookahead)
        real_number("low_pass", self.low_pass, above=0, most=1)
        whole_number("refresh", self.refresh, 1)
        one_of("explore_by", self.explore_by, EXPLORERS)
        one_of("selection", self.selection, SELECTIONS)
        one_of("layers", self.layers, LAYERS)
        real_number("smoothing", self.smoothing, least=0, most=1)
        whole_number("turns", self.turns, 1)

    def _check_own_sets(self) -> None:
        if self.index_sets != "shared":
            any_values = {"values": self.values} if self.index_sets == "balanced" else {}
            why = "each rank chooses for itself, and sums are of float32"
            self._goes_with("index_sets", why, OWN_SETS_GO_WITH | any_values)

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        why = "a bucket is sent as soon as its own gradients are there, and its layer steps alone"
        self._goes_with("schedule", why, {"local_steps": None, "lookahead": False, "turns": 1})
        if self.reduction == "ring":
            raise ConfigurationError(
                'reduction="ring" with a schedule: the steps of our ring match by their order, and each rank waits '
                'for its buckets in an order of its own; use "auto" or "library"'
            )
        if self.clipping.norm is not None:
            raise ConfigurationError(
                f"clip_norm={self.clipping.norm:g} with a schedule: the norm over all gradients is known only when "
                "the last is there; use clip_norm_per_tensor"
            )

    def _check_others(self) -> None:
        if self.smoothing:
            seed = {"explore_by": "seed"} if self.explore else {}
            why = "what the estimate moves has to leave all residuals, at once and whole"
            self._goes_with("smoothing", why, {"low_pass": 1.0} | seed)
        if self.rows is not None:
            why = "rows of gradients are exchanged whole tables at a time, at every step"
            self._goes_with("rows", why, {"schedule": None, "local_steps": None})
        steps = self.local_steps
        if steps is not None and steps.shares_momentum and (self.smoothing or self.low_pass < 1):
            raise ConfigurationError(
                f"local_steps with momentum={steps.momentum!r} goes with smoothing=0.0 and low_pass=1.0: what is "
                "exchanged has to be all that the ranks have moved by; "
                f"got smoothing={self.smoothing:g}, low_pass={self.low_pass:g}"
            )

    def _goes_with(self, name: str, why: str, wanted: dict[str, Any]) -> None:
        """Refuse other values in the slots ``wanted`` than those given.

        Raises:
            ConfigurationError: one of them has another.
        """
        if any(getattr(self, slot) != value for slot, value in wanted.items()):
            goes = ", ".join(f"{slot}={value!r}" for slot, value in wanted.items())
            got = ", ".join(f"{slot}={getattr(self, slot)!r}" for slot in wanted)
            raise ConfigurationError(f"{name}={getattr(self, name)!r} goes with {goes}: {why}; got {got}")

    @property
    def needs(self) -> frozenset[Ability]:
        """What this policy asks of a communicator."""
        needs: set[Ability] = {"broadcast", "allreduce", "allgather"}
        coded = {self.values, self.dense_values} != {"fp32"}
        explorers = self.explore_by == "rank" and self.explore > 0
        rows = self.rows is not None and (self.rows.way in ("auto", "owners") or self.rows.values != "fp32")
        if self.index_sets in ("scattered", "balanced") or explorers or rows or (coded and self.reduction != "ring"):
            needs.add("alltoall")
        if self.reduction == "ring":
            needs.add("shift")
        return frozenset(needs)

    @property
    def dense_as_is(self) -> bool:
        """Whether what travels dense are gradients as they are, which a library can sum where they lie."""
        return self.dense_values == "fp32" and self.local_steps is None
