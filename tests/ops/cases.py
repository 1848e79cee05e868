"""What the tests of the ops are made of: ways to compute, random buckets, equality of bits."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops

Arguments: TypeAlias = dict[str, Any]
BadCase: TypeAlias = tuple[Arguments, str]
"""What to change in arguments that work, and a pattern of the message this gets."""

STYLES = ("normal", "ties", "specials")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOATS_AND_DOUBLE = (*FLOATS, torch.float64)
INSTRUCTIONS = [(0, "portable"), (1, "AVX2"), (2, "AVX-512")]
SPECIALS = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-45, -1e-40, 3.4e38, 1.0, -1.0)
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (2, 3), (4, 1, 5)]),
    st.integers(0, 300).map(lambda n: (n,)),
)
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Backend:
    """One way to compute the ops: ``native`` (compiled, CPU), ``reference`` (torch, CPU), ``cuda``, or ``emulated``.

    The last is the CUDA kernels run on the CPU, see ``tests/ops/emulation``.
    """

    name: str

    @property
    def device(self) -> str:
        """Where the tensors live."""
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def has_cuda_kernels(self) -> bool:
        """Whether the kernels are those of csrc/cuda: they never wait for the device, so they check no index."""
        return self.name in ("cuda", "emulated")

    def op(self, name: str) -> Callable[..., Any]:
        """The public function, or the torch reference behind it."""
        if self.name == "reference":
            function = getattr(importlib.import_module(f"ringprune.ops.{name}"), f"{name}_reference")
        else:
            function = getattr(ops, name)
        assert callable(function)
        return function


def moved(arguments: Arguments, device: str) -> Arguments:
    """The arguments with all tensors on ``device``; those that share memory still do, and strides stay."""
    if device == "cpu":
        return arguments
    storages: dict[int, Any] = {}

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        memory = value.untyped_storage()
        there = storages.setdefault(
            memory.data_ptr() or id(value), torch.UntypedStorage(memory.nbytes(), device=device)
        )
        there.copy_(memory)
        view = torch.empty(0, dtype=value.dtype, device=device)
        return view.set_(there, value.storage_offset(), value.shape, value.stride())

    return {name: move(value) for name, value in arguments.items()}


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """Dtype, shape and bits are equal, wherever the tensors live."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    np.testing.assert_array_equal(bits(left), bits(right))


def bits(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor; every NaN counts as the same one, for which of two NaNs wins is the machine's choice."""
    canonical = torch.where(tensor.isnan(), float("nan"), tensor) if tensor.is_floating_point() else tensor
    return canonical.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def positions(*numbers: int) -> Tensor:
    """Positions in a bucket."""
    return torch.tensor(numbers, dtype=torch.int32)


def fill(shape: tuple[int, ...], dtype: torch.dtype, style: str, seed: int) -> Tensor:
    """A CPU tensor of normal numbers, of few distinct numbers, or with special numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    if style == "ties":
        x = x.round()
    if style == "specials":
        chosen = torch.randint(0, 2 * len(SPECIALS), shape, generator=generator)
        for i, special in enumerate(SPECIALS):
            x = torch.where(chosen == i, special, x)
    return x.to(dtype)


@st.composite
def tensor_lists(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = FLOATS) -> list[Tensor]:
    """One to five CPU tensors of any shape, empty ones too, and of mixed dtypes."""
    style = draw(st.sampled_from(STYLES))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    return [fill(shape, draw(st.sampled_from(dtypes)), style, draw(SEEDS)) for shape in shapes]


def flat_tensors(numel: int) -> st.SearchStrategy[Tensor]:
    """A flat float32 CPU tensor of ``numel`` entries."""
    return st.builds(fill, st.just((numel,)), st.just(torch.float32), st.sampled_from(STYLES), SEEDS)


@st.composite
def index_sets(draw: st.DrawFn, numel: int) -> Tensor:
    """Strictly ascending positions below ``numel``, from none to all of them."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    density = draw(st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]))
    return (torch.rand(numel, generator=generator) < density).nonzero().reshape(-1).int()


@st.composite
def offset_tables(draw: st.DrawFn, numel: int) -> list[int]:
    """Where up to five tensors start that share ``numel`` entries; some are empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=4))), numel]
