"""CIFAR-10 from its own binary files: data_batch_1.bin to data_batch_5.bin and test_batch.bin."""

from pathlib import Path

import numpy
import torch
from torch import Tensor

from data.digits import Images
from data.errors import DataError

__all__ = ["augment", "cifar10"]

RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)


def cifar10(folder: Path) -> tuple[Images, Images]:
    """The training and the test images in ``folder`` (as unpacked: ``cifar-10-batches-bin``), kept as bytes."""
    batches = [_read(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    train = Images(torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches]))
    return train, _read(folder / "test_batch.bin")


def _read(path: Path) -> Images:
    expected = f"records of {RECORD} bytes (a label 0 to 9, then 3072 bytes of pixels) as in CIFAR-10's binary version"
    if not path.is_file():
        raise DataError(path, "no such file", expected)
    content = numpy.fromfile(path, dtype=numpy.uint8)
    if content.size == 0 or content.size % RECORD:
        raise DataError(path, f"{content.size} bytes, not a multiple of {RECORD}", expected)
    records = torch.from_numpy(content).view(-1, RECORD)
    labels = records[:, 0].long()
    wrong = (labels > 9).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise DataError(path, f"record {first} has label {int(labels[first])}", expected)
    return Images(records[:, 1:].reshape(-1, 3, 32, 32), labels)


def normalise(images: Tensor) -> Tensor:
    """Bytes 0 to 255 as floats with mean 0 and deviation 1 in each channel."""
    return (images.float() / 255 - MEAN) / DEVIATION


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped or not, and shifted by up to 4 pixels in each direction; the border is filled with zeros."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), generator=generator)
    rows = down + torch.arange(height)
    columns = right + torch.arange(width)
    flip = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    which = torch.arange(count).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[which, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
