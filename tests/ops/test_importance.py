"""importance: the formula bit by bit, its limits, and what it refuses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import Arguments, Backend, BadCase, assert_same_bits, flat_tensors, moved, tensor_lists
from tests.ops.definitions import SCORES, scored


@pytest.mark.parametrize("score", SCORES)
@given(data=st.data())
def test_bits_are_those_of_the_formula(backend: Backend, score: str, data: st.DataObject) -> None:
    weights = data.draw(tensor_lists())
    residual = data.draw(flat_tensors(sum(weight.numel() for weight in weights)))
    several = {"min_size": len(weights), "max_size": len(weights)}
    parameters = data.draw(st.lists(st.sampled_from([0.0, 1e-8, 0.1, 1 / 3, 1e-45, 3e38]), **several))
    scores = backend.op("importance")(
        residual.to(backend.device), [w.to(backend.device) for w in weights], score=score, parameters=parameters
    )
    assert_same_bits(scores.cpu(), scored(residual, weights, score, parameters))


def test_limits(backend: Backend) -> None:
    residual = torch.tensor([0.0, 1.0, -1.0, float("inf"), float("nan"), -2.0], device=backend.device)
    weights = [torch.tensor([0.0, 0.0, -0.0, 5.0, 1.0, float("inf")], device=backend.device)]
    scores = backend.op("importance")(residual, weights, score="ratio", parameters=[0.0]).tolist()
    assert np.isnan(scores[0])
    assert np.isnan(scores[4])
    assert scores[1:4] == [float("inf")] * 3
    assert scores[5] == 0.0


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator) for n in (100_003, 0, 150_001)]
    residual = torch.randn(250_004, generator=generator)
    numbers = {"score": "ratio", "parameters": [0.1, 0.0, 1e-8]}
    expected = scored(residual, weights, **numbers)
    for count in (1, 2, 3):
        threads(count)
        scores = backend.op("importance")(
            residual.to(backend.device), [weight.to(backend.device) for weight in weights], **numbers
        )
        assert_same_bits(scores.cpu(), expected)


def test_no_tensors(backend: Backend) -> None:
    assert backend.op("importance")(torch.empty(0, device=backend.device), [], score="sum", parameters=[]).shape == (0,)


def test_parameters_leave_no_graph_behind() -> None:
    scores = ops.importance(torch.ones(3), [torch.nn.Parameter(torch.ones(3))], score="ratio", parameters=[0.0])
    assert not scores.requires_grad


BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(4)}, "5 entries together; 4 are needed|residual has 4 entries; 5 are needed"),
    ({"residual": torch.ones(5, 1)}, "residual has shape"),
    ({"weights": [torch.ones(2), torch.ones(6)[::2]]}, r"weights\[1\] .*contiguous"),
    ({"parameters": [1.0]}, "parameters has 1 values; 2 are needed"),
    ({"score": "saliency"}, "score is 'saliency'; one of ratio, magnitude, sum, product"),
]
BAD_FOR_PYTHON: list[BadCase] = [
    ({"parameters": [1.0, -1e-9]}, r"parameters\[1\] = -1e-09; .* >= 0"),
    ({"parameters": [float("nan"), 1.0]}, r"parameters\[0\] = nan"),
    ({"parameters": [1.0, float("inf")]}, r"parameters\[1\] = inf"),
]
BAD_TYPES: list[BadCase] = [
    ({"residual": torch.ones(5).bfloat16()}, "residual is (bfloat16|BFloat16)"),
    ({"weights": [torch.ones(2), torch.ones(3).double()]}, r"weights\[1\] is (float64|Double)"),
]


def good() -> Arguments:
    """Arguments that work: two tensors of 2 and 3 entries."""
    return {
        "residual": torch.ones(5),
        "weights": [torch.ones(2), torch.ones(3)],
        "score": "ratio",
        "parameters": [0.0, 0.1],
    }


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES + BAD_FOR_PYTHON]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"residual": [1.0]}, "residual is a list")]],
)
def test_bad_arguments_are_named(change: Arguments, message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"importance: .*({message})"):
        ops.importance(**good() | change)


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ringprune::importance: .*({message})"):
        torch.ops.ringprune.importance(**moved(good() | change, compiled.device))


def test_opcheck() -> None:
    arguments = good()
    positional = (arguments.pop("residual"), arguments.pop("weights"))
    torch.library.opcheck(torch.ops.ringprune.importance.default, positional, arguments)
