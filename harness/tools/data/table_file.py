"""Write annotation tables: a stream of rows into a .csv, .csv.gz or .parquet file, complete or not at all."""

from __future__ import annotations

import csv
import gzip
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from harness.errors import ConfigError, DataError, did_you_mean, reason, remedy
from harness.runs.console import working
from harness.runs.files import replacing

BATCH_ROWS = 16_384
_SUFFIXES = (".csv", ".csv.gz", ".parquet")


def suffix_of(out: Path) -> str:
    """Return ``.csv``, ``.csv.gz`` or ``.parquet``. Raises ConfigError for another name."""
    for suffix in _SUFFIXES:
        if out.name.lower().endswith(suffix) and len(out.name) > len(suffix):
            return suffix
    raise ConfigError(
        f"{out.name} is not the name of an annotation table",
        where=str(out),
        hint="use a name that ends with .csv, .csv.gz or .parquet",
    )


def _make(folder: Path) -> str:
    return did_you_mean(folder, os.path.isdir) or f"make it: mkdir -p {shlex.quote(str(folder))}"


def require_new(outs: Iterable[Path], force: bool) -> None:
    """Raise ConfigError if one of ``outs`` exists, unless ``force``, or cannot be written."""
    for out in outs:
        if not out.parent.is_dir():
            raise ConfigError(f"there is no folder {out.parent}", where=str(out), hint=_make(out.parent))
        if out.is_dir():
            raise ConfigError("it is a folder", where=str(out), hint="give the name of a file")
        if out.exists() and not force:
            raise ConfigError(
                "the file exists", where=str(out), hint="choose another name, or add --force to replace it"
            )


@contextmanager
def writing(out: Path, schema: pa.Schema) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Yield a function that adds rows to ``out``, which replaces an old file at the end of the block. Raises
    DataError."""
    try:
        with ExitStack() as stack:
            temporary = stack.enter_context(replacing(out))
            if suffix_of(out) == ".parquet":
                yield stack.enter_context(pa.parquet.ParquetWriter(str(temporary), schema)).write_batch
                return
            opened = gzip.open if suffix_of(out) == ".csv.gz" else open
            stream: Any = stack.enter_context(opened(temporary, "wt", encoding="utf-8", newline=""))
            lines = csv.writer(stream, lineterminator="\n")  # quotes a single empty field: an empty line is not a row
            lines.writerow(schema.names)
            yield lambda batch: lines.writerows(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    except OSError as error:
        message = f"the table cannot be written: {reason(error)}"
        raise DataError(message, where=str(out), hint=remedy(error, "or choose another folder")) from None


def write_rows(out: Path, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> int:
    """Write ``rows`` of text to ``out``; return their number. No rows make no file."""
    schema, count, rows = pa.schema([(column, pa.string()) for column in columns]), 0, iter(rows)
    part = list(islice(rows, BATCH_ROWS))
    if not part:
        return 0
    with writing(out, schema) as write, working(f"writing {out.name}", "rows") as work:
        while part:
            write(
                pa.RecordBatch.from_arrays(
                    [pa.array(values, pa.string()) for values in zip(*part, strict=True)], schema=schema
                )
            )
            count = work.done = count + len(part)
            part = list(islice(rows, BATCH_ROWS))
    return count
