"""Annotation tables with the labels that a task's settings describe, and the objective that follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.config.targets import TableTask
from harness.data.row_labels import NoLabels, RowLabels
from harness.data.table.labels import LabelColumns, misspelled
from harness.data.table.table import Table, open_table
from harness.data.table.writers import CodeWriter, TagWriter
from harness.errors import ConfigError, DataError, DoubtError, listed, plural
from harness.training.evaluation.labels import KINDS
from harness.training.evaluation.losses import LabelCounts
from harness.training.evaluation.objective import Objective

_NAMED = 5  # rows in a message


class Split(NamedTuple):
    """A table with the labels of its rows."""

    table: Table
    labels: RowLabels


def open_tables(task: TableTask, cache_dir: Path | None) -> tuple[Split, Split, Objective]:
    """Open ``task.train_csv`` and ``task.eval_csv``. Raises DataError if a label cannot be used, ConfigError if the
    loss or a metric cannot be computed."""
    separator, empty, kind = task.labels.separator or "", task.labels.empty == "allow", KINDS[task.label_kind]
    columns = LabelColumns(kind.form, task.label_columns, separator, empty, task.label_setting)
    train, eval_ = (
        open_table(source, text=task.input_columns, label=columns, cache_dir=cache_dir)
        for source in (task.train_csv, task.eval_csv)
    )
    labels = kind.of_table(train, task.label_columns, separator)
    split, eval_split = (Split(table, labels.of_rows(table, task.train_csv)) for table in (train, eval_))
    objective = Objective(task, labels, lambda: LabelCounts(split.labels.counts(0, len(train)), len(train)))
    try:
        objective.check(len(eval_))
    except ConfigError as error:  # a misspelt label may be the reason
        error.message = "; ".join([*train.notes, error.message])
        raise
    return split, eval_split, objective


def open_new_table(
    task: TableTask, learned: Mapping[str, object], source: str, cache_dir: Path | None
) -> tuple[Split, Objective]:
    """Open the table ``source`` for prediction, with the labels in ``learned``. Its own labels are not interpreted."""
    table = open_table(source, text=task.input_columns, cache_dir=cache_dir)
    labels = KINDS[task.label_kind].of_learned(learned, task.labels.separator or "")
    return Split(table, NoLabels(table, task.label_columns)), Objective(task, labels)


def label_problems(task: TableTask, train: Table, eval_: Table) -> Iterator[DataError]:
    """Yield an error for the rows of each table without a label, one for those with a label that no training row has,
    and a DoubtError for each label of the training rows that may be misspelled. The tables come without labels."""
    known_labels = set[str]()
    for table in (train, eval_) if KINDS[task.label_kind].form != "numbers" else ():
        texts = table.slice(task.label_columns[0], 0, len(table)).combine_chunks().dictionary_encode()
        codes, separator = texts.indices.to_numpy(zero_copy_only=False), task.labels.separator
        split = (text.split(separator) if separator else [text] for text in texts.dictionary.to_pylist())
        names = [{name.strip() for name in parts} - {""} for parts in split]
        known_labels = known_labels or set().union(*names)
        unknown, count = sorted(set().union(*names) - known_labels), Counter[str]()
        for labels, rows_with in zip(names, np.bincount(codes, minlength=len(names)).tolist(), strict=True):
            count.update(dict.fromkeys(labels, rows_with))
        allowed = task.labels.empty == "allow"
        blank, new = [not (labels or allowed) for labels in names], [bool(labels - known_labels) for labels in names]
        lacking = f"with a label that {task.train_csv} does not have ({listed(unknown, _NAMED)})"
        checks: list[tuple[type[DataError], str, list[bool], str]] = [
            (DataError, "without a label", blank, (TagWriter if separator else CodeWriter).remedy),
            (DataError, lacking, new, "correct the labels, or remove the rows"),
        ]
        for word, similar_label in misspelled(count, len(table)) if table is train else ():
            problem = f"with the label {word!r}, {count[similar_label]:,} with {similar_label!r}"
            hint = "if it is a misspelling, correct it, or it stays a class of its own"
            checks.append((DoubtError, problem, [word in labels for labels in names], hint))
        for kind, problem, is_bad, hint in checks:
            rows = np.flatnonzero(np.asarray(is_bad)[codes]).tolist()
            if rows:
                first, *others = [table.where(row) for row in rows[:_NAMED]]
                also = f"; also {', '.join(others)}{', …' if len(rows) > _NAMED else ''}" if others else ""
                yield kind(f"{plural(len(rows), 'row')} {problem}{also}", where=first, hint=hint)
