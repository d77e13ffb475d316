"""A CSV or Parquet file of predictions, written block by block under a temporary name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.errors import DataError, HarnessError
from harness.runs.files import replacing, temporary_for
from harness.runs.locks import Lock

GROUP_ROWS = 1 << 15  # written at once; one row group of Parquet
SAMPLE_ROWS = 32
MAX_PAIRS = 10_000  # of label and prediction; more are too many for a picture
ROW = "row of the dataset"
FIRST_COLUMNS = ("id", "prediction", "label")  # if present; the task's other columns follow in its order


@dataclass(frozen=True)
class Written:
    """The totals of the written file on rank 0; other ranks have the defaults."""

    rows: int = 0
    bad: int = 0  # rows without a prediction, because they could not be read
    head: pa.Table | None = None  # the first SAMPLE_ROWS rows
    wrong: pa.Table | None = None  # the first SAMPLE_ROWS rows whose prediction is not the label, with column ROW
    pairs: Mapping[tuple[str, str], int] = field(default_factory=dict)  # {(label, prediction): number of rows}


class PredictionFile:
    """The table at ``path``, which exists only after ``finish``."""

    def __init__(self, path: Path) -> None:
        self._path, self._opened = path, ExitStack()
        self._lock = Lock(temporary_for(path))
        self._waiting: list[pa.Table] = []
        self._head: pa.Table | None = None
        self._schema: pa.Schema | None = None
        self._file: Any = None
        self._parquet: Any = None
        self._rows = self._bad = self._compared = 0
        self._wrong: list[pa.Table] = []
        self._pairs: Counter[tuple[str, str]] = Counter()

    def _compare(self, table: pa.Table) -> None:
        """Count the pairs of label and prediction, and keep the first rows in which they differ. Only classes: numbers
        of a regression nearly always differ."""
        first, self._compared = self._compared, self._compared + len(table)
        if not {"label", "prediction"} <= {*table.column_names} or pa.types.is_floating(table["prediction"].type):
            return
        label, prediction = (table[name].cast(pa.string()) for name in ("label", "prediction"))
        self._pairs.update(
            pair for pair in zip(label.to_pylist(), prediction.to_pylist(), strict=True) if None not in pair
        )
        left = SAMPLE_ROWS - sum(map(len, self._wrong))
        import pyarrow.compute as pc  # late: the start of every run imports this module

        places = np.flatnonzero(pc.fill_null(pc.not_equal(label, prediction), False).to_numpy())[:left]
        if len(places):
            self._wrong.append(table.take(places).append_column(ROW, pa.array(first + places)))

    def add(self, blocks: Iterable[tuple[pa.Table, int]]) -> None:
        """Append blocks of rows, each with its number of unreadable rows."""
        for block, bad in blocks:
            self._waiting.append(block)
            self._rows, self._bad = self._rows + len(block), self._bad + bad
            if sum(map(len, self._waiting)) >= GROUP_ROWS:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = max((block.column_names for block in self._waiting), key=len)  # a block of unreadable rows has few
        table = pa.concat_tables(self._waiting, promote_options="permissive")
        self._waiting = []
        if self._schema is None:
            if "prediction" not in names and not set(names) - set(FIRST_COLUMNS):
                raise DataError(
                    f"none of the rows could be read (tried: {len(table)})",
                    hint="paths in the CSV are relative to the task.root of the run: set task.root=FOLDER",
                )
            self._open(table.select(names))
        assert self._schema is not None
        for name in self._schema.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        table = table.select(self._schema.names).cast(self._schema)
        self._compare(table)
        if self._parquet is not None:
            self._parquet.write_table(table.combine_chunks(), row_group_size=len(table))
        else:
            self._file.write(_csv(table, header=False))

    def _open(self, first: pa.Table) -> None:
        self._schema, self._head = first.schema, first.slice(0, SAMPLE_ROWS)
        self._opened.callback(self._lock.release)
        self._lock_temporary()  # of an interrupted process, if there is one
        self._lock.release()
        temporary = self._opened.enter_context(replacing(self._path))
        self._file = open(temporary, "wb")  # noqa: SIM115 - closed by finish or discard
        self._opened.callback(self._file.close)
        self._lock_temporary()
        if self._path.suffix == ".parquet":
            import pyarrow.parquet as pq

            self._parquet = pq.ParquetWriter(self._file, self._schema)
        else:
            self._file.write(_csv(first.slice(0, 0), header=True))

    def _lock_temporary(self) -> None:
        """Raise HarnessError if another process is writing the file: both would use the same temporary file."""
        if not self._lock.try_acquire():
            owner = f" ({self._lock.owner})" if self._lock.owner else ""
            hint = "wait for it, or choose another file with --out FILE"
            problem = f"cannot write the output: another process is writing it{owner}"
            raise HarnessError(problem, where=str(self._path), hint=hint)

    def finish(self) -> Written:
        """Write the remaining rows and give the file its name."""
        self._flush()
        if self._parquet is not None:
            self._parquet.close()
        self._opened.close()
        wrong = pa.concat_tables(self._wrong) if self._wrong else None
        return Written(self._rows, self._bad, self._head, wrong, self._pairs)

    def discard(self) -> None:
        """Delete the unfinished file; does nothing after ``finish``."""
        self._opened.__exit__(_Discarded, _Discarded(), None)


class _Discarded(Exception):
    """Makes ``replacing`` remove the unfinished file."""


def _csv(table: pa.Table, header: bool) -> bytes:
    """CSV with the shortest numbers that round-trip exactly, and empty fields for missing values."""
    frame = table.to_pandas(integer_object_nulls=True)
    text: str = frame.to_csv(index=False, header=header, lineterminator="\n")
    return text.encode()
