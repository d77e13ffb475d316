"""The objective of a task with labels: its loss, its metrics and its predictions, which follow from the kind of labels.

The settings are in ``harness.config.targets``. A task makes an ``Objective`` when it opens its data, for tables with
``tables.open_tables``, and inherits from ``harness.training.task.Supervised``, which passes everything on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.config.targets import TOP, LabelledTask, TableTask
from harness.errors import ConfigError, plural
from harness.training.evaluation.labels import Labels
from harness.training.evaluation.losses import Counts, Loss
from harness.training.evaluation.own_metric import OwnMetric
from harness.training.evaluation.sums import Pairs, Report, Sums

MAX_KEPT = 1 << 29  # outputs of all evaluation rows that a metric may keep, as numbers
_MADE_UP_ROWS = 64
ROWS_OF_FILE = "rows of the file"  # the pair of ([evaluated, without a label], read)


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

    def evaluate(self, outputs: Tensor, targets: Tensor, confusion: bool = True) -> Pairs:
        """Return all that ``report`` needs of a batch; the confusion matrix only if asked for."""
        outputs = outputs.float()
        rows = torch.full((), float(len(targets)), device=outputs.device)  # a copy of it would make the host wait
        pairs = self.labels.pairs(outputs, targets, self._metric_names, confusion)
        if self.counts is not None or self.section.loss.class_weights != "balanced":  # needs the training rows
            pairs["loss"] = (self.loss(outputs, targets, training=False) * rows, rows)
        for metric in self._own_metrics:
            pairs |= metric.pairs(outputs, targets)
        return pairs

    def report(self, sums: Sums) -> Report:
        """Return {metric: value} of the reduced pairs; details by label or column; the confusion matrix as counts."""
        metrics: dict[str, object] = {"loss": sums.ratio("loss")} if "loss" in sums.pairs else {}
        metrics |= self.labels.report(sums)
        for metric in self._own_metrics:
            metrics[metric.key] = metric.value(sums)
        details = {name: value for name, value in metrics.items() if not isinstance(value, int | float)}
        return {name: metrics[name] for name in self._metric_names if name in metrics} | details

    def pairs_of_new(self, outputs: Tensor, texts: Sequence[Sequence[str]]) -> Pairs:
        """Return what ``evaluate`` does of the rows of a new file that have usable labels, on the CPU, without the
        confusion matrix, and the numbers of rows; empty if there are no labels. ``texts``: the ``label_columns`` of the
        rows of ``outputs``, as far as the file has them."""
        if len(texts) < len(self.labels.label_columns):
            return {}
        empty = isinstance(self.section, TableTask) and self.section.labels.empty == "allow"
        rows, targets = self.labels.targets(texts, empty)
        if outputs.dim() != 2:
            raise ConfigError(f"the model's outputs have the shape {tuple(outputs.shape)}, not (rows, outputs)")
        left_out = set(range(len(texts[0]))) - set(rows)
        blank = sum(not all(str(column[row]).strip() for column in texts) for row in left_out)
        counts: Pairs = {ROWS_OF_FILE: (torch.tensor([len(rows), blank]), len(texts[0]))}
        return counts | (self.evaluate(outputs.cpu()[rows], targets, confusion=False) if rows else {})

    def check(self, num_rows: int) -> None:
        """Raise ConfigError if the loss or a metric cannot be computed on these labels, before anything is trained.
        ``num_rows``: of the evaluation."""
        number = len(self.labels.names)
        if (num_kept := self._kept(num_rows)) > MAX_KEPT:
            raise ConfigError(
                f"{', '.join(self._keeping)} would keep {num_kept:,} outputs of the evaluation on each rank",
                where="task.metrics",
                hint="choose metrics that can be summed over batches, such as task.metrics=[macro_f1]",
            )
        deciding = self._metric_names[0]
        if TOP.fullmatch(deciding) and int(deciding[3:]) >= max(number, 2):
            raise ConfigError(
                f"{deciding} is 1 for any model: there are {plural(number, 'class')}",
                where="task.metrics",
                hint=f"use top1, which picks the best checkpoint, before {deciding}",
            )
        if "f1" in self._metric_names and number != 2:
            examples = ", ".join([*map(repr, self.labels.names[:5]), *["..."] * (number > 5)])
            raise ConfigError(
                f"f1 is for two classes, and there are {number}: {examples}",
                where="task.metrics",
                hint="use macro_f1, the mean of the F1 of each class, or mcc",
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
        """Return facts for the log and ``harness check``. ``num_rows``: of the evaluation."""
        weights = self.section.loss.class_weights
        options = {**self.section.loss.args, **({} if weights is None else {"class_weights": weights})}
        described = ", ".join(f"{key} {value}" for key, value in options.items())
        notes = {"f1": f" (of class {self.labels.names[-1]})"}
        metrics = ", ".join(f"{name}{notes.get(name, '')}" for name in self.section.metrics)
        if self._keeping:
            mib = self._kept(num_rows) * self.labels.kept_bytes / 2**20
            metrics += f" (each rank keeps all outputs of an evaluation for {', '.join(self._keeping)}: {mib:.1f} MiB)"
        loss = self.section.loss_name + (f" ({described})" if options else "")
        return {self.labels.title: self.labels.listing, "loss": loss, "metrics": metrics}
