"""The computations of evaluations and predictions on a model's outputs, for each kind of labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.data.row_labels import by_column, joined
from harness.training.metrics import Pairs, Report, Rows, Sums

MAX_CONFUSION = 1000  # classes; a larger matrix is unreadable and takes too much memory
MAX_SCORES = 100  # classes; with one column for each of more, the table would be larger than the data
ROWS = "outputs"  # the name under which Sums keeps all outputs and targets


class Scores(Protocol):
    """Metrics and predictions of one kind of labels. ``names`` are the metrics to compute."""

    @property
    def names(self) -> frozenset[str]: ...

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """The sums and counts of a batch, without the loss. Outputs are float32 (batch, outputs)."""
        ...

    def report(self, sums: Sums) -> Report:
        """The metrics, and details for the summary."""
        ...

    def shown(self, outputs: Tensor) -> Tensor:
        """The inputs of the user's own metrics: probabilities, or numbers in the unit of their columns."""
        ...

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """Columns of the table of predictions."""
        ...


@dataclass(frozen=True)
class SingleLabel:
    """One of ``classes`` per row: outputs are logits (batch, classes), targets class indices (batch,)."""

    names: frozenset[str]
    classes: Sequence[str | int]

    @property
    def _tops(self) -> dict[str, int]:
        """{metric: k} of the top-k accuracies."""
        return {name: int(name[3:]) for name in sorted(self.names) if re.fullmatch(r"top\d+", name)}

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Top-k, accuracy per class, and the confusion matrix (label, prediction)."""
        num_classes = len(self.classes)
        rows = torch.full((), float(len(targets)), device=outputs.device)
        predicted = outputs.topk(min(max([1, *self._tops.values()]), num_classes), dim=1).indices
        hits = predicted == targets[:, None]
        per_class = _counted(targets, num_classes)
        right = _counted(targets, num_classes, hits[:, 0])
        pairs = {name: (hits[:, :k].sum(), rows) for name, k in self._tops.items()}
        pairs["class_accuracy"] = (right, per_class)
        if self.names & {"micro_f1", "macro_f1"}:
            pairs["f1"] = (2 * right, per_class + _counted(predicted[:, 0], num_classes))
        if num_classes <= MAX_CONFUSION:
            cells = _counted(targets * num_classes + predicted[:, 0], num_classes**2)
            pairs["confusion"] = (cells.view(num_classes, num_classes), rows)
        return pairs

    def report(self, sums: Sums) -> Report:
        """Accuracy by label; the confusion matrix as counts."""
        report: Report = {name: sums.ratio(name) for name in self._tops}
        correct, count = sums.pairs["class_accuracy"]
        seen = count > 0
        report["mean_class_accuracy"] = (correct[seen] / count[seen]).mean().item()
        if "f1" in sums.pairs:
            report |= _f1(*sums.pairs["f1"])
        report["class_accuracy"] = {
            str(label): (hit / num if num else None)
            for label, hit, num in zip(self.classes, correct.tolist(), count.tolist(), strict=True)
        }
        if "confusion" in sums.pairs:
            report["confusion"] = [[int(cell) for cell in row] for row in sums.pairs["confusion"][0].tolist()]
        return report

    def shown(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """The predicted label and the probability of each class, one column each.

        With more than MAX_SCORES classes: the five most probable labels, each with its probability.
        """
        scores = outputs.float().softmax(dim=1).cpu()
        if len(self.classes) <= MAX_SCORES:
            predicted = [self.classes[index] for index in scores.argmax(dim=1).tolist()]
            return {"prediction": predicted, **_by_label(scores, self.classes)}
        best = _best(scores, self.classes, "prediction")
        return {name.removesuffix("_1"): values for name, values in best.items()}


@dataclass(frozen=True)
class MultiLabel:
    """Any number of ``labels`` per row: outputs are logits (batch, labels), targets zeros and ones of that shape. A
    label is predicted if its probability is above one half."""

    names: frozenset[str]
    labels: Sequence[str | int]
    separator: str

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        predicted, true = outputs > 0, targets > 0
        both, num_predicted, num_true = ((flags).sum(dim=0) for flags in (predicted & true, predicted, true))
        rows = torch.full((), float(len(targets)), device=outputs.device)
        pairs = {
            "precision": (both, num_predicted),
            "recall": (both, num_true),
            "exact_match": ((predicted == true).all(dim=1).sum(), rows),
        }
        if "mean_average_precision" in self.names:
            pairs[ROWS] = Rows(outputs, targets)
        return pairs

    def report(self, sums: Sums) -> Report:
        """Precision, recall and F1 by label."""
        (both, num_predicted), (_, num_true) = sums.pairs["precision"], sums.pairs["recall"]
        report: Report = {"exact_match": sums.ratio("exact_match"), **_f1(2 * both, num_predicted + num_true)}
        if "mean_average_precision" in self.names:
            outputs, targets = sums.all_rows(ROWS)
            found = average_precisions(outputs.numpy(), targets.numpy() > 0)
            report["mean_average_precision"] = float(np.mean(found)) if len(found) else float("nan")
        counts = zip(self.labels, both.tolist(), num_predicted.tolist(), num_true.tolist(), strict=True)
        report["by_label"] = {
            str(label): {
                "precision": hit / predicted if predicted else None,
                "recall": hit / true if true else None,
                "f1": 2 * hit / (predicted + true) if predicted + true else None,
                "rows": int(true),
            }
            for label, hit, predicted, true in counts
        }
        return report

    def shown(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """The predicted labels, and the probability of each label; of more than MAX_SCORES labels, of the five most
        probable."""
        outputs = outputs.float()
        scores, flags = outputs.sigmoid().cpu(), (outputs > 0).cpu()
        predicted = [joined(row.nonzero()[:, 0].tolist(), self.labels, self.separator) for row in flags]
        more = _by_label if len(self.labels) <= MAX_SCORES else _best
        return {"prediction": predicted, **more(scores, self.labels)}


@dataclass(frozen=True)
class Regression:
    """A number per row in each of ``columns``: outputs and targets (batch, columns) are in standard deviations from the
    mean of the training rows."""

    names: frozenset[str]
    columns: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        true = targets.double()
        error = outputs.double() - true
        rows = torch.full((error.shape[1],), float(len(error)), device=outputs.device, dtype=torch.float64)
        return {
            "squares": (error.square().sum(dim=0), rows),
            "absolutes": (error.abs().sum(dim=0), rows),
            "targets": (true.sum(dim=0), rows),
            "target_squares": (true.square().sum(dim=0), rows),
        }

    def report(self, sums: Sums) -> Report:
        """The means of the metrics over the columns, in the unit of each, and the metrics by column."""
        squares, rows = (values.cpu().numpy() for values in sums.pairs["squares"])
        absolutes, total, total_squares = (
            sums.pairs[name][0].cpu().numpy() for name in ("absolutes", "targets", "target_squares")
        )
        spread = total_squares - total**2 / rows
        std = np.asarray(self.std)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 0, 1 - squares / spread, np.nan)  # undefined if all labels are equal
        by_metric = {"rmse": np.sqrt(squares / rows) * std, "mae": absolutes / rows * std, "r2": r2}
        report: Report = {name: float(values.mean()) for name, values in by_metric.items()}
        report["by_column"] = {
            column: {name: float(values[place]) for name, values in by_metric.items()}
            for place, column in enumerate(self.columns)
        }
        return report

    def shown(self, outputs: Tensor) -> Tensor:
        numbers = self._numbers(outputs)
        return numbers[:, 0] if len(self.columns) == 1 else numbers

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        return by_column("prediction", self.columns, self._numbers(outputs).numpy())

    def _numbers(self, outputs: Tensor) -> Tensor:
        """float64 on the CPU, in the unit of each column."""
        return outputs.double().cpu() * torch.tensor(self.std).double() + torch.tensor(self.mean).double()


def _counted(indices: Tensor, size: int, which: Tensor | None = None) -> Tensor:
    """How often each of 0 to ``size`` - 1 is in ``indices``, or in those where ``which`` is true. ``torch.bincount``
    would make the host wait for the device."""
    ones = torch.ones_like(indices) if which is None else which.to(indices.dtype)
    return indices.new_zeros(size).index_add_(0, indices, ones)


def average_precisions(scores: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The average precision of each label that some row has: the mean, over the rows that have it, of the precision
    among the rows with at least their score. Scores and labels: (rows, labels)."""
    found = []
    for column, hot in zip(scores.T, true.T, strict=True):
        if not hot.any():
            continue
        order = np.argsort(-column, kind="stable")
        hits = np.cumsum(hot[order])
        last = np.append(np.diff(column[order]) != 0, True)  # of the rows with equal scores
        recalled, rank = hits[last], np.flatnonzero(last) + 1
        found.append((np.diff(recalled, prepend=0) * recalled / rank).sum() / hits[-1])
    return np.asarray(found)


def _f1(doubled: Tensor, count: Tensor) -> dict[str, float]:
    """F1 over all labels, and its mean over the labels that occur in the labels or in the predictions."""
    seen = count > 0
    macro = (doubled[seen] / count[seen]).mean().item()
    return {"micro_f1": (doubled.sum() / count.sum()).item(), "macro_f1": macro}


def _by_label(scores: Tensor, labels: Sequence[str | int]) -> dict[str, Tensor]:
    return {f"score_{label}": column for label, column in zip(labels, scores.T, strict=True)}


def _best(scores: Tensor, labels: Sequence[str | int], name: str = "label") -> dict[str, Any]:
    """The five labels with the highest scores, and these."""
    best, table = scores.topk(5, dim=1), dict[str, Any]()
    for place, (values, indices) in enumerate(zip(best.values.T, best.indices.T, strict=True), start=1):
        table |= {f"{name}_{place}": [labels[index] for index in indices.tolist()], f"score_{place}": values}
    return table
