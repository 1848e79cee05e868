"""What a guard knows of one packed bucket: its checks, and the tensors that are sent whole because of them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import compress, pairwise

import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm.communicator import Handle
from ringprune.exchange.lane import Setting
from ringprune.guard import Guard
from ringprune.plan import Bucket
from ringprune.reduction import Average

__all__ = ["Finding", "Watch"]


@dataclass(frozen=True)
class Finding:
    """What a check has found of one tensor; see :class:`ringprune.Guard`.

    Attributes:
        step: the exchange that was looked at, counted from 0.
        residual: mean norm of what ranks could have sent.
        exchanged: norm of what was exchanged.
        ratio: of the two, such that a random choice has 1; infinite where nothing was exchanged.
        cosine: of what was exchanged and what could have been; 0 where either is nothing.
        growths: checks in a row at which the residual has grown.
    """

    step: int
    residual: float
    exchanged: float
    ratio: float
    cosine: float
    growths: int


class Watch:
    """Looks at a bucket's residual and what is exchanged of it.

    Args:
        guard: how often, and when a tensor is sent whole.
        bucket: the tensors.
        setting: what the bucket shares with the others.

    Attributes:
        state: float64 [T, 3], per tensor: 1 if it is sent whole, checks in a row at which its residual has grown, its
            residual at the last one. Equal on all ranks; what a checkpoint keeps.
        found: what the last check has found of each tensor.
        news: which tensors it was that have turned whole at it; for who asks to clear.
    """

    def __init__(self, guard: Guard, bucket: Bucket, setting: Setting) -> None:
        self._guard, self._bucket, self._setting = guard, bucket, setting
        self.state = torch.zeros(len(bucket.members), 3, dtype=torch.float64, device="cpu")
        self.found: dict[int, Finding] = {}
        self.news: list[int] = []
        self._check: Handle | None = None
        self._parts: Average | None = None

    @property
    def whole(self) -> list[bool]:
        """Which tensors are sent whole."""
        flags: list[bool] = self.state[:, 0].bool().tolist()
        return flags

    # -- messages -----------------------------------------------------------------------------------------------------

    def start(self, step: int, residual: Tensor) -> None:
        """Start what is sent besides the exchange of the rest: tensors that are sent whole, and at a check everything.

        Args:
            step: number of the exchange, from 0.
            residual: float32, shape ``(n,)``, what could be sent; what is sent whole becomes zero.
        """
        comm, metrics, index = self._setting.comm, self._setting.metrics, self._bucket.index
        parts = self._split(residual)
        if self._guard.due(step, self._setting.policy.refresh):
            norms = ops.square_sum(parts).sqrt().float()
            with metrics.sending("headers"):
                self._check = comm.allreduce(torch.cat([residual, norms]), name=f"bucket {index} guard")
        if any(self.whole):
            values = torch.cat(list(compress(parts, self.whole)))
            with metrics.sending("values", index):
                self._parts = self._setting.mean.start(comm, values, name=f"bucket {index} whole tensors")
            for part in compress(parts, self.whole):
                part.zero_()

    def finish(self, step: int, outputs: Sequence[Tensor], budgets: Sequence[int]) -> list[int]:
        """Write the averages of what was sent whole, then judge where this was a check.

        Args:
            step: number of the exchange.
            outputs: the averages of the bucket's tensors, complete but for those that are sent whole.
            budgets: entries of each tensor that are sent where it is not sent whole.

        Returns:
            How many entries of each tensor were sent whole.
        """
        sent = [numel if whole else 0 for numel, whole in zip(self._bucket.numels, self.whole, strict=True)]
        if self._parts is not None:
            with self._setting.metrics.sending("values", self._bucket.index):
                averages = self._parts.wait()
            self._parts = None
            whole = list(compress(outputs, self.whole))
            for output, part in zip(whole, torch.split(averages, [each.numel() for each in whole]), strict=True):
                output.copy_(part.view_as(output))
        if self._check is not None:
            message, self._check = self._check.wait(), None
            self._judge(step, outputs, message, budgets)
        return sent

    def drop(self) -> None:
        """The step is not made: wait for what is under way and forget it."""
        if self._parts is not None:
            self._parts.drain()
        if self._check is not None:
            self._check.wait()
        self.forget()

    def forget(self) -> None:
        """Forget what is under way."""
        self._parts = self._check = None

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, step: int, outputs: Sequence[Tensor], message: Tensor, budgets: Sequence[int]) -> None:
        """Equal on every rank: from what all ranks have, summed in a fixed order."""
        size, numel = self._setting.comm.size, self._bucket.numel
        sums, norms = self._split(message[:numel]), (message[numel:] / size).tolist()
        exchanged = ops.square_sum(outputs).sqrt().tolist()
        dense = ops.square_sum(sums).sqrt().tolist()
        scale = 1.0 if self._setting.mean.average else 1 / size
        for place, output in enumerate(outputs):
            dot = float(torch.dot(sums[place], output.reshape(-1).float()))
            product = dense[place] * exchanged[place]
            density = budgets[place] / max(1, output.numel())
            grown = 0.0 < float(self.state[place, 2]) < norms[place]
            finding = Finding(
                step=step,
                residual=norms[place],
                exchanged=scale * exchanged[place],
                ratio=_ratio(norms[place], scale * exchanged[place] * math.sqrt(size / (density or 1.0))),
                cosine=dot / product if product else 0.0,
                growths=int(self.state[place, 1]) + 1 if grown else 0,
            )
            self._conclude(place, finding)

    def _conclude(self, place: int, finding: Finding) -> None:
        guard, member = self._guard, self._bucket.members[place]
        whole = finding.growths >= guard.growths and finding.ratio > guard.bound
        if whole and not self.state[place, 0]:
            self.state[place, 0] = 1.0
            self.news.append(member)
        self.state[place, 1], self.state[place, 2] = finding.growths, finding.residual
        self.found[member] = finding

    def reason(self, member: int, cost: float) -> str:
        """Why a tensor is sent whole, and what it costs; ``cost`` is what an exchange of it took before, in bytes."""
        found, size = self.found[member], self._setting.comm.size
        numel = self._bucket.numels[self._bucket.members.index(member)]
        return (
            f"what is kept back of it has grown at {found.growths} checks in a row, to a norm of {found.residual:.4g}, "
            f"and exchange {found.step} sent {found.exchanged:.4g} of it, {found.ratio:.3g} times less than a random "
            f"choice would (Guard.bound is {self._guard.bound:g}; cosine to the dense average {found.cosine:.2f}). It "
            f"costs {8 * (size - 1) / size * numel:.0f} bytes per exchange and rank instead of {cost:.0f}"
        )

    def told(self) -> dict[int, dict[str, float]]:
        """What the last check has found of each tensor, by its position in the Plan, as plain numbers."""
        whole = dict(zip(self._bucket.members, self.whole, strict=True))
        return {member: asdict(found) | {"whole": whole[member]} for member, found in self.found.items()}

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [flat[a:b] for a, b in pairwise(self._bucket.offsets)]


def _ratio(above: float, below: float) -> float:
    if not above:
        return 0.0
    return above / below if below else math.inf
