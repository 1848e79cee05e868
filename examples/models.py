"""The two small models of the demonstration: a convolutional network for digits and a character language model."""

import torch
from torch import Tensor, nn

__all__ = ["CharLSTM", "DigitsNet"]


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


class CharLSTM(nn.Module):
    """An LSTM that predicts the next character at every place; 0.88 M parameters as it stands."""

    def __init__(self, symbols: int, embedding: int = 64, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, symbols)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores ``(batch, length, symbols)`` of the character that follows each of ``(batch, length)``."""
        states, _ = self.lstm(self.embedding(characters))
        scores: Tensor = self.head(states)
        return scores


def parameter_count(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    torch.manual_seed(0)
    for model in (DigitsNet(), CharLSTM(symbols=97)):
        print(f"{type(model).__name__}: {parameter_count(model):,} parameters")
