"""The 1797 handwritten digits that come with scikit-learn, with a fixed split."""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

__all__ = ["VALIDATION", "Images", "digits"]

VALIDATION = 400  # images kept for validation; one of them is a quarter of a point


class Images(NamedTuple):
    """Images ``(count, channels, height, width)`` and their labels ``(count,)``."""

    images: Tensor
    labels: Tensor


def digits() -> tuple[Images, Images]:
    """The training and the validation images, 8x8, scaled to mean 0 and deviation 1; the split never changes."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    train, held_out = order[VALIDATION:], order[:VALIDATION]
    return Images(images[train], labels[train]), Images(images[held_out], labels[held_out])
