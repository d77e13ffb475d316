"""Evaluation and predictions of any task with one class per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.training.metrics import Pairs, Report, Sums

MAX_CONFUSION = 1000  # classes; a larger matrix is unreadable and takes too much memory
MAX_SCORES = 100  # classes; with one column for each of more, the table would be larger than the data


class Classification:
    """``evaluate``, ``report`` and ``predictions`` for a task whose model returns logits (batch, classes).

    ``classes[index]`` is the label of a class index.
    """

    classes: Sequence[str | int]

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Loss, top1, top5, accuracy per class, and the confusion matrix (label, prediction)."""
        outputs, num_classes = outputs.float(), len(self.classes)
        rows = torch.tensor(float(len(targets)), device=outputs.device)
        predicted = outputs.topk(min(5, num_classes), dim=1).indices
        hits = predicted == targets[:, None]
        per_class = torch.bincount(targets, minlength=num_classes)
        pairs = {
            "loss": (functional.cross_entropy(outputs, targets, reduction="sum"), rows),
            "top1": (hits[:, 0].sum(), rows),
            "top5": (hits.sum(), rows),
            "class_accuracy": (torch.bincount(targets[hits[:, 0]], minlength=num_classes), per_class),
        }
        if num_classes <= MAX_CONFUSION:
            cells = torch.bincount(targets * num_classes + predicted[:, 0], minlength=num_classes**2)
            pairs["confusion"] = (cells.view(num_classes, num_classes), rows)
        return pairs

    def report(self, sums: Sums) -> Report:
        """{metric: value} of the reduced pairs; accuracy by label; the confusion matrix as counts."""
        report: Report = {name: sums.ratio(name) for name in ("top1", "top5", "loss")}
        correct, count = sums.pairs["class_accuracy"]
        seen = count > 0
        report["mean_class_accuracy"] = (correct[seen] / count[seen]).mean().item()
        report["class_accuracy"] = {
            str(label): (hit / num if num else None)
            for label, hit, num in zip(self.classes, correct.tolist(), count.tolist(), strict=True)
        }
        if "confusion" in sums.pairs:
            report["confusion"] = [[int(cell) for cell in row] for row in sums.pairs["confusion"][0].tolist()]
        return report

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """The predicted label and the probability of each class, one column each.

        With more than MAX_SCORES classes: the five most probable labels, each with its probability.
        """
        scores = outputs.float().softmax(dim=1).cpu()
        if len(self.classes) <= MAX_SCORES:
            predicted = [self.classes[index] for index in scores.argmax(dim=1).tolist()]
            columns = {f"score_{label}": column for label, column in zip(self.classes, scores.T, strict=True)}
            return {"prediction": predicted, **columns}
        best = scores.topk(5, dim=1)
        table: dict[str, Any] = {}
        for place, (values, indices) in enumerate(zip(best.values.T, best.indices.T, strict=True)):
            suffix = f"_{place + 1}" if place else ""
            predicted = [self.classes[index] for index in indices.tolist()]
            table |= {f"prediction{suffix}": predicted, f"score{suffix}": values}
        return table
