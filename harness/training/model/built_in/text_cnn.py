"""A convolutional network for short texts, after Kim (2014), https://arxiv.org/abs/1408.5882."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Learned embeddings of tokens, convolutions over neighbouring tokens, their maxima and means over the text, and a
    linear layer after dropout. Padding, which is token 0, changes nothing."""

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        embedding: int = 64,
        width: int = 64,
        kernels: tuple[int, ...] = (1, 3, 5),
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if any(kernel % 2 == 0 for kernel in kernels):
            raise ValueError(f"kernels must be odd, not {list(kernels)}")
        self.embedding = nn.Embedding(num_tokens, embedding, padding_idx=0)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(embedding, width, kernel, padding=kernel // 2) for kernel in kernels
        )
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * width * len(kernels), num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes) of ``tokens``, int64 (batch, positions)."""
        real = (tokens != 0)[:, None]  # (batch, 1, positions)
        embedded = self.dropout(self.embedding(tokens)).transpose(1, 2)
        features = [torch.relu(convolution(embedded)) * real for convolution in self.convolutions]
        count = real.sum(dim=2).clamp(min=1)
        pooled = [pool for feature in features for pool in (feature.amax(dim=2), feature.sum(dim=2) / count)]
        return self.output(self.dropout(torch.cat(pooled, dim=1)))
