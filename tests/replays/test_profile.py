"""Profiles that come along: they have all that their models learn, and the operations that are published."""

from pathlib import Path

import pytest
import torch
from models import PUBLISHED, parameter_count
from replays.counted import counted, meta
from torch import nn

from ringprune.profiles.format import read

PROFILES = Path(__file__).resolve().parents[2] / "mpi_scripts" / "profiles"


@pytest.mark.parametrize("name", ["resnet50", "vgg19", "lstm_translation", "bert_base"])
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
