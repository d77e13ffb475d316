"""The objective of a task with labels: its kind of labels, its loss, its metrics and its predictions, as one object.

The settings are in ``harness.config.targets``. A task makes an ``Objective`` when it opens its data, and inherits from
``harness.training.classification.Supervised``, which passes everything on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.targets import Kind, LabelledTask
from harness.errors import ConfigError
from harness.training import losses
from harness.training.losses import Counts, Loss, OwnLoss
from harness.training.metrics import Pairs, Report, Rows, Sums
from harness.training.own_metrics import OwnMetric
from harness.training.scores import ROWS, MultiLabel, Regression, Scores, SingleLabel

MAX_KEPT = 1 << 29  # outputs of all evaluation rows that a metric may keep, as numbers
_MADE_UP_ROWS = 64


@dataclass(frozen=True)
class Labels:
    """Facts about the labels, from the training data.

    names: the classes, the labels that a row may have, or the columns of numbers
    separator: between the labels of a row
    mean, std: of each column of numbers
    """

    kind: Kind
    names: tuple[str | int, ...]
    separator: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def learned(self) -> dict[str, Any]:
        """These facts as JSON, for the run folder."""
        if self.kind == "regression":
            return {"columns": list(self.names), "mean": list(self.mean), "std": list(self.std)}
        return {"classes": list(self.names)}

    @classmethod
    def of_learned(cls, kind: Kind, facts: Mapping[str, Any], separator: str) -> Labels:
        """The reverse of ``learned``, from a file that anybody may have edited. Raises ConfigError."""
        names = facts.get("columns" if kind == "regression" else "classes")
        mean, std = facts.get("mean", []), facts.get("std", [])
        num_means = len(names) if isinstance(names, list) and kind == "regression" else 0
        if not (
            isinstance(names, list)
            and names
            and all(type(name) in (str, int) for name in names)
            and all(isinstance(numbers, list) and len(numbers) == num_means for numbers in (mean, std))
            and all(type(number) in (int, float) and abs(number) < 1e300 for number in (*mean, *std))
        ):
            raise ConfigError(
                "the run's task.json lacks valid information about the labels of the training data",
                hint="start the run again to write the file: harness train -c RUN/config.yaml",
            )
        return cls(kind, tuple(names), separator, tuple(mean), tuple(std))


@dataclass(frozen=True)
class Objective:
    """``section`` is the task's, ``counts`` the number of training rows with each label, and of all."""

    section: LabelledTask
    labels: Labels
    counts: Counts | None = None

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of an evaluation."""
        return tuple(each.shown for each in self.section.metric_sections if each.shown not in self.left_out)

    @cached_property
    def left_out(self) -> frozenset[str]:
        """Default metrics that are constant for these labels: among five classes, the top 5 are always right."""
        few = self.labels.kind == "single_label" and len(self.labels.names) <= 5
        return frozenset({"top5"} if few and not self.section.chosen_metrics else ())

    @cached_property
    def scores(self) -> Scores:
        names, labels = frozenset(self.metrics), self.labels
        if labels.kind == "regression":
            return Regression(names, tuple(map(str, labels.names)), labels.mean, labels.std)
        if labels.kind == "multi_label":
            return MultiLabel(names, labels.names, labels.separator)
        return SingleLabel(names, labels.names)

    @cached_property
    def _loss(self) -> Loss | OwnLoss:
        section, name = self.section.loss, self.section.loss_name
        if "." in name:
            return OwnLoss(name, section)
        return Loss(name, section, self.labels.names, self.labels.kind, self.counts or _no_counts)

    @cached_property
    def _own_metrics(self) -> list[OwnMetric]:
        number = len(self.labels.names)
        known = {"single_label": {"num_classes": number}, "multi_label": {"num_labels": number}, "regression": {}}
        sections = [each for each in self.section.metric_sections if "." in each.name]
        return [OwnMetric(each, known[self.labels.kind]) for each in sections]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the rows of the batch."""
        return self._loss.mean(outputs, targets)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Everything that ``report`` needs of a batch."""
        outputs = outputs.float()
        rows = torch.full((), float(len(targets)), device=outputs.device)  # a copy of it would make the host wait
        pairs = {"loss": (self._loss.total(outputs, targets), rows), **self.scores.pairs(outputs, targets)}
        for metric in self._own_metrics:
            if metric.needs_rows:
                pairs[ROWS] = Rows(outputs, targets)
            else:
                pairs |= metric.pairs(*self._shown(outputs, targets))
        return pairs

    def report(self, sums: Sums) -> Report:
        """{metric: value} of the reduced pairs; details by label or column; the confusion matrix as counts."""
        found: Report = {"loss": sums.ratio("loss"), **self.scores.report(sums)}
        for metric in self._own_metrics:
            found[metric.key] = metric.value(sums, lambda: self._shown(*sums.all_rows(ROWS)))
        details = {name: value for name, value in found.items() if not isinstance(value, int | float)}
        return {name: found[name] for name in self.metrics} | details

    def _shown(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as metrics of the user's own get them."""
        shown = self.scores.shown(outputs)
        if self.labels.kind == "regression":
            return shown, self.scores.shown(targets)
        return shown, targets.long()

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """Columns of the table of predictions."""
        return self.scores.predictions(outputs)

    def errors(self, columns: Mapping[str, Any]) -> dict[str, Any]:
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
        tops = [name for name in self.metrics if re.fullmatch(r"top\d+", name)]
        if too_many := [name for name in tops if int(name[3:]) >= max(2, number)]:
            what = f"{too_many[-1]} of {number} classes would always be 1"
            raise ConfigError(what, where="task.metrics", hint="choose a smaller number, such as top1")
        if (kept := self._kept(num_rows)) > MAX_KEPT:
            raise ConfigError(
                f"{', '.join(self._keeping)} would keep {kept:,} outputs of the evaluation on each rank",
                where="task.metrics",
                hint="choose metrics that can be summed over batches, such as task.metrics=[micro_f1,macro_f1]",
            )
        outputs, targets = self._made_up()
        losses.rehearse(self._loss, outputs.clone(), targets)
        for metric in self._own_metrics:
            metric.rehearse(*self._shown(outputs, targets))

    def _made_up(self) -> tuple[Tensor, Tensor]:
        """Random outputs and targets, with each label at least twice if there are few."""
        number = len(self.labels.names)
        rows = max(8, min(_MADE_UP_ROWS, 2 * number))
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(rows, number, generator=generator)
        if self.labels.kind == "regression":
            return outputs, torch.randn(rows, number, generator=generator)
        cycle = torch.arange(rows) % number
        if self.labels.kind == "single_label":
            return outputs, cycle
        hot = torch.zeros(rows, number, dtype=torch.uint8)
        hot[torch.arange(rows // 2), cycle[: rows // 2]] = 1
        return outputs, hot

    @property
    def _keeping(self) -> list[str]:
        """The metrics that keep all rows."""
        own = [metric.key for metric in self._own_metrics if metric.needs_rows]
        return [name for name in self.metrics if name == "mean_average_precision"] + own

    @property
    def notes(self) -> list[str]:
        """A warning about labels that cannot be learned from."""
        if self.labels.kind == "single_label" and len(self.labels.names) == 1:
            return [f"all training rows have the label {self.labels.names[0]!r}: there is nothing to learn"]
        return []

    def _kept(self, num_rows: int) -> int:
        return num_rows * len(self.labels.names) if self._keeping else 0

    def summary(self, num_rows: int) -> dict[str, Any]:
        """Facts for the log and ``harness check``. ``num_rows``: of the evaluation."""
        options = ", ".join(f"{key} {value}" for key, value in self.section.loss.options.items() if key != "args")
        metrics = ", ".join(self.metrics)
        if self._keeping:
            per_output = 5 if self.labels.kind == "multi_label" else 4
            mib = self._kept(num_rows) * per_output / 2**20
            metrics += f" (each rank keeps all outputs of an evaluation for {', '.join(self._keeping)}: {mib:.1f} MiB)"
        title = {"single_label": "classes", "multi_label": "labels", "regression": "columns"}[self.labels.kind]
        shown = ", ".join(map(str, self.labels.names)) if self.labels.kind == "regression" else len(self.labels.names)
        return {title: shown, "loss": self.section.loss_name + (f" ({options})" if options else ""), "metrics": metrics}

    @property
    def signature(self) -> dict[str, Any]:
        """The meaning of the model's outputs, for ``harness export``."""
        labels = self.labels
        if labels.kind == "regression":
            scale = {"scale": "multiply by std, add mean", "mean": list(labels.mean), "std": list(labels.std)}
            return {"output": "numbers", "columns": list(labels.names), "postprocessing": scale}
        more = {"postprocessing": {"probability": "sigmoid of each logit", "threshold": 0.5}}
        return {"output": "logits", "classes": list(labels.names), **(more if labels.kind == "multi_label" else {})}


def _no_counts() -> tuple[np.ndarray, int]:
    raise ConfigError(
        "class_weights=balanced needs the number of training rows with each label, which this task does not count",
        where="task.loss.class_weights",
        hint="give the weights as a list",
    )


def of_classes(classes: tuple[str | int, ...], section: Any) -> Objective:
    """The objective of a task with one class per row. ``section``: its options, with or without a loss and metrics."""
    if not isinstance(section, LabelledTask):
        section = LabelledTask(name="labelled")
    return Objective(section, Labels("single_label", classes))
