"""The small convolutional network for handwritten digits."""

from torch import Tensor, nn

__all__ = ["DigitsNet"]


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers for 8x8 grey images; 0.28 M parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores ``(batch, classes)`` of images ``(batch, 1, 8, 8)``."""
        scores: Tensor = self.layers(images)
        return scores
