"""A character-level GRU."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Learned embeddings of characters, a GRU and a linear layer, with dropout between all of them."""

    def __init__(
        self, num_characters: int, embedding: int = 64, hidden: int = 256, num_layers: int = 2, dropout: float = 0.3
    ) -> None:
        super().__init__()
        between_layers = dropout if num_layers > 1 else 0.0  # torch warns about dropout in a single layer
        self.embedding = nn.Embedding(num_characters, embedding)
        self.gru = nn.GRU(embedding, hidden, num_layers, batch_first=True, dropout=between_layers)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 (batch, positions) -> logits of the next character (batch, positions, characters)."""
        return self.output(self.dropout(self.gru(self.dropout(self.embedding(codes)))[0]))
