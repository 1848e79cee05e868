"""Which communicator connect() takes, and what it says where it cannot."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

import ringprune as rp
from ringprune.comm import connect
from ringprune.comm.communicator import is_communicator
from ringprune.comm.torch_distributed import serving
from ringprune.errors import ConfigurationError, DependencyError, RingPruneError, UsageError


def test_importing_starts_nothing() -> None:
    program = (
        "import sys, ringprune, ringprune.comm\n"
        "assert not {'horovod', 'mpi4py', 'mpi4py.MPI'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hovorod", 'allowed are "horovod", "mpi", "torch" and None; did you mean "horovod"?'),
        ("mpi4py", 'did you mean "mpi"?'),
        ("zzz", "kind is 'zzz'"),
        ("simulated", r"ringprune.simulate(world_size, fn)"),
    ],
)
def test_unknown_kinds_are_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        connect(kind)
    assert message in str(raised.value)


def test_torch_distributed_has_to_be_initialised() -> None:
    with pytest.raises(UsageError, match=r'not initialised; call torch.distributed.init_process_group\("gloo"\) first'):
        connect("torch")


def test_a_torch_without_distributed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(DependencyError, match=r"this torch was built without torch\.distributed"):
        connect("torch")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no option 'process_set'; it has communicator, timeout"):
        connect("mpi", process_set=None)


@pytest.mark.parametrize("timeout", ["60", 0, -1.0, float("nan"), True])
def test_a_time_limit_is_a_number_above_zero(timeout: Any) -> None:
    """A string was taken, and the first collective failed on some ranks."""
    with pytest.raises(RingPruneError, match=r"timeout=.*: a finite number above 0"):
        connect("mpi", timeout=timeout)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        ("cpu:gloo,cuda:gloo", {"cpu": "gloo"}),  # init_process_group("gloo")
        ("cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),  # init_process_group("nccl")
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:mpi,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_the_host_has_messages_of_its_own(config: str, devices: dict[str, str]) -> None:
    """Where a script has NCCL alone, as with DistributedDataParallel on GPUs, our group has Gloo besides."""
    assert serving(config, more=True) == devices
    assert serving("cpu:gloo,cuda:nccl", more=False) == {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(("config", "said"), [("cuda:nccl", "serves GPUs alone"), ("cpu:mpi", "back end is mpi")])
def test_a_group_that_cannot_serve_is_refused(config: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        serving(config, more=False)


@pytest.mark.parametrize("kind", ["gloo", "nccl", "NCCL"])
def test_a_backend_of_torch_distributed_is_sent_there(kind: str) -> None:
    """Of "gloo" it asked: did you mean "horovod"?"""
    with pytest.raises(ConfigurationError, match='did you mean "torch"'):
        connect(kind)


@pytest.mark.parametrize(("kind", "module"), [("horovod", "horovod.torch"), ("mpi", "mpi4py")])
def test_a_missing_package_is_named(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"ringprune.comm.{kind}", raising=False)
    with pytest.raises(
        DependencyError, match=rf'^connect\("{kind}"\): .* "python -m ringprune doctor" prints'
    ) as raised:
        connect(kind)
    assert isinstance(raised.value, ImportError)


def test_the_default_is_horovod_where_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def make(**options: Any) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(size=2)

    horovod, ours = ModuleType("horovod.torch"), ModuleType("ringprune.comm.horovod")
    horovod.is_initialized = lambda: True
    ours.HorovodCommunicator = make
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setitem(sys.modules, "ringprune.comm.horovod", ours)
    connect(timeout=5.0)
    assert made == [{"timeout": 5.0}]


def test_then_torch_distributed_then_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    mpi, distributed = SimpleNamespace(size=2), SimpleNamespace(size=2)
    ours = SimpleNamespace(MpiCommunicator=lambda: mpi, TorchCommunicator=lambda: distributed)
    monkeypatch.setitem(sys.modules, "ringprune.comm.mpi", ours)
    monkeypatch.setitem(sys.modules, "ringprune.comm.torch_distributed", ours)
    assert connect() is distributed
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert connect() is mpi


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, r"torchrun has started 2 .*init_process_group\(\)"),
        ({"HOROVOD_SIZE": "2"}, r"horovodrun has started 2 .*horovod\.torch\.init\(\)"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 processes, and this one is alone"),
        ({"PMI_SIZE": "3"}, "mpiexec has started 3"),
        ({"SLURM_STEP_NUM_TASKS": "16"}, "srun has started 16"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"SLURM_STEP_NUM_TASKS": "many"}, None),
    ],
)
def test_processes_that_do_not_know_each_other_are_told(
    environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, with init_process_group() forgotten, every process trained alone, and nothing said so."""
    size = 1
    ours = SimpleNamespace(MpiCommunicator=lambda **options: SimpleNamespace(size=size))
    ours.MpiCommunicator.leaves_out = lambda group: False
    monkeypatch.setitem(sys.modules, "ringprune.comm.mpi", ours)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message is None:
        assert connect("mpi").size == 1
    else:
        with pytest.raises(UsageError, match=message):
            connect("mpi")
    assert connect("mpi", communicator=object()).size == 1, "a group of one that was asked for"
    size = 2
    assert connect("mpi").size == 2


class Delegate:
    """A communicator of a user's own: it hands every call on."""

    def __init__(self, comm: rp.comm.Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)


def test_a_communicator_that_hands_calls_on_is_one() -> None:
    """From Python 3.12 on isinstance with a protocol does not see what ``__getattr__`` gives: it was refused there."""

    def rank(comm: rp.comm.Communicator) -> None:
        assert is_communicator(Delegate(comm))
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rp.DistributedOptimizer(inner, model.named_parameters(), comm=Delegate(comm)).close()

    rp.simulate(1, rank)
    assert not any(map(is_communicator, (None, "mpi", object(), rp.comm.Communicator, torch.nn.Linear)))
