"""Which tensors take part in a step where they take turns."""

from collections.abc import Sequence
from itertools import compress, pairwise

import torch
from torch import Tensor

from ringprune.devices import to_device
from ringprune.plan import Bucket, Plan
from ringprune.selection import within

__all__ = ["Rotation"]


class Rotation:
    """Tensors that travel packed are divided into groups of about as many entries; each step is one group's turn.

    MIPD updates half of the parameters at a time (doi 10.1109/tpds.2022.3154387): that is two groups. The largest
    tensor first, each goes to the group with the fewest entries so far.

    Args:
        plan: all tensors.
        groups: how many groups.
    """

    def __init__(self, plan: Plan, groups: int) -> None:
        members = [i for bucket in plan.buckets if bucket.route == "packed" for i in bucket.members]
        filled = [0] * groups
        self._group: dict[int, int] = {}
        for i in sorted(members, key=lambda i: (-plan.params[i].numel, plan.params[i].name)):
            self._group[i] = filled.index(min(filled))
            filled[self._group[i]] += plan.params[i].numel
        self._groups = groups

    def takes_part(self, bucket: Bucket, step: int) -> list[bool]:
        """For each tensor of a packed bucket, whether it is its turn."""
        return [(self._group[i] + step) % self._groups == 0 for i in bucket.members]

    def counts(self, bucket: Bucket, counts: Sequence[int], step: int) -> list[int]:
        """``counts``, one for each tensor, with zeros where it is not its turn."""
        return [count if turn else 0 for count, turn in zip(counts, self.takes_part(bucket, step), strict=True)]

    def within(self, bucket: Bucket, indices: Tensor, step: int) -> Tensor:
        """Those of ``indices`` (int32, ascending) that lie in a tensor whose turn it is."""
        return within(indices, bucket.offsets, self.takes_part(bucket, step))

    def everything(self, bucket: Bucket, step: int) -> Tensor | None:
        """All indices of the tensors whose turn it is; None where it is everybody's."""
        turns = self.takes_part(bucket, step)
        if all(turns):
            return None
        spans = [
            torch.arange(*span, dtype=torch.int32, device="cpu") for span in compress(pairwise(bucket.offsets), turns)
        ]
        return to_device(torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *spans]), bucket.device)
