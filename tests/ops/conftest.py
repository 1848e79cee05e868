"""Fixtures of the tests of the ops: who computes, and with how many threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from ringprune import ops
from tests.ops.cases import Backend

# The machine is shared: how long one example took says nothing about it.
settings.register_profile("ops", settings(), deadline=None)
settings.load_profile("ops")


@pytest.fixture(params=["native", "reference", "cuda"], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every way to compute that is there; the others are skipped with one line."""
    if request.param == "native" and ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Backend(request.param)


@pytest.fixture
def host(backend: Backend) -> Backend:
    """For what is checked where memory can be read without waiting: on CUDA it is not."""
    if backend.device != "cpu":
        pytest.skip("indices are not read back from a device")
    return backend


@pytest.fixture(scope="session")
def native() -> None:
    """For tests of the compiled kernels alone."""
    if ops.backend() == "reference":
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A function that sets torch's number of threads; put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
