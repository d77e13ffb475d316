"""A character-level GRU."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Learned embeddings of characters, layers of GRU and a linear layer, with dropout between all of them."""

    def __init__(
        self, num_characters: int, embedding: int = 64, hidden: int = 256, num_layers: int = 2, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, embedding)
        # One by one: cuDNN's own dropout between layers draws numbers that a resume cannot restore.
        self.layers = nn.ModuleList(
            nn.GRU(hidden if number else embedding, hidden, batch_first=True) for number in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of the next character (batch, positions, characters) for int64 ``codes`` (batch, positions)."""
        states = self.embedding(codes)
        for layer in self.layers:
            states = layer(self.dropout(states))[0]
        return self.output(self.dropout(states))
