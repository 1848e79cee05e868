"""What a mode is built from: the wrapped optimizer, the plan, with whom and how, and what another mode has left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator, Nodes
from ringprune.embedding import ShardedEmbedding
from ringprune.guard import Guard
from ringprune.metrics import Metrics
from ringprune.other_wrappers import Others
from ringprune.plan import Bucket, ParamSpec, Plan
from ringprune.policies import Policy
from ringprune.reduction import Mean
from ringprune.scaling import LossScale
from ringprune.slicing import SlicedPlan
from ringprune.strangers import Strangers

__all__ = ["Parts", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the wrapper was built with, equal on all ranks.

    Attributes:
        seed: decides roots and exploration.
        passes: backward passes per step.
        nonfinite: ``"raise"`` or ``"skip"``.
        overlap: start exchanges during backward.
        mean: average or sum.
        check_every: exchanges between two comparisons of what the ranks hold; 0 is never.
        guard: looks after packed tensors; None for none.
    """

    seed: int
    passes: int
    nonfinite: str
    overlap: bool
    mean: Mean
    check_every: int = 0
    guard: Guard | None = None


@dataclass(frozen=True)
class Parts:
    """What a mode is built from.

    Attributes:
        inner: the wrapped optimizer.
        params: its parameters that require a gradient, in the Plan's order.
        plan: what is exchanged.
        policy: how.
        comm: with whom.
        scale: the loss scale.
        settings: the rest.
        nodes: ``comm`` divided by node, where nodes exchange and not ranks.
        sliced: the Plan's pieces, where it is one of pieces of the parameters.
        model: the model, if it was given.
        embeddings: sharded embeddings whose rows the wrapped optimizer has too, by name; they are exchanged elsewhere.
        metrics: what counts, where it has counted before; None begins anew.
        others: who else averages the gradients, where it has been looked already; None looks anew.
        strangers: looks for parameters that were not there, since another mode was made; None since now.
        first: exchanges made before, by another mode.
        highest: of the learning rates so far, by param group; one mode after the other goes on with it.
    """

    inner: torch.optim.Optimizer
    params: Sequence[Tensor]
    plan: Plan
    policy: Policy
    comm: Communicator
    scale: LossScale
    settings: Settings
    nodes: Nodes | None = None
    sliced: SlicedPlan | None = None
    model: torch.nn.Module | None = None
    embeddings: Mapping[str, ShardedEmbedding] = field(default_factory=dict)
    metrics: Metrics | None = None
    others: Others | None = None
    strangers: Strangers | None = None
    first: int = 0
    highest: dict[int, float] = field(default_factory=dict)

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """The parameters' facts."""
        return self.plan.params if self.sliced is None else self.sliced.params

    def members(self, bucket: Bucket) -> Sequence[int]:
        """The parameters whose gradients a bucket needs."""
        return bucket.members if self.sliced is None else self.sliced.members(bucket)
