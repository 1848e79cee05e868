"""What is known of models is what they are; profiles are read, and what cannot be is refused by its name."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import PUBLISHED, shapes

from ringprune.advise.known import MODELS, known, of_entries, workload
from ringprune.bench.resnet50 import SHAPES
from ringprune.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "mpi_scripts" / "profiles").glob("*.json"))
GOOD: dict[str, Any] = {
    "model": "m",
    "provenance": "made up",
    "unit": "ms",
    "layers": [{"name": "a", "parameters": [3, 4000], "forward_ms": 1, "backward_ms": 2.5}],
}


def test_all_published_models_are_known() -> None:
    assert set(MODELS) == set(PUBLISHED)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_model(name: str) -> None:
    assert sorted(known(name).shapes) == sorted(shapes(name).values())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_time_forward_and_about_twice_that_backward(name: str) -> None:
    model = known(name)
    assert model.compute_seconds == pytest.approx(3 * model.forward_seconds, rel=1e-3)


def test_resnet50_is_that_of_the_benchmarks() -> None:
    assert sorted(known("resnet50").shapes) == sorted(SHAPES)


def test_the_file_is_what_its_script_writes() -> None:
    path = ROOT / "mpi_scripts" / "profiles" / "known.py"
    spec = importlib.util.spec_from_file_location("known_models", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.text() == script.TARGET.read_text()


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_that_come_along_are_read(path: Path) -> None:
    found, told = workload(str(path)), json.loads(path.read_text())
    assert found.entries == sum(n for layer in told["layers"] for n in layer["parameters"])
    times = math.fsum(layer["forward_ms"] + layer["backward_ms"] for layer in told["layers"])
    assert found.compute_seconds == pytest.approx(times / 1e3)
    assert found.model == told["model"]


def test_large_tensors_of_a_profile_are_matrices(tmp_path: Path) -> None:
    (path := tmp_path / "m.json").write_text(json.dumps(GOOD))
    assert workload(str(path)).shapes == [(3,), (1, 4000)]


@given(st.integers(1, 10**9), st.floats(1e-6, 1e3))
def test_bare_entries_are_all_there(entries: int, seconds: float) -> None:
    found = of_entries(entries, seconds)
    assert found.entries == entries
    assert found.compute_seconds == pytest.approx(seconds)
    assert max(map(math.prod, found.shapes)) - min(map(math.prod, found.shapes)) <= 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (GOOD | {"layers": []}, "at least one layer"),
        (GOOD | {"layers": [GOOD["layers"][0] | {"parameters": []}]}, "learns nothing"),
        (GOOD | {"layers": [GOOD["layers"][0] | {"forward_ms": -1}]}, "'forward_ms' has to be milliseconds"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(wrong: Any, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigurationError, match=said):
        workload(str(path))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'resnet50'\?"):
        workload("resnet5o")
    with pytest.raises(ConfigurationError, match=r"none\.json: No such file"):
        workload("none.json")
