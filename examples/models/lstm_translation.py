"""An LSTM translation model with attention, in the size that Sockeye 1 has by default (arXiv 1712.05690)."""

import torch
from torch import Tensor, nn

__all__ = ["LSTMTranslation", "lstm_translation"]


class LSTMTranslation(nn.Module):
    """An encoder that reads both ways, a decoder that is given the right words, and attention over the source."""

    def __init__(self, source: int, target: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, embedding), nn.Embedding(target, embedding)
        self.encoder = nn.LSTM(embedding, hidden // 2, bidirectional=True, batch_first=True)
        self.decoder = nn.LSTM(embedding, hidden, batch_first=True)
        self.query, self.mixed = nn.Linear(hidden, hidden, bias=False), nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores ``(batch, length, words)`` of what follows each word of ``target``; both ``(batch, length)``."""
        read, _ = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target))
        weights = torch.softmax(self.query(states) @ read.transpose(1, 2), dim=2)
        scores: Tensor = self.head(torch.tanh(self.mixed(torch.cat([weights @ read, states], dim=2))))
        return scores


def lstm_translation(source: int = 17_191, target: int = 7_709) -> LSTMTranslation:
    """Embeddings of 512, states of 1024, the vocabularies of IWSLT15 English to Vietnamese."""
    return LSTMTranslation(source, target, embedding=512, hidden=1024)
