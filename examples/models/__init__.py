"""The models of the examples and benchmarks: plain torch.nn, one file each."""

from collections.abc import Callable

import torch
from torch import nn

from models.alexnet import alexnet
from models.bert_base import bert_base
from models.lstm_lm import lstm_lm
from models.lstm_translation import lstm_translation
from models.resnet import resnet18, resnet50
from models.vgg19 import vgg19

__all__ = ["PUBLISHED", "parameter_count", "shapes"]

PUBLISHED: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "vgg19": vgg19,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "bert_base": bert_base,
    "lstm_lm": lstm_lm,
    "lstm_translation": lstm_translation,
}
"""Models as they were published, by name; what builds each with its published sizes."""


def parameter_count(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a published model, by its name in the model; allocates none of them."""
    with torch.device("meta"):
        model = PUBLISHED[name]()
    return {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
