"""Compares converted annotation tables with Parquet files that are read in place, in processor time.

    python -m benchmarks.parquet_rows --rows 1000000

"opening" includes the conversion. Then each reader reads the path and the label of 64 random rows, as a loader does for
one batch in a shuffled epoch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from benchmarks.open_shard import machine, write_csv
from harness.data.table.table import open_table

_BATCHES = 10


def compare(csv: Path, folder: Path, num_rows: int) -> str:
    """A Markdown table of a CSV and of Parquet files with the same rows."""
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    rows = pa.csv.read_csv(str(csv), parse_options=parse)
    batches = [np.random.default_rng(i).integers(0, num_rows, 64) for i in range(_BATCHES)]
    small: dict[str, Any] = {"row_group_size": 16_384}
    kinds: dict[str, dict[str, Any]] = {
        "defaults of pyarrow": {},
        "row groups of 16,384 rows": small,
        "the same, neither compressed nor encoded": {**small, "compression": "none", "use_dictionary": False},
    }
    lines = ["| file | read by | opening, s | 64 random rows, ms |", "|---|---|---|---|"]
    lines.append(_row("CSV", "conversion", lambda: _converted(csv, folder), batches))
    for name, options in kinds.items():
        path = folder / "rows.parquet"
        pa.parquet.write_table(rows, path, **options)
        lines.append(_row(f"Parquet, {name}", "conversion", lambda path=path: _converted(path, folder), batches))
        lines.append(_row("", "row groups in place", lambda path=path: _in_place(path), batches))
    return "\n".join([f"### Parquet, {num_rows:,} rows, processor time", "", *lines])


def _converted(path: Path, folder: Path) -> Callable[[np.ndarray], object]:
    table = open_table(path, text=["path"], label="label", cache_dir=folder / "cache")
    return lambda rows: (table.strings("path", rows), table.labels(rows))


def _in_place(path: Path) -> Callable[[np.ndarray], object]:
    file = pa.parquet.ParquetFile(path, memory_map=True)
    ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)])

    def read(rows: np.ndarray) -> object:
        groups, found = np.searchsorted(ends, rows, "right"), []
        for group in np.unique(groups).tolist():
            part = file.read_row_group(group, columns=["path", "label"], use_threads=False)
            found.append(part.take(pa.array(rows[groups == group] - (ends[group] - part.num_rows))))
        return found

    return read


def _row(file: str, by: str, open_file: Callable[[], Callable[[np.ndarray], object]], batches: list[np.ndarray]) -> str:
    start = time.process_time()
    read = open_file()
    opened = time.process_time() - start
    read(batches[0])  # maps the file
    start = time.process_time()
    for batch in batches:
        read(batch)
    each = (time.process_time() - start) / len(batches)
    return f"| {file} | {by} | {opened:.2f} | {each * 1e3:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        csv = Path(folder, "rows.csv")
        write_csv(csv, options.rows)
        print(f"{machine()}\n\n{compare(csv, Path(folder), options.rows)}")


if __name__ == "__main__":
    main()
