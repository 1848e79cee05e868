"""Fixtures of the tests of the ops: who computes, and with how many threads."""

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from ringprune import ops
from tests.ops.cases import Backend

# The machine is shared: how long one example took says nothing about it.
settings.register_profile("ops", settings(), deadline=None)
settings.load_profile("ops")


# The CUDA kernels compiled for the CPU, in place of all others: see tests/ops/test_emulation.py.
EMULATED = os.environ.get("RINGPRUNE_EMULATED")
if EMULATED:
    torch.ops.load_library(EMULATED)
    settings.register_profile("emulated", settings(), deadline=None, max_examples=25)
    settings.load_profile("emulated")


@pytest.fixture(params=["emulated"] if EMULATED else ["native", "reference", "cuda"], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every way to compute that is there; the others are skipped with one line."""
    if request.param == "native" and ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cuda" and ops.backend() != "native+cuda":
        pytest.skip("the compiled library has no CUDA kernels")
    return Backend(request.param)


@pytest.fixture(scope="session")
def host(backend: Backend) -> Backend:
    """For what is done where memory can be read without waiting: on CUDA it is not."""
    if backend.has_cuda_kernels:
        pytest.skip("indices are not read back from a device")
    return backend


@pytest.fixture
def compiled(backend: Backend) -> Backend:
    """For tests of compiled kernels, whatever they are compiled for."""
    if backend.name == "reference":
        pytest.skip("not compiled")
    return backend


@pytest.fixture
def device_kernels(backend: Backend) -> Backend:
    """For what only the CUDA kernels do."""
    if not backend.has_cuda_kernels:
        pytest.skip("not the CUDA kernels")
    return backend


@pytest.fixture(scope="session")
def native() -> None:
    """For tests of the compiled kernels of the CPU alone."""
    if ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A function that sets torch's number of threads; put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def instructions() -> Iterator[Callable[[int], str]]:
    """A function that limits the compiled loops to an instruction set; put back after the test."""
    path = ops.native_path()
    if path is None:
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")
    function = ctypes.CDLL(str(path)).ringprune_use_instructions
    function.restype = ctypes.c_char_p
    yield lambda most: function(most).decode()
    function(2)
