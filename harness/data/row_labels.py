"""The labels of the rows of a table, as a model is trained on them: a class, several labels, or numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from harness.data.table.table import Table
from harness.errors import DataError, plural

_CHUNK_ROWS = 1 << 20  # labels in memory at once


class RowLabels(Protocol):
    """The labels of all rows of a table."""

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """Return the targets of ``rows``, in order: (batch,) or (batch, outputs)."""
        ...

    def counts(self, start: int, stop: int) -> np.ndarray | None:
        """Return the number of rows in [start, stop) with each label; None if rows have none or numbers."""
        ...

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the columns of labels in a table of predictions."""
        ...


@dataclass(frozen=True)
class ClassLabels:
    """Class indices, int64 (batch,). ``index[code]`` is that of a label code of the table."""

    table: Table
    index: np.ndarray
    num_classes: int

    def targets(self, rows: np.ndarray) -> np.ndarray:
        class_numbers: np.ndarray = self.index[self.table.labels(rows)]
        return class_numbers

    def counts(self, start: int, stop: int) -> np.ndarray:
        total = np.zeros(self.num_classes, dtype=np.int64)
        for rows in _chunks(start, stop):
            total += np.bincount(self.targets(rows), minlength=self.num_classes)
        return total

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        return {"label": [self.table.vocabulary[code] for code in self.table.labels(rows).tolist()]}


@dataclass(frozen=True)
class TagLabels:
    """A one for each label of a row, uint8 (batch, labels)."""

    table: Table
    index: np.ndarray
    labels: Sequence[str | int]
    separator: str

    def targets(self, rows: np.ndarray) -> np.ndarray:
        counts, codes = self.table.tags(rows)
        hot = np.zeros((len(rows), len(self.labels)), dtype=np.uint8)
        hot[np.repeat(np.arange(len(rows)), counts), self.index[codes]] = 1
        return hot

    def counts(self, start: int, stop: int) -> np.ndarray:
        total = np.zeros(len(self.labels), dtype=np.int64)
        for rows in _chunks(start, stop):
            total += np.bincount(self.index[self.table.tags(rows)[1]], minlength=len(self.labels))
        return total

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        counts, codes = self.table.tags(rows)
        parts = np.split(self.index[codes], np.cumsum(counts)[:-1]) if len(rows) else []
        return {"label": [joined(np.sort(part).tolist(), self.labels, self.separator) for part in parts]}


@dataclass(frozen=True)
class NumberLabels:
    """Numbers in standard deviations from the mean, float32 (batch, columns)."""

    table: Table
    columns: Sequence[str]
    mean: np.ndarray
    std: np.ndarray

    def targets(self, rows: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = ((self.table.numbers(rows) - self.mean) / self.std).astype(np.float32)
        return scaled

    def counts(self, start: int, stop: int) -> None:
        """Return None: a number is not a class."""

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        return by_column("label", self.columns, self.table.numbers(rows))


@dataclass(frozen=True)
class NoLabels:
    """A new table to predict: -1 for each row. Label columns that it has are shown as they are written."""

    table: Table
    columns: Sequence[str]

    def targets(self, rows: np.ndarray) -> np.ndarray:
        return np.full(len(rows), -1, np.int64)

    def counts(self, start: int, stop: int) -> None:
        """Return None: there are no labels."""

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        if not set(self.columns) <= set(self.table.columns):
            return {}
        texts = [self.table.strings(column, rows) for column in self.columns]
        names = column_names("label", self.columns)
        return dict(zip(names, texts, strict=True))


def joined(indices: Sequence[int], labels: Sequence[str | int], separator: str) -> str:
    """Return the labels of a row as one text."""
    return separator.join(str(labels[index]) for index in indices)


def column_names(name: str, columns: Sequence[str]) -> list[str]:
    """Return the columns of a table of predictions for ``name``: of several columns of labels, each has its own."""
    return [name] if len(columns) == 1 else [f"{name}_{column}" for column in columns]


def by_column(name: str, columns: Sequence[str], numbers: np.ndarray) -> dict[str, Any]:
    """Return ``numbers`` (rows, columns) as columns of a table of predictions."""
    return dict(zip(column_names(name, columns), numbers.T.tolist(), strict=True))


def class_indices(table: Table, classes: Sequence[str | int], train: str) -> np.ndarray:
    """Return the class index of each label code of ``table``. Raises DataError for a label that is not in ``classes``,
    the labels of the table ``train``."""
    # By their text: "1" is an integer in a table that has only integers.
    index_of = {str(label): index for index, label in enumerate(classes)}
    unknown = {code: label for code, label in enumerate(table.vocabulary) if str(label) not in index_of}
    if unknown:
        raise _unknown(table, train, unknown, classes)
    return np.asarray([index_of[str(label)] for label in table.vocabulary], dtype=np.int64)


def _unknown(table: Table, train: str, unknown: Mapping[int, object], classes: Sequence[str | int]) -> DataError:
    """Return the error for the labels ``unknown`` of ``table``, by their codes, at the first row with one of them."""
    examples = [*unknown.values()][:5]
    spelled = {str(label).lower(): str(label) for label in classes}
    matches = [match for each in examples for match in difflib.get_close_matches(str(each).lower(), spelled, n=1)]
    hint = f"did you mean {', '.join(repr(spelled[match]) for match in matches)}?"
    hint = hint if matches else "evaluate only labels that occur in training, or correct the CSV"
    if len(unknown) > max(3, len(table) // 2):
        hint = "nearly every row has its own label: set task.label_column, or task.labels.column, to another column"
    if all(re.fullmatch(r"[-+]?\d+(\.\d*)?", str(label)) for label in [*spelled, *unknown.values()]):
        hint = "evaluate only labels that occur in training; to predict the number, set task.labels.kind=regression"
        written = {float(label): label for label in spelled}
        if (same := written.get(float(str(examples[0])))) is not None:
            hint = f"write numbers alike in both tables: {examples[0]} is {same} in {train}"
    first_rows = (_first_with(table, rows, [*unknown]) for rows in _chunks(0, len(table)))
    row = next(row for row in first_rows if row is not None)
    labels = ", ".join(repr(label) for label in examples)
    return DataError(
        f"{plural(len(unknown), 'label')} that {train} does not have: {labels}", where=table.where(row), hint=hint
    )


def _first_with(table: Table, rows: np.ndarray, codes_to_find: Sequence[int]) -> int | None:
    """Return the first of ``rows`` that has one of the labels ``codes_to_find``, codes."""
    if table.label is not None:
        places = np.flatnonzero(np.isin(table.labels(rows), codes_to_find))
    else:
        counts, codes = table.tags(rows)
        places = np.repeat(np.arange(len(rows)), counts)[np.isin(codes, codes_to_find)]
    return int(rows[places[0]]) if len(places) else None


def _chunks(start: int, stop: int) -> Iterator[np.ndarray]:
    for edge in range(start, stop, _CHUNK_ROWS):
        yield np.arange(edge, min(edge + _CHUNK_ROWS, stop))
