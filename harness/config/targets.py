"""The settings of a task with labels: the kind of its labels, its loss and its metrics, each by name.

``harness.training.evaluation.objective`` computes them. The names, what they apply to and what they take are listed
here, because a configuration is checked without importing torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.config.base import Arguments, Conflict, Mark, Place, Section
from harness.config.schema import TaskSection

Kind = Literal["single_label", "multi_label", "regression"]
Better = Literal["max", "min"]

_LOSSES: dict[Kind, tuple[str, ...]] = {  # the default first
    "single_label": ("cross_entropy", "bce", "focal"),
    "multi_label": ("bce", "focal"),
    "regression": ("mse", "l1", "huber"),
}
_METRICS: dict[Kind, tuple[str, ...]] = {  # top1 stands for top2, top3, ... as well; f1 is for two classes
    "single_label": ("top1", "mean_class_accuracy", "macro_f1", "f1", "mcc", "loss"),
    "multi_label": ("macro_f1", "micro_f1", "exact_match", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}
_LOWER_IS_BETTER = ("rmse", "mae", "loss")
TOP = re.compile("top[1-9][0-9]{0,5}")
_ELSEWHERE = {
    "accuracy": "top1",
    "f1_score": "macro_f1",
    "matthews_corrcoef": "mcc",
    "mse": "rmse",
}  # names in other libraries
_MEANS = {"f1_score": " (the mean of the F1 of each class)"}
DEFAULT_METRICS: dict[Kind, tuple[str, ...]] = {  # the first picks the best checkpoint
    "single_label": ("top1", "loss", "mean_class_accuracy"),
    "multi_label": ("macro_f1", "micro_f1", "exact_match", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}


class LabelsSection(Section):
    """What the label columns hold."""

    kind: Kind | None = None
    """single_label: each row has one of the classes. multi_label: each row has any number of the labels. regression:
    each row has a number in each column. null: multi_label if separator is set, else single_label.
    """
    column: str | Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Column of the labels; for regression also a list of columns, such as [width, height]. null: task.label_column."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the labels of a row, such as "|", for multi_label."""
    empty: Literal["error", "allow"] = "error"
    """For multi_label: a row without any label is an error (error), or valid and counted as having no label (allow)."""

    @property
    def chosen(self) -> Kind:
        return self.kind or ("multi_label" if self.separator else "single_label")

    @model_validator(mode="after")
    def _fits_together(self) -> LabelsSection:
        columns = self.column if isinstance(self.column, tuple) else None
        if self.chosen == "multi_label" and self.separator is None:
            raise ValueError('kind: multi_label needs a separator, the text between labels, such as separator: "|"')
        if self.chosen != "multi_label" and (self.separator is not None or self.empty != "error"):
            remedy = "remove them, or in an override of task.labels add separator: null, empty: error"
            raise ValueError(f"separator and empty are for kind: multi_label, but the kind is {self.chosen}: {remedy}")
        if self.chosen != "regression" and columns is not None:
            raise ValueError("only kind: regression takes several columns; name one column")
        if columns is not None and (not columns or len(set(columns)) < len(columns)):
            raise ValueError(f"name at least one column, and each only once (found: {list(columns)})")
        return self


class LossSection(Section):
    """The training loss."""

    name: str | None = None
    """For one class per row: cross_entropy, bce or focal. For several labels per row: bce or focal. For numbers: mse,
    l1 or huber. Or your own package.module.Class (or function), which returns the mean over the rows, such as
    torch.nn.MSELoss. null: the first one listed for the kind of labels.
    """
    class_weights: Literal["balanced"] | Annotated[tuple[float, ...], Field(strict=False)] | dict[str, float] | None = (
        None
    )
    """Weight of the rows with each class: a list in the order of the classes, or {class: weight} (others 1), or
    balanced, for imbalanced classes: the rarer the class, the larger its weight. With several labels per row: the
    weight of rows that have the label.
    """
    args: Arguments = {}
    """Arguments of the loss, such as {label_smoothing: 0.1}. cross_entropy and bce: label_smoothing, the share of the
    target that is spread evenly over all classes in training (0). focal: gamma, how strongly the weight of easy rows is
    reduced (2). huber: delta; errors above it, in standard deviations of the column, count linearly (1). Or those of
    your own loss.
    """


class MetricSection(Section):
    """A metric of your own or of torchmetrics."""

    name: str
    """A built-in metric, or package.module.Class (or function) such as torchmetrics.classification.MulticlassAUROC."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Its name in the log, such as auroc; null: the last part of name."""
    better: Better | None = None
    """max: higher is better; min: lower is better. Required for a dotted name."""
    args: Arguments = {}
    """Keyword arguments; num_classes or num_labels is set if the metric takes it."""

    @property
    def shown(self) -> str:
        return self.key or self.name.rpartition(".")[2]

    @property
    def chosen_better(self) -> Better:
        return self.better or _better(self.name)


class LabelledTask(TaskSection):
    """Base class of the options of a task with labels. Subclasses may change ``label_kind``."""

    loss: Annotated[LossSection, Mark.CODE] = LossSection()
    """The training loss."""
    chosen_metrics: Annotated[tuple[str | MetricSection, ...], Mark.CODE] = Field(
        default=(), strict=False, alias="metrics"
    )
    """Evaluation metrics by name, such as [top1, macro_f1]; the first one picks the best checkpoint. []: the defaults
    for the kind of labels. A metric of torchmetrics, or of your own, is a section {name, better, args}.
    """

    @property
    def label_kind(self) -> Kind:
        return "single_label"

    @property
    def metric_sections(self) -> tuple[MetricSection, ...]:
        """The metrics as sections. The loss, which shows whether training diverges, is always among them."""
        chosen = self.chosen_metrics or DEFAULT_METRICS[self.label_kind]
        sections = [MetricSection(name=each) if isinstance(each, str) else each for each in chosen]
        if "loss" not in [each.shown for each in sections]:
            sections.append(MetricSection(name="loss"))
        return tuple(sections)

    @property
    def metrics(self) -> dict[str, Better]:  # type: ignore[override]
        """{metric: better direction}, the one that picks the best checkpoint first."""
        return {each.shown: each.chosen_better for each in self.metric_sections}

    @property
    def loss_name(self) -> str:
        return self.loss.name or _LOSSES[self.label_kind][0]

    def conflicts(self) -> Iterator[Conflict]:
        return _conflicts(self)


class TableTask(LabelledTask):
    """Base class of the options of a task that reads annotation tables."""

    train_csv: Annotated[Place, Mark.OF_MACHINE]
    """Annotations to train on, such as photos.train.csv: .csv, .csv.gz or .parquet, local or an fsspec URL."""
    eval_csv: Annotated[Place, Mark.OF_MACHINE]
    """Annotations to evaluate on, the validation data, such as photos.eval.csv; every label must occur in train_csv."""
    label_column: str = "label"
    """Column of the CSV with the labels."""
    labels: LabelsSection = LabelsSection()
    """What the labels are: one class per row, several labels per row, or numbers."""

    @property
    def label_kind(self) -> Kind:
        return self.labels.chosen

    @property
    def input_columns(self) -> dict[str, str]:
        """{column of the inputs: the setting that names it}. Subclasses override it."""
        return {}

    @property
    def label_setting(self) -> str:
        """The setting that names the columns of the labels."""
        return "task.label_column" if self.labels.column is None else "task.labels.column"

    @property
    def label_columns(self) -> tuple[str, ...]:
        column = self.labels.column or self.label_column
        return (column,) if isinstance(column, str) else column

    @property
    def columns(self) -> dict[str, str]:
        """{column that both tables need: the setting that names it}."""
        return {**self.input_columns, **dict.fromkeys(self.label_columns, self.label_setting)}

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> object:
        """Open the table ``source`` for prediction. Its labels are optional and are not interpreted."""
        opened: object = self.beside().open_new(self, learned, source, cache_dir)
        return opened


def _better(name: str) -> Better:
    """Return which direction of a built-in metric is better."""
    return "min" if name in _LOWER_IS_BETTER else "max"


def _fits(name: str, *kinds: Kind) -> bool:
    """Return True if ``name`` is a built-in metric of labels of one of ``kinds``, by default of any."""
    name = "top1" if TOP.fullmatch(name) else name
    return any(name in _METRICS[kind] for kind in kinds or _METRICS)


def _conflicts(task: LabelledTask) -> Iterator[Conflict]:
    """Yield the settings that do not fit the kind of the labels."""
    kind, loss = task.label_kind, task.loss_name
    if isinstance(task, TableTask) and task.labels.column is not None and task.label_column != "label":
        yield Conflict(
            "task.label_column", "label_column and labels.column both set the column", "remove task.label_column"
        )
    if "." not in loss and loss not in (suitable := _LOSSES[kind]):
        exists = any(loss in names for names in _LOSSES.values())
        misfit = f"the loss {loss} cannot be used with {kind} labels"
        hint = f"{suggestion(loss, suitable)}use {' or '.join(suitable)}, or your own package.module.Class"
        yield Conflict("task.loss.name", misfit if exists else f"there is no loss {loss!r}", hint)
    elif task.loss.class_weights is not None and ("." in loss or kind == "regression"):
        hint = "remove them; a loss of your own takes task.loss.args" if "." in loss else "remove them"
        yield Conflict("task.loss.class_weights", f"the loss {loss} has no class weights", hint)
    yield from _metric_conflicts(task, kind)


def _metric_conflicts(task: LabelledTask, kind: Kind) -> Iterator[Conflict]:
    """Yield the ``_conflicts`` of the metrics of ``task``, whose labels are of ``kind``."""
    suitable = _METRICS[kind]
    keys = [each.shown for each in task.metric_sections]
    for each in task.metric_sections:
        if "." in each.name:
            if each.better is None:
                hint = f"write {{name: {each.name}, better: max}} (or min)"
                yield Conflict("task.metrics", f"it is not known whether a higher {each.shown} is better", hint)
            if _fits(each.shown):
                yield Conflict(
                    "task.metrics",
                    f"the key {each.shown} of {each.name} is the name of a built-in metric",
                    "give it another key: {key: NAME}",
                )
        elif not _fits(each.name):
            hint = (
                f"{suggestion(each.name, suitable)}use {', '.join(suitable)}, or package.module.Class with "
                "better: max (or min)"
            )
            yield Conflict("task.metrics", f"there is no metric {each.name!r}", hint)
        elif not _fits(each.name, kind):
            yield Conflict(
                "task.metrics", f"{each.name} is not a metric of {kind} labels", f"use {', '.join(suitable)}"
            )
        elif each.args or each.key or each.better not in (None, _better(each.name)):
            yield Conflict(
                "task.metrics", f"{each.name} is built in and takes no settings", f"write only its name: {each.name}"
            )
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        yield Conflict(
            "task.metrics",
            f"{twice[0]} is listed twice",
            "remove one, or give it another key: {name: ..., key: NAME}",
        )


def suggestion(name: str, suitable: Collection[str]) -> str:
    """Return a hint with the one of ``suitable`` that ``name`` may mean; empty if there is none."""
    spellings = {**{each: each for each in suitable}, **{key: to for key, to in _ELSEWHERE.items() if to in suitable}}
    matches = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f"did you mean {spellings[matches[0]]}{_MEANS.get(matches[0], '')}? " if matches else ""


def image_column(task: TaskSection) -> str:
    """Return the column with paths of images if it is all that ``task`` reads of a row; empty otherwise."""
    columns: dict[str, str] = getattr(task, "input_columns", {})
    return next(iter(columns)) if [*columns.values()] == ["task.path_column"] else ""
