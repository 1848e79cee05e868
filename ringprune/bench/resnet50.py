"""The parameter tensors of ResNet-50, in the order and with the shapes of torchvision's ``resnet50``."""

from collections.abc import Iterator

__all__ = ["SHAPES"]

Shape = tuple[int, ...]

CLASSES = 1000
EXPANSION = 4
# width and number of blocks of the four stages
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def _convolution(inputs: int, outputs: int, size: int) -> Iterator[Shape]:
    """A convolution without bias, and scale and shift of the batch normalisation that follows it."""
    yield (outputs, inputs, size, size)
    yield (outputs,)
    yield (outputs,)


def _shapes() -> Iterator[Shape]:
    channels = 64
    yield from _convolution(3, channels, 7)
    for width, blocks in STAGES:
        for block in range(blocks):
            yield from _convolution(channels, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, width * EXPANSION, 1)
            if block == 0:  # the shape changes: the shortcut is a convolution
                yield from _convolution(channels, width * EXPANSION, 1)
            channels = width * EXPANSION
    yield (CLASSES, channels)
    yield (CLASSES,)


SHAPES = tuple(_shapes())
"""161 shapes, 25,557,032 entries."""
