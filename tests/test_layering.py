"""The layout of the house holds: who imports whom, how long files are, what every file and argument carries."""

from pathlib import Path

import pytest

from tests.layering import broken_imports, broken_style

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [
    path for folder in ("ringprune", "examples", "mpi_scripts") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]
NATIVE = [path for pattern in ("csrc/**/*.cpp", "csrc/**/*.h", "csrc/**/*.cu") for path in sorted(ROOT.glob(pattern))]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PYTHON if path.is_relative_to(ROOT / "ringprune")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    assert broken_imports(module, MODULES[module].read_text(), set(MODULES)) == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_documented_and_annotated(path: Path) -> None:
    assert broken_style(str(path.relative_to(ROOT)), path.read_text()) == []


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_native_file_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert lines[0].startswith("//")


# The checks themselves: each rule finds its offender, and leaves the lawful neighbour alone.

NAMES = {
    "ringprune",
    "ringprune.packing",
    "ringprune.selection",
    "ringprune.ops",
    "ringprune.comm",
    "ringprune.plan",
} | {
    "ringprune.comm.mpi",
    "ringprune.comm.communicator",
    "ringprune.policies",
    "ringprune.policies.iwp",
    "ringprune.exchange",
    "ringprune.wire",
    "ringprune.wire.indices",
    "ringprune.wire.message",
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringprune.packing", "from ringprune.selection import top"),
        ("ringprune.packing", "from ringprune import selection"),
        ("ringprune.packing", "from . import selection"),
        ("ringprune.packing", "from .selection import top"),
        ("ringprune.wire.indices", "from ringprune.packing import pack"),
        ("ringprune.packing", "def f():\n    import ringprune.selection"),
        ("ringprune.packing", "from ringprune.comm import connect"),
        ("ringprune.packing", "from ringprune.policies import IWP"),
        ("ringprune.policies.iwp", "from ringprune.comm.mpi import MpiCommunicator"),
        ("ringprune.policies.iwp", "from ..exchange import Exchange"),
        ("ringprune.policies", "from ..exchange import Exchange"),
        ("ringprune.exchange", "from ringprune.comm import connect"),
        ("ringprune.exchange", "import mpi4py.MPI"),
        ("ringprune.comm.mpi", "from ringprune.packing import pack"),
        ("ringprune.comm.mpi", "from ringprune import policies"),
        ("ringprune.comm.communicator", "from ringprune.comm.mpi import MpiCommunicator"),
        ("ringprune.ops", "from ringprune.packing import pack"),
        ("ringprune.plan", "from ringprune.exchange import Exchange"),
        ("ringprune.optimizer", "import horovod.torch as hvd"),
        ("ringprune.optimizer", "from torch import distributed"),
        ("ringprune.optimizer", "import torch.distributed as dist"),
        ("ringprune.comm.mpi", "from torch.distributed import all_reduce"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(broken_imports(module, source, NAMES)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringprune.packing", "import torch\nfrom ringprune import ops\nfrom ringprune.plan import Bucket"),
        ("ringprune.packing", "from ringprune.comm.communicator import Communicator"),
        ("ringprune.policies.iwp", "from ringprune.selection import Density"),
        ("ringprune.exchange", "from ringprune import packing, selection\nfrom .policies import Policy"),
        ("ringprune.comm.mpi", "from mpi4py import MPI\nfrom ringprune.comm.communicator import Handle"),
        ("ringprune.comm", "from .mpi import MpiCommunicator"),
        ("ringprune.wire.indices", "from ringprune.wire.message import open_message"),
        ("ringprune.optimizer", "from ringprune.comm import connect\nfrom ringprune.exchange import Exchange"),
    ],
)
def test_a_lawful_import_is_left_alone(module: str, source: str) -> None:
    assert broken_imports(module, source, NAMES) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n", "docstring"),
        ('"""A file."""\n' + "x = 1\n" * 400, "401 lines"),
        ('"""A file."""\ndef f(a: int, b): ...\n', "not annotated: b"),
        ('"""A file."""\ndef f(*args, key, **rest): ...\n', "key, args, rest"),
        ('"""A file."""\nclass A:\n    def f(self, a): ...\n', "not annotated: a"),
        ('"""A file."""\nclass A:\n    @staticmethod\n    def f(a): ...\n', "not annotated: a"),
    ],
)
def test_a_breach_of_style_is_found(source: str, complaint: str) -> None:
    (found,) = broken_style("file.py", source)
    assert complaint in found


def test_a_file_in_style_is_left_alone() -> None:
    source = '"""A file."""\nclass A:\n    def f(self, a: int, *rest: int) -> int: ...\n\nf = lambda x: x\n'
    assert broken_style("file.py", source) == []
