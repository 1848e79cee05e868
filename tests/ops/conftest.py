"""What the tests of the ops share: who computes, random buckets, and equality of bits."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops

STYLES = ("normal", "ties", "specials")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPECIALS = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-45, -1e-40, 3.4e38, 1.0, -1.0)
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (2, 3), (4, 1, 5)]),
    st.integers(0, 300).map(lambda n: (n,)),
)

# The machine is shared: how long one example took says nothing about it.
settings.register_profile("ops", settings(), deadline=None)
settings.load_profile("ops")


@dataclass(frozen=True)
class Backend:
    """One way to compute the ops: compiled for the CPU, in torch, or on a GPU."""

    name: str

    @property
    def device(self) -> str:
        """Where the tensors live."""
        return "cuda" if self.name == "cuda" else "cpu"

    def op(self, name: str) -> Callable[..., Any]:
        """The public function, or the torch reference behind it."""
        if self.name == "reference":
            function = getattr(importlib.import_module(f"ringprune.ops.{name}"), f"{name}_reference")
        else:
            function = getattr(ops, name)
        assert callable(function)
        return function


@pytest.fixture(params=["native", "reference", "cuda"], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every way to compute that is there; the others are skipped with one line."""
    if request.param == "native" and ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Backend(request.param)


@pytest.fixture(scope="session")
def native() -> None:
    """For tests of the compiled kernels alone."""
    if ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")


@pytest.fixture
def threads() -> Any:
    """A function that sets torch's number of threads; put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def bits(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor; every NaN counts as the same one, for which of two NaNs wins is the machine's choice."""
    canonical = torch.where(tensor.isnan(), float("nan"), tensor) if tensor.is_floating_point() else tensor
    return canonical.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], None]:
    """Asserts that two tensors have dtype, shape and bits in common."""

    def check(left: Tensor, right: Tensor) -> None:
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        np.testing.assert_array_equal(bits(left), bits(right))

    return check


def fill(shape: tuple[int, ...], dtype: torch.dtype, style: str, generator: torch.Generator) -> Tensor:
    """A CPU tensor of normal numbers, of few distinct numbers, or with special numbers among them."""
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    if style == "ties":
        x = x.round()
    if style == "specials":
        chosen = torch.randint(0, 2 * len(SPECIALS), shape, generator=generator)
        for i, special in enumerate(SPECIALS):
            x = torch.where(chosen == i, special, x)
    return x.to(dtype)


class Cases:
    """Hypothesis strategies; on the CPU."""

    @staticmethod
    @st.composite
    def tensors(
        draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS, styles: tuple[str, ...] = STYLES
    ) -> list[Tensor]:
        """A list of up to five tensors of any shape, empty ones too, and of mixed dtypes."""
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        style = draw(st.sampled_from(styles))
        shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
        return [fill(shape, draw(st.sampled_from(dtypes)), style, generator) for shape in shapes]

    @staticmethod
    @st.composite
    def flat(draw: st.DrawFn, numel: int, styles: tuple[str, ...] = STYLES) -> Tensor:
        """A flat float32 tensor of ``numel`` entries."""
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        return fill((numel,), torch.float32, draw(st.sampled_from(styles)), generator)

    @staticmethod
    @st.composite
    def indices(draw: st.DrawFn, numel: int) -> Tensor:
        """Strictly ascending positions below ``numel``, from none to all of them."""
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        density = draw(st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]))
        return (torch.rand(numel, generator=generator) < density).nonzero().reshape(-1)


@pytest.fixture(scope="session")
def cases() -> type[Cases]:
    """Hypothesis strategies for buckets, flat state and index sets."""
    return Cases
