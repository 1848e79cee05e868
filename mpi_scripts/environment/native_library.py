"""RingPrune itself in .venv: the checkout's own files, and the native library built beside them."""

import hashlib
from pathlib import Path

from checkout import PYTHON, ROOT, Choices, installed, pip
from steps import Log

__all__ = ["build", "facts", "install_package", "package_facts"]


def package_facts() -> object:
    """What the package's name, version and commands rest on."""
    return [_digest([ROOT / "pyproject.toml", ROOT / "setup.py"]), installed().get("ringprune")]


def install_package(log: Log) -> str:
    """Let .venv use the Python files of this checkout as they are; the library is a step of its own."""
    options: list[str | Path] = ["--no-index", "--no-deps", "--no-build-isolation", "--editable", ROOT]
    log.call(pip("install", *options), {"RINGPRUNE_BUILD": "none"})
    return "installed"


def facts(choices: Choices) -> object:
    """Sources, the torch they are built against, and the library that came out."""
    sources = sorted(path for path in ROOT.glob("csrc/**/*") if path.is_file())
    digest = _digest([*sources, ROOT / "setup.py"])
    return [digest, choices["RINGPRUNE_BUILD"], installed().get("torch"), [path.name for path in _libraries()]]


def build(log: Log, choices: Choices) -> str:
    """Build the library; what setup.py compiled before and did not change is kept in build/."""
    for path in _libraries():
        path.unlink()
    log.call([PYTHON, "setup.py", "build_ext", "--inplace"], {"RINGPRUNE_BUILD": choices["RINGPRUNE_BUILD"]})
    return "built" if _libraries() else "left out"


def _libraries() -> list[Path]:
    return sorted(ROOT.glob("ringprune/_native*.so"))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()
