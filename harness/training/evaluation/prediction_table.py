"""The table of predictions, a CSV or Parquet file, which is written in parts, and what is counted meanwhile."""

from __future__ import annotations

import csv
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from harness.errors import DataError, HarnessError, first_line, listed, plural
from harness.runs.files import commit, temporary_for
from harness.runs.locks import Lock
from harness.training.evaluation.prediction_files import FilesFolder
from harness.training.evaluation.sums import Pairs, Sums

log = logging.getLogger("harness")

GROUP_ROWS = 1 << 15  # written at once; one row group of Parquet
_GROUP_BYTES = 1 << 26  # of copied columns; fewer rows are written at once then
SAMPLE_ROWS = 32
UNKNOWN_SHOWN = 3  # labels in a warning
_FEW_ROWS = 20  # of which one class does not say that nothing was learned
ROW = "row of the dataset"
FIRST_COLUMNS = ("id", "prediction", "label")  # if present; the task's other columns follow in its order


@dataclass
class Totals:
    """The totals of the written file on rank 0; other ranks have the defaults."""

    rows: int = 0
    bad: list[int] = field(default_factory=list)
    """The numbers of rows without a prediction, because they could not be read."""
    some: SomeRows = field(default_factory=lambda: SomeRows())
    wrong: SomeRows = field(default_factory=lambda: SomeRows())
    """Rows whose prediction is not the label."""
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """{(label, prediction): number of rows}."""
    first: dict[str, int] = field(default_factory=dict)
    """{label: the first row that has it}."""
    squares: dict[str, tuple[float, int]] = field(default_factory=dict)
    """{column: (squared errors, rows)}."""
    sums: Sums = field(default_factory=Sums)
    """Of the rows with labels, if the predictor has an objective."""
    not_evaluated: str = ""
    """Why these sums are not those of all rows with labels."""

    @property
    def fit(self) -> str:
        """How well the predictions fit the labels of the rows, in words; empty without labels."""
        labelled = {pair: count for pair, count in self.pairs.items() if pair[0].strip()}
        if total := sum(labelled.values()):
            right = sum(count for (label, prediction), count in labelled.items() if label == prediction)
            return f"{right:,} of {total:,} predictions are correct ({right / total:.4f})"
        errors = [f"{name} {math.sqrt(total / rows):.5g}" for name, (total, rows) in self.squares.items() if rows]
        return f"root mean square error of {', '.join(errors)}" if errors else ""

    def unknown_labels(self, classes: Sequence[str | int], separator: str) -> dict[str, int]:
        """Return how many rows have each label that is not among ``classes``, in the order of their first rows."""
        known_labels, unknown = set(map(str, classes)), Counter[str]()
        for (label, _), count in self.pairs.items():
            names = label.split(separator) if separator else [label]
            if label.strip() and not {name.strip() if separator else name for name in names} <= known_labels | {""}:
                unknown[label] += count
        return {label: unknown[label] for label in sorted(unknown, key=lambda label: self.first[label])}

    def warn_of_unknown_labels(
        self, unknown: Mapping[str, int], classes: Sequence[str | int], where: Callable[[int], str]
    ) -> None:
        """Warn of the labels ``unknown``, and ``where`` the first are; the model predicts only ``classes``."""
        if unknown:
            examples = [f"{label!r} ({where(self.first[label])})" for label in list(unknown)[:UNKNOWN_SHOWN]]
            num_others = len(unknown) - UNKNOWN_SHOWN
            more = f", and {num_others:,} others" if num_others > 0 else ""
            log.warning(
                "%s with labels that the model was not trained on, and never predicts: %s; it predicts %s",
                plural(sum(unknown.values()), "row"), ", ".join(examples) + more, listed(list(map(str, classes)), 5),
            )  # fmt: skip

    def warn_of_one_class(self) -> None:
        """Warn if all rows are predicted alike, though they have several labels: the weights have learned nothing."""
        labelled = {pair: count for pair, count in self.pairs.items() if pair[0].strip()}
        labels, predicted = ({pair[side] for pair in labelled} for side in (0, 1))
        if len(predicted) == 1 < len(labels) and sum(labelled.values()) >= _FEW_ROWS:
            log.warning(
                "the model predicts %r for every row, but the labels have %d different values: it has learned nothing "
                "that tells them apart; look at the training loss, and try another optimizer.lr, or more epochs",
                *predicted, len(labels),
            )  # fmt: skip


class SomeRows:
    """Up to SAMPLE_ROWS rows of a table that comes in parts: the first ones of each class, of all classes equally
    many. Of more classes than that, they are spread over them in the order of the table."""

    def __init__(self) -> None:
        self._seen: Counter[str | None] = Counter()
        self._kept: list[pa.Table] = []
        self._places: list[int] = []  # of each row that is kept, among those of its class

    def add(self, rows: pa.Table, classes: Sequence[str | None]) -> None:
        """Add the next ``rows``, with the class of each."""
        taken = []
        for row, name in enumerate(classes):
            position = self._seen[name]
            self._seen[name] += 1
            if position < -(-SAMPLE_ROWS // len(self._seen)):
                taken.append(row)
                self._places.append(position)
        if taken:
            self._kept.append(rows.take(taken))

    def table(self) -> pa.Table | None:
        """Return them in the order of the table; None if there are none."""
        if not self._kept:
            return None
        order = sorted(range(len(self._places)), key=lambda row: (self._places[row], row))
        if len(self._seen) > SAMPLE_ROWS:  # the first row of each comes first
            order = [order[i] for i in np.linspace(0, len(self._seen) - 1, SAMPLE_ROWS).round().astype(int)]
        return pa.concat_tables(self._kept).take(sorted(order[:SAMPLE_ROWS]))


class Block(NamedTuple):
    """Consecutive rows of the table."""

    table: pa.Table
    bad: Sequence[int]
    """The numbers of unreadable rows, which have no prediction."""
    files: Mapping[str, bytes]
    """The files that the table names."""
    pairs: Pairs
    """What the rows with labels add to the metrics."""
    why_not: str = ""
    """Why that cannot be computed."""
    copied: pa.Table | None = None
    """Other columns of the file with the rows. One with the name of a column of ``table`` becomes ``csv_NAME``."""


class NoRowsError(DataError):
    """No row of the first ones can be read."""


class PredictionFile:
    """The CSV or Parquet file at ``path``, written block by block under a temporary name until ``finish``."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, temporary_for(path)
        self._lock = Lock(self._temporary)
        self._waiting: list[pa.Table] = []
        self._copied: list[pa.Table] = []  # of the same blocks
        self._copied_bytes = 0
        self._schema: pa.Schema | None = None
        self._file: Any = None
        self._parquet: Any = None
        self._totals = Totals()
        self._files = FilesFolder(path)

    def add(self, block: Block) -> None:
        why_not = block.why_not
        try:
            self._totals.sums.add(block.pairs)
        except Exception as error:  # of an own metric whose states have another shape than before
            why_not = first_line(error)
        self._totals.not_evaluated = self._totals.not_evaluated or why_not
        if block.files and self._file is None:
            self._claim()
        self._files.add(block.files)
        self._waiting.append(block.table)
        self._totals.rows += len(block.table)
        self._totals.bad += block.bad
        if block.copied is not None:
            self._copied.append(block.copied)
            self._copied_bytes += block.copied.nbytes
        if sum(map(len, self._waiting)) >= GROUP_ROWS or self._copied_bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = max((block.column_names for block in self._waiting), key=len)  # a block of unreadable rows has few
        table = pa.concat_tables(self._waiting, promote_options="permissive")
        if self._schema is None:
            if "prediction" not in names and not set(names) - set(FIRST_COLUMNS):
                raise NoRowsError(
                    f"none of the rows could be read (tried: {len(table)})",
                    hint="paths in the CSV are relative to the task.root of the run: set task.root=FOLDER",
                )
            self._schema = table.select(names).schema
            self._open(self._with_copied(table.select(names)))
        for name in self._schema.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        table = table.select(self._schema.names).cast(self._schema)
        self._sample(table, self._totals.rows - sum(map(len, self._waiting)))
        table = self._with_copied(table)
        self._waiting, self._copied, self._copied_bytes = [], [], 0
        if self._parquet is not None:
            self._parquet.write_table(table.combine_chunks(), row_group_size=len(table))
        else:
            self._file.write(_csv(table, header=False))

    def _with_copied(self, table: pa.Table) -> pa.Table:
        copied = pa.concat_tables(self._copied) if self._copied else None
        for name, values in zip(copied.column_names, copied.columns, strict=True) if copied is not None else ():
            while name in table.column_names:
                name = f"csv_{name}"
            table = table.append_column(name, values)
        return table

    def _sample(self, table: pa.Table, first: int) -> None:
        """Count the pairs of label and prediction, and keep some rows, of them some in which they differ; ``table``
        begins at row ``first``. Of a regression, whose numbers nearly always differ, only the first rows."""
        numbered = table.append_column(ROW, pa.array(np.arange(first, first + len(table))))
        names = [name for name in ("label", "prediction") if name in table.column_names]
        self._add_squares(table)
        if any(pa.types.is_floating(table[name].type) for name in names) or "prediction" not in names:
            self._totals.some.add(numbered, [None] * len(table))
            return
        classes, predicted = (table[name].cast(pa.string()).to_pylist() for name in (names[0], "prediction"))
        read = [row for row, name in enumerate(predicted) if name is not None]
        self._totals.some.add(numbered.take(pa.array(read, pa.int64())), [classes[row] for row in read])
        if "label" in names:
            labelled = [row for row in read if classes[row] is not None]
            self._totals.pairs.update((classes[row], predicted[row]) for row in labelled)
            for row in labelled:
                self._totals.first.setdefault(classes[row], first + row)
            wrong = [row for row in labelled if classes[row] != predicted[row]]
            self._totals.wrong.add(numbered.take(pa.array(wrong, pa.int64())), [classes[row] for row in wrong])

    def _add_squares(self, table: pa.Table) -> None:
        """Add the squared errors of a regression, whose labels may be text."""
        for name in table.column_names:
            label = name.replace("prediction", "label", 1)
            if name.startswith("prediction") and pa.types.is_floating(table[name].type) and label in table.column_names:
                errors = table[name].to_pandas() - pd.to_numeric(table[label].to_pandas(), errors="coerce")
                total, rows = self._totals.squares.get(name, (0.0, 0))
                self._totals.squares[name] = total + float((errors**2).sum()), rows + int(errors.count())

    def _open(self, first: pa.Table) -> None:
        """Write the header, by the columns of ``first``."""
        self._claim()
        if self._path.suffix == ".parquet":
            import pyarrow.parquet as pq

            self._parquet = pq.ParquetWriter(self._file, first.schema)
        else:
            self._file.write(_csv(first.slice(0, 0), header=True))

    def _claim(self) -> None:
        """Create the temporary file, or empty one that a killed process left. Raises HarnessError if another process
        is writing it."""
        if self._file is not None:
            return
        if self._temporary.is_symlink():  # in the folder of someone else, to a file of this user
            self._temporary.unlink()
        if not self._lock.try_acquire():
            owner = f" ({self._lock.owner})" if self._lock.owner else ""
            raise HarnessError(
                f"cannot write the output: another process is writing it{owner}",
                where=str(self._path),
                hint="wait for it, or choose another file with --out FILE",
            )
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish or discard

    def finish(self) -> Totals:
        """Write the remaining rows and give the file its name."""
        self._flush()
        if self._parquet is not None:
            self._parquet.close()
        if self._file is not None:
            self._file.close()
            self._files.finish()  # first, so that the table names files that are there
            commit(self._temporary, self._path)
            self._file = None
            self._lock.release()
        return self._totals

    def discard(self) -> None:
        """Delete the unfinished file; does nothing after ``finish``."""
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._files.discard()
        self._lock.release()


def _csv(table: pa.Table, header: bool) -> bytes:
    """Return ``table`` as CSV: the shortest numbers that round-trip exactly, and empty fields for missing values."""
    frame = table.to_pandas(integer_object_nulls=True)
    text: str = frame.to_csv(index=False, header=header, lineterminator="\n")
    if "\r" in text:  # which readers take for the end of a row, but pandas does not quote
        text = frame.to_csv(index=False, header=header, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    return text.encode()
