"""The compiled library: used where it is there, refused with a reason where it does not fit, never ignored silently."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch

import ringprune
from ringprune import ops
from ringprune.errors import ConfigurationError, NativeLibraryError
from ringprune.ops import library

FILE = f"_native{EXTENSION_SUFFIXES[0]}"
MARKER = b"ringprune native library, built for torch %s, threads OpenMP\0"
PRINT_BACKEND = "from ringprune import ops; print(ops.backend())"


def refusal(folder: Path, mode: str = "auto") -> str:
    """What the error says when the library beside ``folder`` is refused; always with versions and a way out."""
    with pytest.raises(NativeLibraryError) as raised:
        library._load(folder, mode)
    message = str(raised.value)
    assert f"running torch {torch.__version__}" in message
    assert library.REBUILD in message
    return message


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package without its compiled library."""
    copy = tmp_path / "ringprune"
    ignored = shutil.ignore_patterns("_native*", "__pycache__")
    shutil.copytree(Path(ringprune.__file__).parent, copy, ignore=ignored)
    return copy


def run(package: Path, native: str | None = None) -> subprocess.CompletedProcess[str]:
    """Print the backend of the copied package."""
    environment = {name: value for name, value in os.environ.items() if name != "RINGPRUNE_NATIVE"}
    environment |= {"PYTHONPATH": str(package.parent)} | ({} if native is None else {"RINGPRUNE_NATIVE": native})
    return subprocess.run(
        [sys.executable, "-c", PRINT_BACKEND],
        env=environment,
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_backend_of_this_process() -> None:
    assert ops.backend() in ("native+cuda", "native", "reference")
    assert (ops.native_path() is None) == (ops.backend() == "reference")
    assert (ops.native_build() is None) == (ops.backend() == "reference")


@pytest.mark.usefixtures("native")
def test_build_names_torch_and_threads() -> None:
    build = ops.native_build()
    assert build is not None
    assert build.startswith(f"built for torch {torch.__version__.split('+')[0]}, threads ")
    assert build.endswith("threads OpenMP"), "compile and link with -fopenmp, or the kernels run on one thread"


def test_nothing_built_is_fine(package: Path) -> None:
    result = run(package)
    assert (result.stdout.strip(), result.stderr) == ("reference", "")


@pytest.mark.usefixtures("native")
def test_built_is_used(package: Path) -> None:
    shutil.copy(ops.native_path(), package)
    result = run(package, native="require")
    assert (result.stdout.strip(), result.stderr) == (ops.backend(), "")


@pytest.mark.usefixtures("native")
def test_off_leaves_it_alone(package: Path) -> None:
    shutil.copy(ops.native_path(), package)
    assert run(package, native="off").stdout.strip() == "reference"


def test_broken_file_stops_the_import(package: Path) -> None:
    (package / FILE).write_bytes(b"garbage")
    result = run(package)
    assert result.returncode != 0
    assert "NativeLibraryError" in result.stderr
    assert str(package / FILE) in result.stderr


def test_modes_without_a_file(tmp_path: Path) -> None:
    assert library._load(tmp_path, "auto") is None
    assert library._load(tmp_path, "off") is None
    assert "no such file" in refusal(tmp_path, "require")
    with pytest.raises(ConfigurationError, match="RINGPRUNE_NATIVE is 'sometimes'; allowed: auto, require, off"):
        library._load(tmp_path, "sometimes")


def test_off_does_not_read_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"garbage")
    assert library._load(tmp_path, "off") is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        pytest.param(FILE, b"garbage", "damaged", id="garbage"),
        pytest.param(FILE, b"", "damaged", id="empty"),
        pytest.param(FILE, MARKER % b"1.0.0", "built for torch 1.0.0", id="another torch"),
        pytest.param(FILE, MARKER % torch.__version__.encode(), FILE, id="not a library"),
        pytest.param("_native.cpython-27-pdp11.so", b"", "another Python", id="another Python"),
    ],
)
def test_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path)
    assert str(tmp_path / name) in message
    assert reason in message


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_file_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    whole = ops.native_path().read_bytes()
    (tmp_path / FILE).write_bytes(whole[: int(share * len(whole))])
    assert "damaged" in refusal(tmp_path)


def test_library_without_our_kernels_is_refused(package: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "empty.c"
    source.write_text(f'const char build[] = "{(MARKER % torch.__version__.encode())[:-1].decode()}";')
    subprocess.run([compiler, "-shared", "-o", str(package / FILE), str(source)], check=True)
    assert "it has no CPU kernel for " in run(package).stderr


@pytest.mark.usefixtures("native")
def test_kernel_for_other_arguments_is_refused(package: Path) -> None:
    shutil.copy(ops.native_path(), package)
    select = package / "ops" / "select.py"
    select.write_text(select.read_text().replace("int[] counts) -> Tensor", "int[] counts, float x) -> Tensor"))
    result = run(package)
    assert "NativeLibraryError" in result.stderr
    assert "its kernel for select takes other arguments" in result.stderr


def test_errors_are_import_errors() -> None:
    assert issubclass(NativeLibraryError, ImportError)


def test_call_turns_errors_of_kernels_into_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: Exception) -> None:
        raise error

    monkeypatch.setitem(library._CHECKS, refuse, lambda error: None)
    for raised, ours in ((ValueError("v"), ConfigurationError), (TypeError("t"), ringprune.errors.ArgumentTypeError)):
        with pytest.raises(ours, match=str(raised)):
            library.call(refuse, raised)
    with pytest.raises(RuntimeError, match="no fault of the arguments"):
        library.call(refuse, RuntimeError("no fault of the arguments"))


def test_the_checks_of_python_explain_what_a_kernel_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: int) -> int:
        if x < 0:
            raise ValueError("the kernel's words")
        return x

    def check(x: int) -> None:
        raise ConfigurationError("our words")

    monkeypatch.setitem(library._CHECKS, kernel, check)
    assert library.call(kernel, 1) == 1  # in front of a kernel the checks would cost more than a small bucket's work
    with pytest.raises(ConfigurationError, match="our words"):
        library.call(kernel, -1)


def ones(**kwargs: Any) -> torch.Tensor:
    return torch.ones(3, **kwargs)


STATE = {"factors": [1.0], "momentum": [0.9], "nesterov": [False]}
SELECTION = {"score": "ratio", "parameters": [0.1], "counts": [1]}
POSITIONS = torch.tensor([0, 2], dtype=torch.int32)
STRANGE = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            lambda out, odd: ops.accumulate([odd], out[0], out[1], residual_out=out[0], velocity_out=out[1], **STATE),
            id="accumulate grads",
        ),
        pytest.param(
            lambda out, odd: ops.accumulate([ones()], out[0], None, residual_out=odd, velocity_out=None, **STATE),
            id="accumulate residual_out",
        ),
        pytest.param(
            lambda out, odd: ops.accumulate_select(
                [ones()],
                out[0],
                out[1],
                [odd],
                residual_out=out[0],
                velocity_out=out[1],
                **STATE,
                **SELECTION,
                hints=ops.Hints.none(1, torch.device("cpu")),
            ),
            id="accumulate_select weights",
        ),
        pytest.param(
            lambda out, odd: ops.importance(out[0], [odd], score="ratio", parameters=[0.1]), id="importance weights"
        ),
        pytest.param(lambda out, odd: ops.put([out[0], odd], POSITIONS, torch.zeros(2)), id="put outputs"),
        pytest.param(lambda out, odd: ops.put(out, POSITIONS, odd[:2].to(odd.dtype)), id="put values"),
        pytest.param(lambda out, odd: ops.take(out[0], odd, POSITIONS, [0, 3]), id="take velocity"),
        pytest.param(lambda out, odd: ops.gather(odd, POSITIONS), id="gather residual"),
        pytest.param(lambda out, odd: ops.give_back(odd, POSITIONS, out[0][:2]), id="give_back residual"),
        pytest.param(lambda out, odd: ops.square_sum([out[0], odd]), id="square_sum"),
        pytest.param(lambda out, odd: ops.count_nonfinite([out[0], odd]), id="count_nonfinite"),
    ],
)
def test_a_tensor_of_another_kind_sends_nobody_astray(call: Callable[..., Any], strange: str) -> None:
    """Neither may be answered, or written, as if nothing were wrong.

    The dispatcher serves a call that holds a meta tensor by the fake kernel, one that holds a sparse tensor by the
    reference, whatever the other tensors are.
    """
    out = [ones(), ones()]
    with pytest.raises((ConfigurationError, ringprune.errors.ArgumentTypeError, RuntimeError)):
        call(out, STRANGE[strange](ones()))
    assert all(bool((tensor == 1.0).all()) for tensor in out)


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_opcheck_passes_without_the_library() -> None:
    chosen = ["-k", "opcheck and not without", "tests/ops"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"RINGPRUNE_NATIVE": "off"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
