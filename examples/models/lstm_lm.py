"""The large LSTM language model for Penn Treebank of Zaremba et al. (arXiv 1409.2329)."""

from torch import Tensor, nn

__all__ = ["WordLSTM", "lstm_lm"]


class WordLSTM(nn.Module):
    """An embedding, an LSTM with dropout between its layers, and a head that does not share the embedding's weights."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=layers, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Scores ``(batch, length, vocabulary)`` of the word that follows each of ``(batch, length)``."""
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        scores: Tensor = self.head(self.dropout(states))
        return scores


def lstm_lm(vocabulary: int = 10_000) -> WordLSTM:
    """Two layers of 1500, vocabulary 10,000: 66.0 M parameters in 11 tensors.

    The model on which Deep Gradient Compression (arXiv 1712.01887) was measured, too. The paper counts 66 M; torch's
    LSTM has two bias vectors for each gate, which makes 66,034,000.
    """
    return WordLSTM(vocabulary, hidden=1500, layers=2, dropout=0.65)
