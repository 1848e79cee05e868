"""The set-up: steps run when what they rest on changed, failures explain themselves, pins are complete."""

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "mpi_scripts" / "environment"
PINS = (ENVIRONMENT / "constraints.txt").read_text()
FRAMEWORKS = (ENVIRONMENT / "frameworks.txt").read_text()


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module of the set-up, which lies beside its script and in no package."""
    monkeypatch.syspath_prepend(ENVIRONMENT)
    return importlib.import_module(name)


class Machine:
    """A small set-up of one step, with its stamps and logs in a temporary folder."""

    def __init__(self, steps: ModuleType, folder: Path) -> None:
        self.steps, self.folder = steps, folder
        self.runs = 0
        self.fact = "one"
        self.command = [sys.executable, "-c", "print('hello from the step')"]

    def set_up(self) -> None:
        """Do the step if it has to be done."""
        step = self.steps.Step("probe", "a probe", lambda: [self.fact, ("tuple",)], self._run)
        self.steps.run_steps(
            [step], stamps=self.folder / "stamps.json", logs=self.folder / "logs", environment=dict(os.environ)
        )

    def _run(self, log: object) -> str:
        self.runs += 1
        log.call(self.command, {"GREETING": "hello"}, seconds=20)
        return "done"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(load(monkeypatch, "steps"), tmp_path)


def test_a_step_runs_once_until_its_facts_change(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.set_up()
    machine.set_up()
    assert machine.runs == 1
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\[1/1\] a probe \.\.\. done in \d+ s", first)
    assert second == "[1/1] a probe ... found"
    machine.fact = "two"
    machine.set_up()
    assert machine.runs == 2
    assert "hello from the step" in (machine.folder / "logs" / "probe.log").read_text()


def test_a_damaged_record_means_that_nothing_is_done(machine: Machine) -> None:
    machine.set_up()
    (machine.folder / "stamps.json").write_text("{")
    machine.set_up()
    assert machine.runs == 2


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
        ("NewConnectionError: [Errno -2] Name or service not known", "out of reach"),
        ("OSError: [Errno 28] No space left on device", "make room"),
        ("ERROR: No matching distribution found for torch==9", "pinned version"),
        ("  Could NOT find CUDAToolkit (missing: CUDA_CUDART)", "CUDA_HOME="),
        ("a trouble nobody knows", "ended with status 3"),
    ],
)
def test_a_failure_shows_the_log_and_what_to_try(
    machine: Machine, capsys: pytest.CaptureFixture[str], output: str, advice: str
) -> None:
    lines = [f"line {number}" for number in range(100)] + [output]
    machine.command = [sys.executable, "-c", f"print({chr(10).join(lines)!r}); raise SystemExit(3)"]
    with pytest.raises(SystemExit) as left:
        machine.set_up()
    assert advice in str(left.value)
    assert str(machine.folder / "logs" / "probe.log") in str(left.value)
    shown = capsys.readouterr().err
    assert output in shown
    assert "line 99" in shown
    assert "line 5\n" not in shown, "only the end of a long log"
    machine.command = [sys.executable, "-c", ""]
    machine.set_up()
    assert machine.runs == 2, "a step that failed is not done"


def test_a_failure_shows_the_first_error_of_a_long_log(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a.cc:1:2: error: the reason", *[f"line {number}" for number in range(100)]]
    machine.command = [sys.executable, "-c", f"print({chr(10).join(lines)!r}); raise SystemExit(1)"]
    with pytest.raises(SystemExit):
        machine.set_up()
    assert "the reason" in capsys.readouterr().err


def test_a_step_that_hangs_is_ended(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = machine.steps.Log(tmp_path / "hang.log", dict(os.environ))
    with pytest.raises(machine.steps.SetUpError, match="within 1 s"):
        log.call([sys.executable, "-c", "import time; time.sleep(60)"], seconds=1)
    with pytest.raises(machine.steps.SetUpError, match="cannot start"):
        log.call([tmp_path / "no such program"])


def test_choices_are_checked_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = load(monkeypatch, "checkout")
    monkeypatch.setattr(checkout, "CHOSEN", tmp_path / "choices.json")
    assert checkout.read_choices({}) == {"MPI": "wheel", "TORCH": "", "RINGPRUNE_BUILD": "auto"}
    given = {"MPI": "system", "TORCH": "", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "1", "HOME": "/"}
    checkout.remember(checkout.read_choices(given))
    later = checkout.read_choices({"RINGPRUNE_BUILD": "none"})
    assert (later["MPI"], later["RINGPRUNE_BUILD"]) == ("system", "none")
    assert checkout.of_horovod(later) == {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert checkout.read_choices({"MPI": "wheel"})["MPI"] == "wheel"
    with pytest.raises(ValueError, match="MPI=mpich is not one of wheel, system"):
        checkout.read_choices({"MPI": "mpich"})


def test_choices_of_a_set_up_that_stopped_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build for MPI=system that had failed said to try again with JOBS=1, and the next one took the wheel."""
    checkout, set_up = load(monkeypatch, "checkout"), load(monkeypatch, "set_up")
    monkeypatch.setattr(checkout, "CHOSEN", tmp_path / "choices.json")
    for name in ("VENV", "CACHE", "LOGS", "ROOT"):
        monkeypatch.setattr(set_up, name, tmp_path)
    monkeypatch.chdir(tmp_path)

    def stops(*_: object, **__: object) -> None:
        raise SystemExit("a compiler was killed")

    monkeypatch.setattr(set_up, "run_steps", stops)
    monkeypatch.setattr(set_up, "_steps", lambda choices: [])
    monkeypatch.setenv("TORCH", "cpu")
    with pytest.raises(SystemExit):
        set_up.main()
    monkeypatch.delenv("TORCH")
    assert checkout.read_choices({})["TORCH"] == "cpu"


def test_open_mpis_place_is_told_in_a_venv_of_another_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was looked for where the Python that ran the set-up would have it: "No such file", at every run."""
    mpi_choice = load(monkeypatch, "mpi_choice")
    monkeypatch.setattr(mpi_choice, "VENV", tmp_path)
    packages = tmp_path / "lib" / "python3.99" / "site-packages"
    packages.mkdir(parents=True)
    log = SimpleNamespace(call=lambda *_: None)
    mpi_choice.install(log, {"MPI": "wheel"})
    assert "OPAL_PREFIX" in (packages / mpi_choice.PLACE).read_text()
    assert mpi_choice.facts({"MPI": "wheel"})[-1] is True
    monkeypatch.setattr(mpi_choice, "site", Path)
    mpi_choice.install(log, {"MPI": "system"})
    assert not (packages / mpi_choice.PLACE).exists()


def test_every_package_we_name_is_pinned() -> None:
    pinned = {line.split("==")[0].lower() for line in (PINS + FRAMEWORKS).splitlines() if "==" in line}
    text = (ROOT / "pyproject.toml").read_text()
    table = text[text.index("dependencies = ") : text.index("[project.scripts]")]
    lists = [ast.literal_eval(found) for found in re.findall(r"= (\[.*?\])\n", table, re.DOTALL)]
    named = {re.split(r"[>=<;\[ ]", name)[0].lower() for names in lists for name in names}
    assert {"torch", "mpi4py", "pytest", "rich"} <= named
    assert named <= pinned


def test_every_pin_is_exact_and_each_python_gets_one() -> None:
    lines = [line for line in (PINS + FRAMEWORKS).splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.11")?', line) for line in lines)
    for old in (True, False):
        wanted = [line.split("==")[0] for line in lines if (">=" if old else "<") not in line]
        assert len(wanted) == len(set(wanted))


def test_what_is_installed_here_is_what_is_pinned() -> None:
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tests run in an environment of the user's own")
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prerequisites = load(monkeypatch, "prerequisites")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prerequisites.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(prerequisites, "NEEDED_GB", 1e9)
    text = "\n".join(prerequisites.missing(ROOT))
    for words in ("g++", "python3-dev", "install make", "Disk space"):
        assert words in text


def test_an_old_compiler_is_named_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prerequisites = load(monkeypatch, "prerequisites")
    old = tmp_path / "old-cxx"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    (message,) = [text for text in prerequisites.missing(ROOT) if "old-cxx" in text]
    assert "unrecognized option" in message


@pytest.fixture
def checkout_with_space(tmp_path: Path) -> Path:
    """A checkout with a .venv of nothing, in a folder whose name has a space."""
    folder = tmp_path / "a folder"
    (folder / "mpi_scripts" / "environment").mkdir(parents=True)
    shutil.copy(ENVIRONMENT / "run", folder / "mpi_scripts" / "environment" / "run")
    return folder


def run(checkout: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "mpi_scripts" / "environment" / "run"), "sh", "-c", script]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_run_sets_the_environment_and_keeps_the_users(checkout_with_space: Path) -> None:
    folder = checkout_with_space / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "orted"):
        (folder / name).symlink_to("/bin/true")
    script = 'echo "$PATH|$OPAL_PREFIX|$OMP_NUM_THREADS|$OMPI_MCA_rmaps_base_oversubscribe"'
    path, prefix, threads, oversubscribe = run(checkout_with_space, script).stdout.strip().split("|")
    assert path.startswith(f"{folder}:")
    assert (prefix, threads, oversubscribe) == (str(folder.parent), "1", "1")
    assert "|4|" in run(checkout_with_space, script, OMP_NUM_THREADS="4").stdout


def test_run_may_be_called_by_a_link(checkout_with_space: Path, tmp_path: Path) -> None:
    (checkout_with_space / ".venv" / "bin").mkdir(parents=True)
    (checkout_with_space / ".venv" / "bin" / "python").symlink_to("/bin/true")
    link = tmp_path / "link"
    link.symlink_to(checkout_with_space / "mpi_scripts" / "environment" / "run")
    done = subprocess.run([str(link), "printenv", "VIRTUAL_ENV"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{checkout_with_space / '.venv'}\n", "")


def test_a_python_of_the_environment_knows_where_open_mpi_lies() -> None:
    """A script started as "python train.py" died in hvd.init(), with an error of ORTE and no traceback."""
    if Path(sys.prefix) != ROOT / ".venv" or not (ROOT / ".venv" / "bin" / "orted").exists():
        pytest.skip("the tests run in an environment of the user's own, or on the site's MPI")
    script = "import horovod.torch as hvd; hvd.init(); print(hvd.size())"
    left = ("OPAL_", "OMPI_", "PMIX_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=bare | root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_run_says_when_nothing_is_set_up(checkout_with_space: Path) -> None:
    done = run(checkout_with_space, "true")
    assert done.returncode == 1
    assert "make demo" in done.stderr


@pytest.mark.parametrize(
    ("has_torch", "complaint"), [(False, "python has no torch: install it first"), (True, "no mpicxx on PATH")]
)
def test_horovod_is_not_built_where_it_cannot_be(tmp_path: Path, has_torch: bool, complaint: str) -> None:
    for name in ("bash", "dirname", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    python = tmp_path / "python"
    python.write_text(f"#!{shutil.which('bash')}\nexit {int(not has_torch)}\n")
    python.chmod(0o755)
    script = [str(tmp_path / "bash"), str(ENVIRONMENT / "install_horovod.sh")]
    done = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr


def test_make_alone_lists_its_targets() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "lint", "format", "clean"):
        assert f"make {target} " in done.stdout


def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py, loaded without building anything."""
    monkeypatch.setenv("RINGPRUNE_BUILD", "none")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("ringprune_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("option", ["", "-static-libstdc++"])
def test_the_library_shares_the_cxx_library_of_the_process(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler linked a copy into it, and a number in the message of an error ended the process."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {option} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    flags = setup_py(monkeypatch).shared_cxx()
    source, library = tmp_path / "number.cpp", tmp_path / "number.so"
    source.write_text("#include <sstream>\nvoid number(std::ostringstream& to, long n) { to << n; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, *flags], check=True)
    assert b"libstdc++.so.6" in library.read_bytes()


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler", ""), ("false", "false links no shared C++ library")]
)
def test_a_compiler_that_does_not_work_is_left_to_the_build(
    compiler: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert setup_py(monkeypatch).shared_cxx() == []
    assert words in capsys.readouterr().err


def toolkit(folder: Path, release: str | None) -> Path:
    """A folder like that of a CUDA toolkit; ``release`` None: of an image to run in, without a compiler."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    if release:
        nvcc = folder / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        nvcc.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("built_for", "release", "words"),
    [
        ("13.0", None, r"needs? a CUDA toolkit with bin/nvcc and include/cuda_runtime.h \(CUDA_HOME\)"),
        ("13.0", "12.4", "needs? the CUDA toolkit 13 that torch is built for, where nvcc is 12.4"),
        ("12.8", "12.0", "needs? nvcc 12.1 or newer, where it is 12.0"),
        ("12.8", "12.4", None),
        ("13.0", "13.2", None),
    ],
)
def test_auto_builds_for_cuda_only_where_nvcc_can(
    built_for: str,
    release: str | None,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A CUDA folder without nvcc, or of another release, ended the whole installation."""
    setup = setup_py(monkeypatch)
    home = str(toolkit(tmp_path, release))
    extension = SimpleNamespace(CUDA_HOME=home)
    torch = SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda=built_for), utils=SimpleNamespace(cpp_extension=extension)
    )
    assert setup.wants_cuda("auto", torch) == (words is None)
    assert not setup.wants_cuda("cpu", torch)
    if words is None:
        assert setup.wants_cuda("cuda", torch)
        return
    assert re.search(words, capsys.readouterr().err)
    with pytest.raises(SystemExit, match=f"RINGPRUNE_BUILD=cuda {words}"):
        setup.wants_cuda("cuda", torch)


def test_an_nvcc_outside_of_its_toolkit_does_not_end_the_set_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch takes the folder above nvcc for the toolkit: of a script there neither Horovod nor our library compiled."""
    whole = toolkit(tmp_path / "cuda-13.0", "13.0")
    script = tmp_path / "local" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho '#$ TOP={whole}/bin/..' >&2\n{whole}/bin/nvcc\n")
    script.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.defpath}")
    environment = load(monkeypatch, "checkout").environment()
    assert environment["CUDA_HOME"] == str(whole)
    assert environment["PATH"].split(":")[1:3] == [str(whole / "bin"), str(script.parent)]

    script.write_text("\x7fELF of another machine")  # it ended the set-up, also with TORCH=cpu
    monkeypatch.setattr(load(monkeypatch, "cuda_toolkit"), "USUAL", tmp_path / "none")
    assert "CUDA_HOME" not in load(monkeypatch, "checkout").environment()
    monkeypatch.chdir(whole / "bin")
    monkeypatch.setenv("PATH", ".")
    assert load(monkeypatch, "checkout").environment()["CUDA_HOME"] == str(whole)

    extension = SimpleNamespace(CUDA_HOME=str(script.parents[1]))  # as torch guesses where nobody says CUDA_HOME
    torch = SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda="13.0"), utils=SimpleNamespace(cpp_extension=extension)
    )
    assert not setup_py(monkeypatch).wants_cuda("auto", torch)
    assert "a CUDA toolkit" in capsys.readouterr().err


def test_pip_finds_the_toolkit_of_an_nvcc_that_is_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It left the CUDA kernels out, and said so where pip shows nothing; what somebody has named stays named."""
    whole = toolkit(tmp_path / "cuda-13.0", "13.0")
    script = tmp_path / "local" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho '#$ TOP={whole}/bin/..' >&2\n{whole}/bin/nvcc\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.defpath}")
    for named, expected in (("", str(whole)), ("/elsewhere", "/elsewhere")):
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv("CUDA_HOME", named)
        path = list(sys.path)
        setup_py(monkeypatch).name_toolkit()
        assert (os.environ["CUDA_HOME"], sys.path) == (expected, path)


def test_an_older_nvcc_is_not_asked_for_gpus_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own release, 12.8, nvcc 12.4 was told to compile for sm_100, and the installation ended there."""
    setup = setup_py(monkeypatch)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert "10.0" not in setup.gpus("12.4")
    assert "10.0" in setup.gpus("12.10")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert setup.gpus("13.0") == "8.6"


@pytest.mark.parametrize("shared", [True, False])
def test_a_torch_of_the_system_counts_where_the_environment_lets_it_in(
    shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library was left out in environments with --system-site-packages, as clusters and NGC images have them."""
    setup = setup_py(monkeypatch)
    (tmp_path / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = {str(shared).lower()}\n")
    monkeypatch.setattr(setup.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(setup.sys, "base_prefix", "/base")
    folders = setup.site_folders()
    assert any(folder.startswith("/base/") for folder in folders) == shared
    assert (setup.site.getusersitepackages() in folders) == shared


@pytest.mark.parametrize(("mode", "words"), [("gpu", "auto, cpu, cuda, none"), ("cuda", "a CUDA toolkit")])
def test_a_build_that_cannot_be_is_refused(mode: str, words: str) -> None:
    environment = {**os.environ, "RINGPRUNE_BUILD": mode, "CUDA_HOME": ""}
    command = [sys.executable, "-W", "ignore", "setup.py", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if mode == "cuda" and done.returncode == 0:
        pytest.skip("here it can be: torch and toolkit have CUDA")
    assert done.returncode == 1
    assert f"RINGPRUNE_BUILD={mode}" in done.stderr
    assert words in done.stderr
