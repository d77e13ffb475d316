"""What every task with one class a row judges by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.training import metrics


class Classification:
    """Metrics of logits (batch, classes), for a task that says what its ``classes`` are called."""

    classes: tuple[str | int, ...]

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return metrics.classification(outputs, targets, len(self.classes))

    def report(self, sums: metrics.Sums) -> metrics.Report:
        return metrics.classification_report(sums, self.classes)

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        return metrics.classification_table(outputs, self.classes)
