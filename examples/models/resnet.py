"""Residual networks: the small ones of the CIFAR-10 experiments, and ResNet-18 and ResNet-50 for ImageNet."""

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["Basic", "Bottleneck", "ResNet", "cifar_resnet", "resnet18", "resnet50"]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and the normalisation that follows it."""
    return [
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class _Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, branch: list[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.activation = nn.ReLU(inplace=True)
        nn.init.zeros_(self.branch[-1].weight)  # every block starts as its shortcut

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.branch(x) + self.shortcut(x))
        return result


class Basic(_Residual):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        branch = [*_convolution(inputs, width, 3, stride), nn.ReLU(inplace=True), *_convolution(width, width, 3)]
        super().__init__(branch, inputs, width, stride)


class Bottleneck(_Residual):
    """1x1, 3x3 and 1x1 convolutions; the last is four times as wide."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        branch = [
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width * self.expansion, 1),
        ]
        super().__init__(branch, inputs, width * self.expansion, stride)


class ResNet(nn.Module):
    """A stem, stages of residual blocks that halve the image from the second on, and a linear head.

    Args:
        stem: the layers in front of the first stage; they put out ``widths[0]`` channels.
        block: ``Basic`` or ``Bottleneck``.
        depths: number of blocks in each stage.
        widths: channels of each stage, before the block's expansion.
        classes: number of scores put out.
    """

    def __init__(
        self,
        stem: Sequence[nn.Module],
        block: type[_Residual],
        depths: Sequence[int],
        widths: Sequence[int],
        classes: int,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                blocks.append(block(channels, width, stride=2 if stage > 0 and place == 0 else 1))
                channels = width * block.expansion
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores ``(batch, classes)`` of images ``(batch, 3, height, width)``."""
        scores: Tensor = self.head(self.blocks(self.stem(images)))
        return scores


def cifar_resnet(depth: int = 20, classes: int = 10) -> ResNet:
    """The ResNet for 32x32 images with ``depth = 6n + 2`` layers; 0.27 M parameters at 20."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth={depth}: allowed are 8, 14, 20, 26, ... (6n + 2)")
    stem = [*_convolution(3, 16, 3), nn.ReLU(inplace=True)]
    return ResNet(stem, Basic, [blocks] * 3, [16, 32, 64], classes)


def _imagenet_stem() -> list[nn.Module]:
    return [*_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18: 11.7 M parameters with 1000 classes."""
    return ResNet(_imagenet_stem(), Basic, [2, 2, 2, 2], [64, 128, 256, 512], classes)


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50 (stride in the 3x3 convolution): 25.6 M parameters with 1000 classes."""
    return ResNet(_imagenet_stem(), Bottleneck, [3, 4, 6, 3], [64, 128, 256, 512], classes)
