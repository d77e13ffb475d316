"""The objective of a task with labels: its loss, its metrics and its predictions, which follow from the kind of labels.

The settings are in ``harness.config.targets``. A task makes an ``Objective`` when it opens its data, for tables with
``open_tables``, and inherits from ``Supervised``, which passes everything on.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.config import plugins
from harness.config.targets import TOP, Kind, LabelledTask, LossSection, TableTask
from harness.data.row_labels import ClassLabels, NoLabels, NumberLabels, RowLabels, TagLabels, indices
from harness.data.table.labels import LabelColumns
from harness.data.table.table import Table, open_table
from harness.errors import ConfigError, first_line, plural, users_line
from harness.training.evaluation.metrics import (
    Columns,
    Labels,
    MultiLabel,
    OwnMetric,
    Pairs,
    Regression,
    Report,
    SingleLabel,
    Sums,
    labels_of,
    learned_labels,
)

MAX_KEPT = 1 << 29  # outputs of all evaluation rows that a metric may keep, as numbers
_MADE_UP_ROWS = 64

Counts = Callable[[], tuple[np.ndarray, int]]  # (training rows with each label, training rows)


# Losses


class Loss:
    """A loss, built in or the user's own, as the mean over the rows of a batch, so that the mean over micro-batches and
    ranks is the mean over all rows. With class weights, too, the sum is divided by the number of rows, not by the sum
    of their weights as torch does."""

    def __init__(self, section: LabelledTask, labels: Labels, counts: Counts | None) -> None:
        self.name, self._device = section.loss_name, torch.device("cpu")
        self._call: Callable[[Tensor, Tensor], object] = (
            _own_loss(self.name, section.loss) if "." in self.name else _BuiltIn(section, labels, counts)
        )

    def __call__(self, outputs: Tensor, targets: Tensor, training: bool = True) -> Tensor:
        if isinstance(self._call, nn.Module):
            if self._call.training is not training:
                self._call.train(training)
            if outputs.device != self._device:
                self._device = outputs.device
                self._call.to(self._device)
        loss = self._call(outputs.float(), targets)
        if not (isinstance(loss, Tensor) and (loss.shape == targets.shape[:1] or loss.numel() == 1)):
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ConfigError(
                f"the loss {self.name} returns an object of {found}, not one number",
                where="task.loss.name",
                hint="return the mean over the rows (in torch: reduction='mean'), or the loss of each row",
            )
        return loss.mean() if loss.dim() else loss

    def require_gradient(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ConfigError if it cannot train on a made-up batch."""
        try:
            value = self(outputs.requires_grad_(), targets)
            if not value.requires_grad:
                hint = "compute it from the outputs with torch's functions"
                raise ConfigError(f"the loss {self.name} has no gradient", where="task.loss.name", hint=hint)
            value.backward()
        except ConfigError:
            raise
        except Exception as error:  # of the user's own code
            raise _loss_failed(self.name, error, "task.loss.name") from error


class _BuiltIn(nn.Module):
    """A built-in loss of each row. Label smoothing is for training only."""

    weights: Tensor | None

    def __init__(self, section: LabelledTask, labels: Labels, counts: Counts | None) -> None:
        super().__init__()
        self.name, self.kind, options = section.loss_name, labels.kind, section.loss
        self.smoothing = options.label_smoothing
        self.gamma = 2.0 if options.gamma is None else options.gamma
        self.delta = 1.0 if options.delta is None else options.delta
        sigmoid = self.name == "bce" or labels.kind == "multi_label"
        weights = _class_weights(options.class_weights, labels.names, sigmoid, counts)
        self.register_buffer("weights", weights)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        smoothing, weights = self.smoothing if self.training else 0.0, self.weights
        if self.name == "cross_entropy":
            reduction = "none" if weights is not None else "mean"  # as fast, and equal to the last bit, as torch's
            return functional.cross_entropy(outputs, targets, weights, label_smoothing=smoothing, reduction=reduction)
        if self.name == "focal" and self.kind == "single_label":
            entropy = functional.cross_entropy(outputs, targets, reduction="none")
            weighted = entropy if weights is None else weights[targets] * entropy
            return weighted * self._focus(entropy)
        if self.name in ("bce", "focal"):
            return self._sigmoid(outputs, targets, smoothing).mean(dim=1)
        if self.name == "huber":
            return functional.huber_loss(outputs, targets, reduction="none", delta=self.delta).mean(dim=1)
        loss = functional.mse_loss if self.name == "mse" else functional.l1_loss
        return loss(outputs, targets, reduction="none").mean(dim=1)

    def _sigmoid(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        hot = functional.one_hot(targets, outputs.shape[1]) if targets.dim() == 1 else targets
        hot = hot.to(outputs.dtype)
        if self.name == "bce":
            hot = hot * (1 - smoothing) + smoothing / (outputs.shape[1] if targets.dim() == 1 else 2)
        entropy = functools.partial(functional.binary_cross_entropy_with_logits, outputs, hot, reduction="none")
        each: Tensor = entropy(pos_weight=self.weights)
        return each * self._focus(entropy()) if self.name == "focal" else each

    def _focus(self, entropy: Tensor) -> Tensor:
        """Return (1 - probability of the label) ** gamma, which gives easy rows little weight."""
        return (1 - torch.exp(-entropy)).clamp_min(1e-7) ** self.gamma


def _own_loss(name: str, section: LossSection) -> Callable[[Tensor, Tensor], object]:
    """Return a loss of the user's own: a module or function of (outputs, targets)."""
    part = plugins.import_own("loss", name, "task.loss.name")
    try:
        if inspect.isclass(part):
            part = part(**section.args)
        elif section.args:
            part = functools.partial(part, **section.args)
    except Exception as error:  # of the user's own code
        raise _loss_failed(name, error, "task.loss.args") from error
    if not callable(part):
        hint = "name a class or a function: package.module.Class"
        raise ConfigError(f"{name} is not a loss: it cannot be called", where="task.loss.name", hint=hint)
    if isinstance(part, nn.Module) and list(part.parameters()):
        hint = "put the parameters into the model"
        raise ConfigError(
            f"the loss {name} has parameters, which would not be trained", where="task.loss.name", hint=hint
        )
    return part


def _loss_failed(name: str, error: Exception, where: str) -> ConfigError:
    what = f"the loss {name} fails: {type(error).__name__}: {first_line(error)}"
    hint = "it is called with outputs and targets of a batch; docs/targets.md lists their shapes"
    return ConfigError(what, where=users_line(error) or where, hint=hint)


def _class_weights(given: Any, labels: Sequence[str | int], sigmoid: bool, counts: Counts | None) -> Tensor | None:
    """One weight per label. Raises ConfigError."""
    where = "task.loss.class_weights"
    if given is None:
        return None
    if given == "balanced":
        assert counts is not None  # only a task opened on new data lacks them, which computes no loss
        return torch.from_numpy(_balanced(*counts(), sigmoid)).float()
    if isinstance(given, dict):
        known = [str(label) for label in labels]
        if unknown := [label for label in given if label not in known]:
            hint = f"use labels of the training table, such as {', '.join(known[:10])}"
            raise ConfigError(f"there is no label {unknown[0]!r}", where=where, hint=hint)
        weights = [float(given.get(label, 1.0)) for label in known]
    else:
        weights = [float(weight) for weight in given]
    if len(weights) != len(labels):
        hint = "give one weight per label, in the same order, or {label: weight}"
        raise ConfigError(
            f"{plural(len(weights), 'weight')} for {plural(len(labels), 'label')}", where=where, hint=hint
        )
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ConfigError("weights must be positive or zero, finite, and not all zero", where=where)
    return torch.tensor(weights)


def _balanced(counts: np.ndarray, num_rows: int, sigmoid: bool) -> np.ndarray:
    """As scikit-learn: rows / (classes * rows of the class). For a sigmoid per label: rows without / rows with it."""
    filled = np.maximum(counts, 1).astype(float)
    return np.maximum(num_rows - counts, 1) / filled if sigmoid else num_rows / (len(counts) * filled)


# The objective


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a task with labels. ``section`` is the task's, ``counts`` the number of training rows
    with each label, and of all."""

    section: LabelledTask
    labels: Labels
    counts: Counts | None = None

    @cached_property
    def loss(self) -> Loss:
        return Loss(self.section, self.labels, self.counts)

    @cached_property
    def _metric_names(self) -> list[str]:
        return list(self.section.metrics)

    @cached_property
    def _own_metrics(self) -> list[OwnMetric]:
        return [OwnMetric(each, self.labels) for each in self.section.metric_sections if "." in each.name]

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Everything that ``report`` needs of a batch."""
        outputs = outputs.float()
        rows = torch.full((), float(len(targets)), device=outputs.device)  # a copy of it would make the host wait
        pairs = self.labels.pairs(outputs, targets, self._metric_names)
        pairs["loss"] = (self.loss(outputs, targets, training=False) * rows, rows)
        for metric in self._own_metrics:
            pairs |= metric.pairs(outputs, targets)
        return pairs

    def report(self, sums: Sums) -> Report:
        """Return {metric: value} of the reduced pairs; details by label or column; the confusion matrix as counts."""
        found: dict[str, object] = {"loss": sums.ratio("loss"), **self.labels.report(sums)}
        for metric in self._own_metrics:
            found[metric.key] = metric.value(sums)
        details = {name: value for name, value in found.items() if not isinstance(value, int | float)}
        return {name: found[name] for name in self._metric_names} | details

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """Columns that follow from predictions and labels: for numbers, prediction - label."""
        if self.labels.kind != "regression":
            return {}
        names = [name.removeprefix("prediction") for name in columns if name.startswith("prediction")]
        pairs = {name: (columns[f"prediction{name}"], columns.get(f"label{name}")) for name in names}
        return {
            f"error{name}": np.asarray(prediction, float) - np.asarray(label, float)
            for name, (prediction, label) in pairs.items()
            if label is not None and not any(isinstance(value, str) for value in label[:1])
        }

    def check(self, num_rows: int) -> None:
        """Raise ConfigError if the loss or a metric cannot be computed on these labels, before anything is trained.
        ``num_rows``: of the evaluation."""
        number = len(self.labels.names)
        if (kept := self._kept(num_rows)) > MAX_KEPT:
            raise ConfigError(
                f"{', '.join(self._keeping)} would keep {kept:,} outputs of the evaluation on each rank",
                where="task.metrics",
                hint="choose metrics that can be summed over batches, such as task.metrics=[macro_f1]",
            )
        deciding = next(iter(self._metric_names))
        if self.labels.kind == "single_label" and TOP.fullmatch(deciding) and int(deciding[3:]) >= max(number, 2):
            raise ConfigError(
                f"{deciding} is 1 for any model: there are {plural(number, 'class')}",
                where="task.metrics",
                hint=f"use top1, which picks the best checkpoint, before {deciding}",
            )
        rows, generator = max(8, min(_MADE_UP_ROWS, 2 * number)), torch.Generator().manual_seed(0)
        outputs, targets = torch.randn(rows, number, generator=generator), self.labels.made_up(rows, generator)
        self.loss.require_gradient(outputs.clone(), targets)
        for metric in self._own_metrics:
            metric.require_value(outputs, targets)

    @property
    def _keeping(self) -> list[str]:
        """The metrics that keep all rows."""
        return [metric.key for metric in self._own_metrics if metric.needs_rows]

    def _kept(self, num_rows: int) -> int:
        return num_rows * len(self.labels.names) if self._keeping else 0

    @property
    def notes(self) -> list[str]:
        """A warning about labels that cannot be learned from."""
        if self.labels.kind == "single_label" and len(self.labels.names) == 1:
            return [f"all training rows have the label {self.labels.names[0]!r}: there is nothing to learn"]
        return []

    def summary(self, num_rows: int) -> dict[str, object]:
        """Facts for the log and ``harness check``. ``num_rows``: of the evaluation."""
        options = ", ".join(f"{key} {value}" for key, value in self.section.loss.options.items() if key != "args")
        metrics = ", ".join(self.section.metrics)
        if self._keeping:
            mib = self._kept(num_rows) * (5 if self.labels.kind == "multi_label" else 4) / 2**20
            metrics += f" (each rank keeps all outputs of an evaluation for {', '.join(self._keeping)}: {mib:.1f} MiB)"
        names = ", ".join(map(str, self.labels.names)) if self.labels.kind == "regression" else len(self.labels.names)
        loss = self.section.loss_name + (f" ({options})" if options else "")
        return {self.labels.title: names, "loss": loss, "metrics": metrics}


class Supervised:
    """``loss``, ``evaluate``, ``report`` and ``predictions`` of a task with an ``objective``."""

    objective: Objective

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the rows of the batch."""
        return self.objective.loss(outputs, targets)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Return the loss and the metrics of a batch as sums and counts."""
        return self.objective.evaluate(outputs, targets)

    def report(self, sums: Sums) -> Report:
        """Return {metric: value} of the reduced pairs, and details of the evaluation."""
        return self.objective.report(sums)

    def predictions(self, outputs: Tensor) -> Columns:
        """Columns that the model adds to the table of predictions."""
        return self.objective.labels.predictions(outputs)

    def errors(self, columns: Mapping[str, np.ndarray]) -> Columns:
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
        task: Any = self  # an OpenedTask, which counts its labels
        options = getattr(self, "options", None)
        section = options if isinstance(options, LabelledTask) else LabelledTask(name="labelled")
        labels = SingleLabel(tuple(self.classes))
        return Objective(section, labels, lambda: (task.label_counts(0, len(task.train)), len(task.train)))


# Tables


_FORMS: dict[Kind, Literal["class", "tags", "numbers"]] = {
    "single_label": "class", "multi_label": "tags", "regression": "numbers",
}  # fmt: skip


class Split(NamedTuple):
    """A table with the labels of its rows."""

    table: Table
    labels: RowLabels


def open_tables(task: TableTask, cache_dir: Path | None) -> tuple[Split, Split, Objective]:
    """Open ``task.train_csv`` and ``task.eval_csv``. Raises DataError if a label cannot be used, ConfigError if the
    loss or a metric cannot be computed."""
    labels_section, kind = task.labels, task.label_kind
    separator, empty = labels_section.separator or "", labels_section.empty == "allow"
    columns = LabelColumns(_FORMS[kind], task.label_columns, separator, empty, task.label_setting)
    train, eval_ = (
        open_table(source, text=task.input_columns, label=columns, cache_dir=cache_dir)
        for source in (task.train_csv, task.eval_csv)
    )
    names = task.label_columns if kind == "regression" else train.vocabulary
    labels = labels_of(kind, names, separator, train.mean, train.std)
    split, eval_split = (Split(table, _row_labels(labels, table, task.train_csv)) for table in (train, eval_))

    def counts() -> tuple[np.ndarray, int]:
        found = split.labels.counts(0, len(train))
        assert found is not None  # class weights are for classes
        return found, len(train)

    objective = Objective(task, labels, counts)
    objective.check(len(eval_))
    return split, eval_split, objective


def open_new_table(
    task: TableTask, learned: Mapping[str, object], source: str, cache_dir: Path | None
) -> tuple[Split, Objective]:
    """Open the table ``source`` for prediction, with the labels in ``learned``. Its own labels are not interpreted."""
    table = open_table(source, text=task.input_columns, cache_dir=cache_dir)
    labels = learned_labels(task.label_kind, learned, task.labels.separator or "")
    return Split(table, NoLabels(table, task.label_columns)), Objective(task, labels)


def _row_labels(labels: Labels, table: Table, train: str) -> RowLabels:
    if isinstance(labels, Regression):
        columns = tuple(map(str, labels.names))
        return NumberLabels(table, columns, np.asarray(labels.mean), np.asarray(labels.std))
    index = indices(table, labels.names, train)
    if isinstance(labels, MultiLabel):
        return TagLabels(table, index, labels.names, labels.separator)
    return ClassLabels(table, index, len(labels.names))
