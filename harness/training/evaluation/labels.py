"""The kinds of labels (classes, tags, numbers), each with its built-in metrics, predictions and learned facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.config.targets import TOP, Kind
from harness.data.row_labels import (
    ClassLabels,
    NumberLabels,
    RowLabels,
    TagLabels,
    by_column,
    class_indices,
    column_names,
    joined,
)
from harness.data.table.labels import Form
from harness.data.table.table import Table
from harness.errors import ConfigError
from harness.training.evaluation.sums import Pairs, Report, Sums

MAX_CONFUSION = 1000  # classes; a larger matrix is unreadable and takes too much memory
MAX_SCORES = 100  # classes; with one column for each of more, the table would be larger than the data
_LISTED = 10  # names in the summary
TO_UNITS = "multiply by std, add mean"  # what makes numbers in the unit of the columns of standardized ones

Columns = Mapping[str, Sequence[object] | np.ndarray | Tensor]  # {column: one value per row}

KINDS: dict[Kind, type[Labels]] = {}


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


@dataclass(frozen=True)
class Labels(ABC):
    """The labels of the training data. Each subclass is a kind of labels, found in KINDS, and computes what follows
    from it."""

    names: tuple[str | int, ...]
    """The classes, the labels that a row may have, or the columns of numbers."""
    kind: ClassVar[Kind]
    title: ClassVar[str]
    """What the summary calls ``names``."""
    count_argument: ClassVar[str] = ""
    """The argument of a metric that takes the number of names."""
    unusable: ClassVar[str] = "that is not in the training data"
    """Which labels of a new file cannot be used."""
    kept_bytes: ClassVar[int] = 4
    """Memory that a metric that keeps all rows needs for an output and its target."""
    form: ClassVar[Form]
    """How a table has them."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS.setdefault(cls.kind, cls)  # a subclass of a kind does not replace it

    @classmethod
    @abstractmethod
    def of_table(cls, table: Table, columns: Sequence[str], separator: str) -> Labels:
        """Return the labels in the ``columns`` of ``table``, the training data."""

    @classmethod
    @abstractmethod
    def of_learned(cls, learned: Mapping[str, object], separator: str) -> Labels:
        """Return the reverse of ``learned``, from a file that anybody may have edited. Raises ConfigError."""

    @abstractmethod
    def of_rows(self, table: Table, train: str) -> RowLabels:
        """Return the labels of the rows of ``table``. Raises DataError for one that the table ``train`` lacks."""

    @property
    def learned(self) -> dict[str, object]:
        """Return these facts as JSON, for the run folder."""
        return {"classes": list(self.names)}

    @property
    def listing(self) -> str:
        """The number of names and the first of them, for the summary."""
        return f"{len(self.names)}: {_first(self.names)}"

    @property
    def label_columns(self) -> list[str]:
        """The columns of labels of a table of predictions."""
        return ["label"]

    @abstractmethod
    def made_up(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return targets of ``rows`` rows, with each label at least once if there are few."""

    @abstractmethod
    def pairs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[str], confusion: bool = True) -> Pairs:
        """Return the sums and counts of a batch, without the loss. Outputs are float32 (batch, outputs). ``confusion``:
        with the confusion matrix of classes, which is large if they are many."""

    @abstractmethod
    def report(self, sums: Sums) -> Report:
        """Return the metrics, and details for the summary."""

    def per_label(self, sums: Sums) -> list[LabelScore]:
        """Return the score of each label; empty for numbers."""
        return []

    @abstractmethod
    def targets(self, texts: Sequence[Sequence[str]], empty: bool) -> tuple[list[int], Tensor]:
        """Return (the rows whose labels are usable, their targets) of ``texts``, the columns of labels as a file has
        them. ``empty``: whether a blank text means that a row has no label."""

    @abstractmethod
    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the user's own metrics: probabilities and classes, or numbers in the unit of their
        columns."""

    @abstractmethod
    def predictions(self, outputs: Tensor) -> Columns:
        """Return columns of the table of predictions."""

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """Return the columns that follow from predictions and labels."""
        return {}

    @property
    def signature(self) -> dict[str, object]:
        """The meaning of the model's outputs, for ``harness export``."""
        return {"output": "logits", "classes": list(self.names)}


@dataclass(frozen=True)
class SingleLabel(Labels):
    """One class per row: outputs are logits (batch, classes), targets class indices (batch,)."""

    kind: ClassVar[Kind] = "single_label"
    title: ClassVar[str] = "classes"
    count_argument: ClassVar[str] = "num_classes"
    form: ClassVar[Form] = "class"

    @classmethod
    def of_table(cls, table: Table, columns: Sequence[str], separator: str) -> SingleLabel:
        return cls(table.vocabulary)

    @classmethod
    def of_learned(cls, learned: Mapping[str, object], separator: str) -> SingleLabel:
        return cls(_classes(learned))

    def of_rows(self, table: Table, train: str) -> RowLabels:
        return ClassLabels(table, class_indices(table, self.names, train), len(self.names))

    def made_up(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.arange(rows) % len(self.names)

    def pairs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[str], confusion: bool = True) -> Pairs:
        """Return top-k, accuracy and precision per class, and the confusion matrix (label, prediction)."""
        num_classes = len(self.names)
        tops = {name: int(name[3:]) for name in metrics if TOP.fullmatch(name)}
        rows = torch.full((), float(len(targets)), device=outputs.device)
        predicted = outputs.topk(min(max([1, *tops.values()]), num_classes), dim=1).indices
        hits = predicted == targets[:, None]
        right = _counted(targets, num_classes, hits[:, 0])
        pairs: Pairs = {name: (hits[:, :k].sum(), rows) for name, k in tops.items()}
        pairs["class_accuracy"] = (right, _counted(targets, num_classes))
        pairs["class_precision"] = (right, _counted(predicted[:, 0], num_classes))
        if confusion and num_classes <= MAX_CONFUSION:
            cells = _counted(targets * num_classes + predicted[:, 0], num_classes**2)
            pairs["confusion"] = (cells.view(num_classes, num_classes), rows)
        return pairs

    def report(self, sums: Sums) -> Report:
        """Return the metrics, the accuracy by label, and the confusion matrix as counts."""
        report: dict[str, object] = {name: sums.ratio(name) for name in sums.pairs if TOP.fullmatch(name)}
        scores = self.per_label(sums)
        report["mean_class_accuracy"] = _mean(each.recall for each in scores)
        report["macro_f1"] = _mean(each.f1 for each in scores)
        report["mcc"] = _mcc(scores)
        if len(self.names) == 2:
            report["f1"] = scores[1].f1 or 0.0
        report["class_accuracy"] = {str(each.label): each.recall for each in scores}
        if "confusion" in sums.pairs:
            report["confusion"] = [[int(cell) for cell in row] for row in sums.pairs["confusion"][0].tolist()]
        return report

    def per_label(self, sums: Sums) -> list[LabelScore]:
        return _scores(self.names, sums.pairs["class_precision"], sums.pairs["class_accuracy"])

    def targets(self, texts: Sequence[Sequence[str]], empty: bool) -> tuple[list[int], Tensor]:
        index = {str(name): position for position, name in enumerate(self.names)}
        usable = [row for row, text in enumerate(texts[0]) if text in index]
        return usable, torch.tensor([index[texts[0][row]] for row in usable], dtype=torch.int64)

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.softmax(dim=1), targets

    def predictions(self, outputs: Tensor) -> Columns:
        """Return the predicted label and the probability of each class, one column each.

        With more than MAX_SCORES classes: the five most probable labels, each with its probability.
        """
        scores = outputs.float().softmax(dim=1).cpu()
        if len(self.names) <= MAX_SCORES:
            predicted = [self.names[index] for index in scores.argmax(dim=1).tolist()]
            return {"prediction": predicted, **_by_label(scores, self.names)}
        best = _best(scores, self.names, "prediction")
        return {name.removesuffix("_1"): values for name, values in best.items()}


@dataclass(frozen=True)
class MultiLabel(Labels):
    """Any number of labels per row: outputs are logits (batch, labels), targets zeros and ones of that shape. A label
    is predicted if its probability is above one half. ``separator`` is between the labels of a row."""

    separator: str
    kind: ClassVar[Kind] = "multi_label"
    title: ClassVar[str] = "labels"
    count_argument: ClassVar[str] = "num_labels"
    kept_bytes: ClassVar[int] = 5
    form: ClassVar[Form] = "tags"

    @classmethod
    def of_table(cls, table: Table, columns: Sequence[str], separator: str) -> MultiLabel:
        return cls(table.vocabulary, separator)

    @classmethod
    def of_learned(cls, learned: Mapping[str, object], separator: str) -> MultiLabel:
        return cls(_classes(learned), separator)

    def of_rows(self, table: Table, train: str) -> RowLabels:
        return TagLabels(table, class_indices(table, self.names, train), self.names, self.separator)

    def made_up(self, rows: int, generator: torch.Generator) -> Tensor:
        hot = torch.zeros(rows, len(self.names), dtype=torch.uint8)
        half = torch.arange(rows // 2)
        hot[half, half % len(self.names)] = 1
        return hot

    def pairs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[str], confusion: bool = True) -> Pairs:
        predicted, true = outputs > 0, targets > 0
        num_correct, num_predicted, num_true = (flags.sum(dim=0) for flags in (predicted & true, predicted, true))
        rows = torch.full((), float(len(targets)), device=outputs.device)
        return {
            "precision": (num_correct, num_predicted),
            "recall": (num_correct, num_true),
            "exact_match": ((predicted == true).all(dim=1).sum(), rows),
        }

    def report(self, sums: Sums) -> Report:
        """Return the metrics, and precision, recall and F1 by label."""
        scores = self.per_label(sums)
        _, *counts = zip(*scores, strict=True)
        by_label = {
            str(each.label): {"precision": each.precision, "recall": each.recall, "f1": each.f1, "rows": int(each.true)}
            for each in scores
        }
        return {
            "exact_match": sums.ratio("exact_match"),
            "micro_f1": LabelScore("all", *map(sum, counts)).f1 or 0.0,
            "macro_f1": _mean(each.f1 for each in scores),
            "by_label": by_label,
        }

    def per_label(self, sums: Sums) -> list[LabelScore]:
        return _scores(self.names, sums.pairs["precision"], sums.pairs["recall"])

    def targets(self, texts: Sequence[Sequence[str]], empty: bool) -> tuple[list[int], Tensor]:
        index = {str(name): position for position, name in enumerate(self.names)}
        parts = [[name for part in text.split(self.separator) if (name := part.strip())] for text in texts[0]]
        usable = [row for row, names in enumerate(parts) if (names or empty) and all(name in index for name in names)]
        hot = torch.zeros(len(usable), len(self.names), dtype=torch.uint8)
        for position, row in enumerate(usable):
            hot[position, [index[name] for name in parts[row]]] = 1
        return usable, hot

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.sigmoid(), targets.long()

    def predictions(self, outputs: Tensor) -> Columns:
        """Return the predicted labels, and the probability of each label; of more than MAX_SCORES labels, of the five
        most probable."""
        outputs = outputs.float()
        scores, flags = outputs.sigmoid().cpu(), (outputs > 0).cpu()
        predicted = [joined(row.nonzero()[:, 0].tolist(), self.names, self.separator) for row in flags]
        more = _by_label if len(self.names) <= MAX_SCORES else _best
        return {"prediction": predicted, **more(scores, self.names)}

    @property
    def signature(self) -> dict[str, object]:
        return super().signature | {"postprocessing": {"probability": "sigmoid of each logit", "threshold": 0.5}}


@dataclass(frozen=True)
class Regression(Labels):
    """A number per row in each of the columns: outputs and targets (batch, columns) are in standard deviations ``std``
    from the ``mean`` of the training rows."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: ClassVar[Kind] = "regression"
    title: ClassVar[str] = "columns"
    unusable: ClassVar[str] = "that is not a number"
    form: ClassVar[Form] = "numbers"

    @classmethod
    def of_table(cls, table: Table, columns: Sequence[str], separator: str) -> Regression:
        return cls(tuple(columns), table.mean, table.std)

    @classmethod
    def of_learned(cls, learned: Mapping[str, object], separator: str) -> Regression:
        names = _learned(learned, "columns", str)
        mean, std = (_learned(learned, key, float, len(names)) for key in ("mean", "std"))
        return cls(names, mean, std)

    def of_rows(self, table: Table, train: str) -> RowLabels:
        return NumberLabels(table, tuple(map(str, self.names)), np.asarray(self.mean), np.asarray(self.std))

    @property
    def learned(self) -> dict[str, object]:
        return {"columns": list(self.names), "mean": list(self.mean), "std": list(self.std)}

    @property
    def listing(self) -> str:
        return _first(self.names)

    @property
    def label_columns(self) -> list[str]:
        return column_names("label", list(map(str, self.names)))

    def made_up(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, len(self.names), generator=generator)

    def pairs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[str], confusion: bool = True) -> Pairs:
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
        """Return the means of the metrics over the columns, in the unit of each, and the metrics by column."""
        squares, rows = (values.cpu().numpy() for values in sums.pairs["squares"])
        absolutes, total, total_squares = (
            sums.pairs[name][0].cpu().numpy() for name in ("absolutes", "targets", "target_squares")
        )
        spread = total_squares - total**2 / rows  # of equal labels, what rounding leaves: at most rounded
        rounded = 2 * rows * np.finfo(np.float64).eps * total_squares
        std = np.asarray(self.std)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > rounded, 1 - squares / spread, np.nan)  # undefined if all labels are equal
        by_metric = {"rmse": np.sqrt(squares / rows) * std, "mae": absolutes / rows * std, "r2": r2}
        report: dict[str, object] = {name: float(values.mean()) for name, values in by_metric.items()}
        report["by_column"] = {
            str(column): {name: float(values[column_number]) for name, values in by_metric.items()}
            for column_number, column in enumerate(self.names)
        }
        return report

    def targets(self, texts: Sequence[Sequence[str]], empty: bool) -> tuple[list[int], Tensor]:
        import pandas as pd  # late: training does not need it here

        numbers = np.stack([pd.to_numeric(pd.Series(each), errors="coerce").to_numpy(float) for each in texts], axis=1)
        usable = np.isfinite(numbers).all(axis=1).nonzero()[0]
        scaled = (numbers[usable] - np.asarray(self.mean)) / np.asarray(self.std)
        return usable.tolist(), torch.from_numpy(scaled.astype(np.float32))

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        numbers, true = (self._numbers(scaled) for scaled in (outputs, targets))
        return (numbers[:, 0], true[:, 0]) if len(self.names) == 1 else (numbers, true)

    def predictions(self, outputs: Tensor) -> Columns:
        return by_column("prediction", list(map(str, self.names)), self._numbers(outputs).numpy())

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """Return prediction - label."""
        names = [name.removeprefix("prediction") for name in columns if name.startswith("prediction")]
        pairs = {name: (columns[f"prediction{name}"], columns.get(f"label{name}")) for name in names}
        return {
            f"error{name}": np.asarray(prediction, float) - np.asarray(label, float)
            for name, (prediction, label) in pairs.items()
            if label is not None and not any(isinstance(value, str) for value in label[:1])
        }

    def _numbers(self, scaled: Tensor) -> Tensor:
        """Return ``scaled`` in the unit of each column, in float64 on the CPU."""
        std, mean = (torch.tensor(each, dtype=torch.float64) for each in (self.std, self.mean))
        return scaled.double().cpu() * std + mean

    @property
    def signature(self) -> dict[str, object]:
        scale = {"scale": TO_UNITS, "mean": list(self.mean), "std": list(self.std)}
        return {"output": "numbers", "columns": list(self.names), "postprocessing": scale}


def _learned(learned: Mapping[str, object], key: str, kind: type, number: int | None = None) -> tuple[Any, ...]:
    """Return the ``number`` values of ``learned[key]``, of ``kind`` or whole numbers; by default, one or more. Raises
    ConfigError."""
    values = learned.get(key)
    if (
        isinstance(values, list)
        and len(values) == (number or max(1, len(values)))
        and all(type(each) in (kind, int) and (kind is str or abs(each) < 1e300) for each in values)
    ):
        return tuple(values)
    raise _invalid()


def _classes(learned: Mapping[str, object]) -> tuple[Any, ...]:
    """Return the classes. Raises ConfigError, also for facts of numbers beside them."""
    if learned.get("mean") or learned.get("std"):
        raise _invalid()
    return _learned(learned, "classes", str)


def _invalid() -> ConfigError:
    return ConfigError(
        "the run's task.json lacks valid information about the labels of the training data",
        hint="start the run again to write the file: harness train -c RUN/config.yaml",
    )


def _first(names: Sequence[str | int]) -> str:
    return ", ".join([*map(str, names[:_LISTED]), *["..."] * (len(names) > _LISTED)])


def _counted(indices: Tensor, size: int, which: Tensor | None = None) -> Tensor:
    """Return how often each of 0 to ``size`` - 1 is in ``indices``, or in those where ``which`` is true.
    ``torch.bincount`` would make the host wait for the device."""
    ones = torch.ones_like(indices) if which is None else which.to(indices.dtype)
    return indices.new_zeros(size).index_add_(0, indices, ones)


def _by_label(scores: Tensor, labels: Sequence[str | int]) -> dict[str, Tensor]:
    return {f"score_{label}": column for label, column in zip(labels, scores.T, strict=True)}


def _best(scores: Tensor, labels: Sequence[str | int], name: str = "label") -> Columns:
    """Return the five labels with the highest scores, and these."""
    best, table = scores.topk(5, dim=1), dict[str, Sequence[object] | Tensor]()
    for rank, (values, indices) in enumerate(zip(best.values.T, best.indices.T, strict=True), start=1):
        table |= {f"{name}_{rank}": [labels[index] for index in indices.tolist()], f"score_{rank}": values}
    return table


def _scores(
    names: Sequence[str | int], precision: tuple[Tensor, Tensor], recall: tuple[Tensor, Tensor]
) -> list[LabelScore]:
    """Return the scores of ``names``, from two pairs (right, counted) with a value for each."""
    (right, predicted), (_, true) = precision, recall
    return list(map(LabelScore, names, right.tolist(), predicted.tolist(), true.tolist()))


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of those that are defined; NaN if none is."""
    return torch.tensor([each for each in values if each is not None], dtype=torch.float64).mean().item()


def _mcc(scores: Sequence[LabelScore]) -> float:
    """Return Matthews' correlation coefficient; 0 if all rows have one class, or are predicted as one."""
    _, right, predicted, true = (np.array(each) for each in zip(*scores, strict=True))
    rows = true.sum()
    spread = np.sqrt((rows**2 - (predicted**2).sum()) * (rows**2 - (true**2).sum()))
    return float((right.sum() * rows - (predicted * true).sum()) / spread) if spread else 0.0
