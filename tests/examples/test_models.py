"""Shapes and sizes of the models of the examples."""

import pytest
import torch
from data.source_text import SYMBOLS
from models import CharLSTM, DigitsNet, parameter_count
from resnet import cifar_resnet, resnet18, resnet50
from torch import nn


def test_digits_net() -> None:
    model = DigitsNet()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert 0.25e6 < parameter_count(model) < 0.35e6


def test_char_lstm_is_mostly_large_matrices() -> None:
    model = CharLSTM(SYMBOLS)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, SYMBOLS)
    sizes = [(p.numel(), p.dim() > 1 and p.numel() >= 2048) for p in model.parameters()]
    large = sum(size for size, packed in sizes if packed)
    total = sum(size for size, _ in sizes)
    # On two ranks at 1 %: 4 bytes of value and half of 4 bytes of index for what is packed, 4 bytes for the rest.
    assert 4 * total / (0.01 * 6 * large + 4 * (total - large)) > 45


@pytest.mark.parametrize(
    ("model", "parameters", "side"),
    [(cifar_resnet(8), 78_042, 32), (resnet18(10), 11_181_642, 64), (resnet50(10), 23_528_522, 64)],
)
def test_resnets(model: nn.Module, parameters: int, side: int) -> None:
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 10)
    assert parameter_count(model) == parameters


def test_published_sizes() -> None:
    assert parameter_count(resnet18()) == 11_689_512
    assert parameter_count(resnet50()) == 25_557_032


def test_cifar_resnet_depth() -> None:
    with pytest.raises(ValueError, match="depth=9: allowed are 8, 14, 20"):
        cifar_resnet(9)
