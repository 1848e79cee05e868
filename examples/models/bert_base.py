"""BERT-base, uncased: the encoder with its pooler and no head (Devlin et al., arXiv 1810.04805)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Bert", "bert_base"]


class _Embeddings(nn.Module):
    """Token, position and segment embeddings, summed and normalised."""

    def __init__(self, vocabulary: int, width: int, positions: int, segments: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(segments, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        summed = self.tokens(tokens) + self.positions(places) + self.segments(segments)
        embedded: Tensor = self.dropout(self.norm(summed))
        return embedded


class _Layer(nn.Module):
    """Self-attention and two linear layers, each added to its input and normalised after that."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(linear(x)) for linear in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dropout(self.output(attended)))
        result: Tensor = self.norm(x + self.dropout(self.feed_forward(x)))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` as ``(batch, heads, length, width / heads)``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Bert(nn.Module):
    """Embeddings, layers of attention, and a pooler over the first token.

    Args:
        vocabulary: number of tokens.
        width: size of a state.
        layers: how many layers.
        heads: attention heads of each; they divide ``width``.
        inner: width inside a layer's feed-forward part.
        positions: longest sequence.
        segments: kinds of segments.
    """

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, inner: int, positions: int = 512, segments: int = 2
    ) -> None:
        super().__init__()
        self.embeddings = _Embeddings(vocabulary, width, positions, segments)
        self.layers = nn.Sequential(*(_Layer(width, heads, inner) for _ in range(layers)))
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States ``(batch, length, width)`` and the pooled ``(batch, width)`` of tokens ``(batch, length)``.

        Sequences are full: there is no mask for padding.
        """
        states = self.layers(self.embeddings(tokens, torch.zeros_like(tokens) if segments is None else segments))
        return states, self.pooler(states[:, 0])


def bert_base() -> Bert:
    """BERT-base: 109.5 M parameters in 199 tensors, 21 % of them in the token embedding."""
    return Bert(vocabulary=30522, width=768, layers=12, heads=12, inner=3072)
