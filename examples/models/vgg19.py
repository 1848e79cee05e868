"""VGG-19 for ImageNet: configuration E of Simonyan and Zisserman (arXiv 1409.1556), without batch normalisation."""

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["VGG", "vgg19"]

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and number of 3x3 convolutions; each stage ends by halving the image."""


class VGG(nn.Module):
    """Sixteen 3x3 convolutions and three linear layers."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(*_convolutions(), nn.AdaptiveAvgPool2d(7))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores ``(batch, classes)`` of images ``(batch, 3, height, width)``, 224 x 224 as published."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


def _convolutions() -> Iterator[nn.Module]:
    channels = 3
    for width, depth in STAGES:
        for _ in range(depth):
            yield nn.Conv2d(channels, width, 3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = width
        yield nn.MaxPool2d(2)


def vgg19(classes: int = 1000) -> VGG:
    """VGG-19: 143.7 M parameters in 38 tensors with 1000 classes, 72 % of them in the first linear layer."""
    return VGG(classes)
