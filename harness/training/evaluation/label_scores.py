"""How well each label is predicted: precision, recall and F1, and what follows from those of all labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LabelScore(NamedTuple):
    """Numbers of rows: with this label and predicted so, predicted so, and with this label."""

    label: str | int
    right: float
    predicted: float
    true: float

    @property
    def precision(self) -> float | None:
        return self.right / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.right / self.true if self.true else None

    @property
    def f1(self) -> float | None:
        """None if no row has the label or is predicted so."""
        both = self.predicted + self.true
        return 2 * self.right / both if both else None


def of(names: Sequence[str | int], precision: tuple[Tensor, Tensor], recall: tuple[Tensor, Tensor]) -> list[LabelScore]:
    """Return the scores of ``names``, from two pairs (right, counted) with a value for each."""
    (right, predicted), (_, true) = precision, recall
    return list(map(LabelScore, names, right.tolist(), predicted.tolist(), true.tolist()))


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of those that are defined; NaN if none is."""
    return torch.tensor([each for each in values if each is not None], dtype=torch.float64).mean().item()


def mcc(scores: Sequence[LabelScore]) -> float:
    """Return Matthews' correlation coefficient; 0 if all rows have one class, or are predicted as one."""
    _, right, predicted, true = (np.array(each) for each in zip(*scores, strict=True))
    rows = true.sum()
    spread = np.sqrt((rows**2 - (predicted**2).sum()) * (rows**2 - (true**2).sum()))
    return float((right.sum() * rows - (predicted * true).sum()) / spread) if spread else 0.0
