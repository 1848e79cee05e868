"""What the fused step is compared with: the same in torch, DGC's sampled threshold, and the memory itself."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from ringprune.bench.bucket import MOMENTUM, Bucket

__all__ = ["Memory", "SampledThreshold", "TorchTopk", "exact_positions"]


class _InTorch:
    """Accumulate and score in torch, without a temporary: every result has its buffer."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.score = torch.empty_like(bucket.weight)
        self._scores, self._weights = bucket.parts(self.score), bucket.parts(bucket.weight)
        self._below = torch.empty_like(bucket.weight)
        self._belows = bucket.parts(self._below)

    def accumulate_and_score(self) -> None:
        """Each operation over the whole bucket where it is the same for all tensors."""
        bucket = self.bucket
        bucket.out_velocity.mul_(MOMENTUM).add_(bucket.grad)
        bucket.out_residual.add_(bucket.out_velocity)
        torch.abs(bucket.out_residual, out=self.score)
        for weight, below, parameter in zip(self._weights, self._belows, bucket.parameters, strict=True):
            torch.abs(weight, out=below).add_(parameter)
        self.score.div_(self._below)


class TorchTopk(_InTorch):
    """The whole local step as one would write it in torch with care: ``torch.topk``, sort, gather, clear, write."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        total = sum(bucket.counts)
        self._found, self._order = self._indices(total), self._indices(total)
        self._indices_sorted = self._indices(total)
        self._top, self._values = self.score.new_empty(total), self.score.new_empty(total)
        self._tops = list(zip(*(torch.split(flat, bucket.counts) for flat in (self._top, self._found)), strict=True))

    def _indices(self, total: int) -> Tensor:
        return torch.empty(total, dtype=torch.int64, device=self.bucket.device)

    def __call__(self) -> Tensor:
        """Returns the sorted indices."""
        bucket, indices = self.bucket, self._indices_sorted
        self.accumulate_and_score()
        for score, count, out, start in zip(self._scores, bucket.counts, self._tops, bucket.offsets, strict=False):
            torch.topk(score, count, sorted=False, out=out)
            out[1].add_(start)
        torch.sort(self._found, out=(indices, self._order))
        torch.index_select(bucket.out_residual, 0, indices, out=self._values)
        bucket.out_residual.scatter_(0, indices, 0.0)
        bucket.out_velocity.scatter_(0, indices, 0.0)
        bucket.grad.zero_()
        bucket.grad.scatter_(0, indices, self._values)
        return indices


class SampledThreshold(_InTorch):
    """Accumulate, score and select approximately, as Deep Gradient Compression's published code does.

    Per tensor: the k-th largest of a strided 1 % sample is the threshold; the entries at or above it are counted. More
    than 1.3 k: an exact top-k among them. Fewer than 0.8 k: the threshold is lowered by 0.8, up to 10 times. Of what
    is left over k, the highest positions are dropped. Its score is ours, so that the work is the same.
    """

    RATIO, UPPER, LOWER, ROUNDS = 0.01, 1.3, 0.8, 10

    def __call__(self) -> list[Tensor]:
        """Returns the indices in each tensor."""
        self.accumulate_and_score()
        return [self._select(score, count) for score, count in zip(self._scores, self.bucket.counts, strict=True)]

    def _select(self, score: Tensor, count: int) -> Tensor:
        sample = score[:: self._stride(score.numel())]
        top = math.ceil(sample.numel() * self.bucket.case.density)
        threshold = torch.topk(sample, top, sorted=False).values.min()
        indices = torch.ge(score, threshold).nonzero().view(-1)
        for _ in range(self.ROUNDS if sample.numel() < score.numel() else 0):
            if indices.numel() > self.UPPER * count:
                return indices[torch.topk(score[indices], count, sorted=False).indices]
            if indices.numel() >= self.LOWER * count:
                break
            threshold = threshold * self.LOWER
            indices = torch.ge(score, threshold).nonzero().view(-1)
        return indices[:count]

    def _stride(self, numel: int) -> int:
        """Every how many entries one is sampled: at least 2 / density of them, and no power of two."""
        least = math.ceil(2 / self.bucket.case.density)
        if numel <= least:
            return 1
        wanted = max(math.ceil(self.RATIO * numel), least)
        stride = math.ceil(numel / wanted / 32) * 32 + 1
        while stride > 1 and numel // stride < wanted:
            stride -= 8
        return max(stride, 1)


class Memory:
    """How fast memory is: ``a = b + s * c`` over arrays that no cache holds, or on CUDA a copy.

    Args:
        numel: entries of each of the arrays.
        device: where.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.b, self.c = torch.ones(numel, device=device), torch.ones(numel, device=device)
        self.a = torch.empty_like(self.b) if device.type == "cpu" else self.c
        # CPU: two reads, one write, and the read of the line that is written; a GPU writes without reading.
        self.bytes = numel * (16 if device.type == "cpu" else 8)

    def __call__(self) -> Tensor:
        """Move the bytes."""
        if self.a is self.c:
            return self.a.copy_(self.b)
        return torch.add(self.b, self.c, alpha=3.0, out=self.a)


def exact_positions(bucket: Bucket) -> Tensor:
    """What this step has to select, by ``torch.topk`` from the state before it; ties go to the lowest position."""
    residual = bucket.residual + (bucket.velocity * MOMENTUM + bucket.fresh)
    found = []
    for (start, end), count, parameter in zip(pairwise(bucket.offsets), bucket.counts, bucket.parameters, strict=True):
        score = residual[start:end].abs() / (bucket.weight[start:end].abs() + parameter)
        least = score.topk(count, sorted=False).values.min()
        above, tied = (score > least).nonzero().view(-1), (score == least).nonzero().view(-1)
        found.append(torch.cat([above, tied[: count - above.numel()]]).sort().values + start)
    return torch.cat(found).int()
