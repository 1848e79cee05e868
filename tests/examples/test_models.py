"""Shapes and sizes of the models of the examples."""

import pytest
import torch
from data.source_text import SYMBOLS
from models import PUBLISHED, parameter_count, shapes
from models.alexnet import alexnet
from models.bert_base import Bert
from models.char_lstm import CharLSTM
from models.digits_net import DigitsNet
from models.lstm_lm import WordLSTM
from models.resnet import cifar_resnet, resnet18, resnet50
from models.vgg19 import vgg19
from torch import nn

import ringprune.bench.resnet50

# entries and tensors, as published: torchvision's models, the authors' BERT-base, and for the LSTM its 66 M; those of
# the translation model by hand: 512 (17191 + 7709) + 2 (4 x 512)(512 + 512 + 2) + (4 x 1024)(512 + 1024 + 2) + 1024^2
# + 1024 (2048 + 1) + 7709 (1024 + 1)
SIZES = {
    "alexnet": (61_100_840, 16),
    "vgg19": (143_667_240, 38),
    "resnet18": (11_689_512, 62),
    "resnet50": (25_557_032, 161),
    "bert_base": (109_482_240, 199),
    "lstm_lm": (66_034_000, 11),
    "lstm_translation": (34_299_421, 19),
}


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


def test_cifar_resnet_depth() -> None:
    with pytest.raises(ValueError, match="depth=9: allowed are 8, 14, 20"):
        cifar_resnet(9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    found = shapes(name)
    assert (sum(torch.Size(shape).numel() for shape in found.values()), len(found)) == SIZES[name]


def test_shapes_are_those_of_the_parameters() -> None:
    assert shapes("resnet18") == {name: tuple(p.shape) for name, p in resnet18().named_parameters()}


def test_the_package_measures_the_same_resnet50() -> None:
    """``ringprune bench`` cannot import the examples and keeps the shapes of its own; they are these."""
    assert tuple(shapes("resnet50").values()) == ringprune.bench.resnet50.SHAPES


@pytest.mark.parametrize("build", [alexnet, vgg19])
def test_image_networks(build: type[nn.Module]) -> None:
    with torch.device("meta"):
        scores = build()(torch.zeros(2, 3, 224, 224))
    assert scores.shape == (2, 1000)


def test_bert() -> None:
    model = Bert(vocabulary=50, width=16, layers=2, heads=4, inner=32, positions=10)
    states, pooled = model(torch.zeros(3, 7, dtype=torch.long))
    assert states.shape == (3, 7, 16)
    assert pooled.shape == (3, 16)
    pooled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_word_lstm() -> None:
    model = WordLSTM(vocabulary=50, hidden=8, layers=2, dropout=0.5)
    assert model(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 50)
