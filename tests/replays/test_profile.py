"""Profiles: what is written is read again, what cannot be is refused by its field; those that come along are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PUBLISHED, parameter_count
from replays.counted import counted, meta
from replays.profile import BadProfile, Layer, Profile, read, write
from torch import nn

PROFILES = Path(__file__).resolve().parents[2] / "mpi_scripts" / "profiles"
GOOD: dict[str, Any] = {
    "model": "m",
    "provenance": "made up",
    "unit": "ms",
    "layers": [{"name": "a", "parameters": [3, 4], "forward_ms": 1, "backward_ms": 2.5}],
}
LAYER = GOOD["layers"][0]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    profile = Profile("m", "made up", (Layer("a", (3, 4), 1.0, 2.5), Layer("b", (), 0.0, 0.25)))
    write(profile, tmp_path / "m.json")
    assert read(tmp_path / "m.json") == profile
    assert profile.entries == 7
    assert profile.compute_seconds == pytest.approx(3.75e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "an object .* is needed, this is list"),
        (GOOD | {"model": 3}, "'model' has to be text, not int"),
        ({k: v for k, v in GOOD.items() if k != "provenance"}, "the profile has no 'provenance', only 'layers'"),
        (GOOD | {"unit": "s"}, "'unit' is 's'; only 'ms'"),
        (GOOD | {"layers": []}, "at least one layer"),
        (GOOD | {"layers": [LAYER, 5]}, "layer 1 has to be an object, not int"),
        (GOOD | {"layers": [LAYER | {"name": None}]}, "layer 0: 'name' has to be text, not nothing"),
        (GOOD | {"layers": [{"name": "a"}]}, r"layer 0 \(a\) has no 'parameters', only 'name'"),
        (GOOD | {"layers": [LAYER | {"parameters": [3, -1]}]}, r"layer 0 \(a\): 'parameters' has to be a list"),
        (GOOD | {"layers": [LAYER | {"forward_ms": -1}]}, r"layer 0 \(a\): 'forward_ms' .* at least 0, not -1"),
        (GOOD | {"layers": [LAYER | {"backward_ms": "2 s"}]}, r"'backward_ms' has to be milliseconds.*'2 s'"),
        (GOOD | {"layers": [LAYER | {"backward_ms": float("nan")}]}, "'backward_ms'"),
        (GOOD | {"layers": [LAYER | {"forward_ms": True}]}, "'forward_ms'"),
    ],
)
def test_what_is_wrong_is_named(wrong: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(BadProfile, match=f"wrong.json: .*{said}"):
        read(path)


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(BadProfile, match="is not JSON"):
        read(tmp_path / "text.json")


@pytest.mark.parametrize("name", ["resnet50", "vgg19", "lstm_translation"])
def test_profiles_that_come_along_have_all_that_their_models_learn(name: str) -> None:
    profile = read(PROFILES / f"{name}.json")
    with torch.device("meta"):
        assert profile.entries == parameter_count(PUBLISHED[name]())


def test_operations_counted_by_hand() -> None:
    """A matrix of m x k times k x n is 2 m k n operations; twice as many backward."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)).to("meta")
    profile = counted("tiny", model, [meta(5, 8)], flops=1e6, provenance="by hand")
    first, second = profile.layers
    assert (first.name, first.parameters, second.parameters) == ("0", (128,), (64, 4))
    assert first.forward_ms == pytest.approx(1e3 * 2 * 5 * 8 * 16 / 1e6)
    assert second.forward_ms == pytest.approx(1e3 * 2 * 5 * 16 * 4 / 1e6)
    assert second.backward_ms == pytest.approx(2 * second.forward_ms)


def test_the_operations_of_resnet50_are_those_that_are_published() -> None:
    """4.1 billion multiplications and additions for an image (torchvision: 4.09)."""
    profile = read(PROFILES / "resnet50.json")
    forward = sum(layer.forward_ms for layer in profile.layers) / 1e3 * 2.65e12 / 32
    assert forward / 2 == pytest.approx(4.09e9, rel=0.01)
