"""A character-level LSTM."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """An LSTM over one-hot characters, and a linear layer over the state at each position."""

    def __init__(self, num_characters: int, hidden: int = 128, num_layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_characters = num_characters
        self.lstm = nn.LSTM(num_characters, hidden, num_layers, batch_first=True, dropout=dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 (batch, positions) -> logits of the next character (batch, positions, characters)."""
        one_hot = nn.functional.one_hot(codes, self.num_characters).to(self.output.weight.dtype)
        return self.output(self.lstm(one_hot)[0])
