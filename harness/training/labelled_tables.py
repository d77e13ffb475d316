"""Opens the annotation tables of a task with labels, for training or for prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.targets import TableTask
from harness.data.row_labels import ClassLabels, NoLabels, NumberLabels, RowLabels, TagLabels, indices
from harness.data.table.labels import LabelColumns
from harness.data.table.table import Table, open_table
from harness.training.objective import Labels, Objective


@dataclass(frozen=True)
class Split:
    """A table with the labels of its rows."""

    table: Table
    labels: RowLabels


@dataclass(frozen=True)
class LabelledTables:
    """The tables of a task, and what they are to be used for."""

    train: Split
    eval: Split
    objective: Objective


def open_tables(task: TableTask, cache_dir: Path | None) -> LabelledTables:
    """Open ``task.train_csv`` and ``task.eval_csv``. Raises DataError if a label cannot be used, ConfigError if the
    loss or a metric cannot be computed."""
    section, kind = task.labels, task.label_kind
    form = {"single_label": "class", "multi_label": "tags", "regression": "numbers"}[kind]
    separator, empty = section.separator or "", section.empty == "allow"
    columns = LabelColumns(form, task.label_columns, separator, empty, task.label_setting)  # type: ignore[arg-type]
    train, eval_ = (
        open_table(source, text=task.input_columns, label=columns, cache_dir=cache_dir)
        for source in (task.train_csv, task.eval_csv)
    )
    names = task.label_columns if kind == "regression" else train.vocabulary
    labels = Labels(kind, tuple(names), separator, train.mean, train.std)
    split, eval_split = (Split(table, _row_labels(labels, table, task.train_csv)) for table in (train, eval_))

    def counts() -> tuple[np.ndarray, int]:
        found = split.labels.counts(0, len(train))
        assert found is not None  # class weights are for classes
        return found, len(train)

    objective = Objective(task, labels, counts)
    objective.check(len(eval_))
    return LabelledTables(split, eval_split, objective)


def open_new(task: TableTask, learned: dict[str, Any], source: str, cache_dir: Path | None) -> tuple[Split, Objective]:
    """Open the table ``source`` for prediction, with the labels in ``learned``. Its own labels are not interpreted."""
    table = open_table(source, text=task.input_columns, cache_dir=cache_dir)
    labels = Labels.of_learned(task.label_kind, learned, task.labels.separator or "")
    return Split(table, NoLabels(table, task.label_columns)), Objective(task, labels)


def _row_labels(labels: Labels, table: Table, train: str) -> RowLabels:
    if labels.kind == "regression":
        columns = tuple(map(str, labels.names))
        return NumberLabels(table, columns, np.asarray(labels.mean), np.asarray(labels.std))
    index = indices(table, labels.names, train)
    if labels.kind == "multi_label":
        return TagLabels(table, index, labels.names, labels.separator)
    return ClassLabels(table, index, len(labels.names))
