"""Profiles: what is written is read again, and what cannot be is refused by its field."""

import json
from pathlib import Path
from typing import Any

import pytest

import ringprune as rp
from ringprune.profiles.format import BadProfile, Layer, Profile, read, text, write

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
    assert (profile.forward_ms, profile.backward_ms) == (1.0, 2.75)
    assert profile.compute_seconds == pytest.approx(3.75e-3)
    assert (tmp_path / "m.json").read_text() == text(profile)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.json"]


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
        (GOOD | {"layers": [LAYER | {"forward_ms": 10**400}]}, "'forward_ms'"),
        (GOOD | {"layers": [LAYER | {"parameters": [2**63]}]}, "'parameters' .* below 1e"),
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
    for wrong in ("{", "[" * 100_000):
        (tmp_path / "text.json").write_text(wrong)
        with pytest.raises(BadProfile, match="is not JSON"):
            read(tmp_path / "text.json")


def test_a_bad_profile_is_an_error_of_ours_and_a_wrong_value() -> None:
    assert issubclass(BadProfile, rp.RingPruneError)
    assert issubclass(BadProfile, ValueError)
