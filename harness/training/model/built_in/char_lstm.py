"""A character-level LSTM."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Layers of LSTM over one-hot characters, with dropout between them, and a linear layer over the state at each
    position."""

    def __init__(self, num_characters: int, hidden: int = 128, num_layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_characters = num_characters
        # One by one: cuDNN's own dropout between layers draws numbers that a resume cannot restore.
        self.layers = nn.ModuleList(
            nn.LSTM(hidden if number else num_characters, hidden, batch_first=True) for number in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of the next character (batch, positions, characters) for int64 ``codes`` (batch, positions)."""
        states = nn.functional.one_hot(codes, self.num_characters).to(self.output.weight.dtype)
        for number, layer in enumerate(self.layers):
            states = layer(self.dropout(states) if number else states)[0]
        return self.output(states)
