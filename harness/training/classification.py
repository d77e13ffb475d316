"""The loss, the evaluation and the predictions of any task with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from harness.training import objective
from harness.training.metrics import Pairs, Report, Sums
from harness.training.objective import Objective
from harness.training.scores import MAX_CONFUSION, MAX_SCORES

__all__ = ["MAX_CONFUSION", "MAX_SCORES", "Classification", "Supervised"]


class Supervised:
    """``loss``, ``evaluate``, ``report`` and ``predictions`` of a task with an ``objective``."""

    objective: Objective

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the rows of the batch."""
        return self.objective.loss(outputs, targets)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """The loss and the metrics of a batch as sums and counts."""
        return self.objective.evaluate(outputs, targets)

    def report(self, sums: Sums) -> Report:
        """{metric: value} of the reduced pairs, and details of the evaluation."""
        return self.objective.report(sums)

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """Columns that the model adds to the table of predictions."""
        return self.objective.predictions(outputs)

    def errors(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Columns that follow from the predictions and the labels."""
        return self.objective.errors(columns)


class Classification(Supervised):
    """``Supervised`` for a task with one class per row, whose model returns logits (batch, classes).

    ``classes[index]`` is the label of a class index. If the task's ``options`` are a LabelledTask, they choose the loss
    and the metrics; otherwise the loss is the cross entropy.
    """

    classes: Sequence[str | int]

    @cached_property
    def objective(self) -> Objective:  # type: ignore[override]
        return objective.of_classes(tuple(self.classes), getattr(self, "options", None))
