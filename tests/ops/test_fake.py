"""The public functions on fake tensors, as torch.compile and memory planners call them: shapes without numbers."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringprune import ops


def test_a_bucket_goes_through_all_ops() -> None:
    with FakeTensorMode():
        weights = [torch.ones(3, 4), torch.ones(0), torch.ones(5, dtype=torch.bfloat16)]
        residual, velocity, offsets = torch.zeros(17), torch.zeros(17), [0, 12, 12, 17]
        ops.accumulate(
            weights,
            residual,
            velocity,
            residual_out=residual,
            velocity_out=velocity,
            factors=[1.0] * 3,
            momentum=[0.9] * 3,
            nesterov=[False] * 3,
        )
        scores = ops.importance(residual, weights, score="ratio", parameters=[0.1] * 3)
        indices = ops.select(scores, offsets, [2, 0, 5])
        values = ops.take(residual, velocity, indices, offsets)
        read = ops.gather(residual, indices)
        ops.give_back(residual, indices, values)
        ops.put(weights, indices, values)
        body = torch.zeros(ops.book_body_bytes(7, levels=4), dtype=torch.uint8)
        ops.encode_books(values, values, body, levels=4)
        ops.decode_books(body, values, levels=4, add=True)
        averages, elapsed = [torch.ones(5)], [torch.ones(5)]
        numbers = {"intervals": [0.1], "times": [0.1], "keeps": [1.0], "whole": [True]}
        ops.share_momentum(
            averages, elapsed, weights[2:], [torch.ones(5)], [torch.ones(5)], **numbers, adams=ops.Adams()
        )
        shapes = [tuple(tensor.shape) for tensor in (scores, indices, values, read, ops.square_sum(weights))]
        dtypes = [tensor.dtype for tensor in (scores, indices, values, read, ops.square_sum(weights))]
        counts = ops.count_nonfinite(weights)
    assert shapes == [(17,), (7,), (7,), (7,), (3,)]
    assert dtypes == [torch.float32, torch.int32, torch.float32, torch.float32, torch.float64]
    assert (tuple(counts.shape), counts.dtype) == ((3,), torch.int64)
