"""A rank's contiguous shard of an annotation file as a pandas DataFrame, for whoever wants one.

    frame = read_shard("train.csv", rank=2, world_size=8)

The same rows as ``pandas.read_csv`` and the recipe's slice, but not every rank reads the whole file. Column types
are found on the whole column, never on the shard, so all ranks have the same ones. They differ from pandas in this:
text is never taken for missing (``NA`` and the empty field stay text, unless the rest of the column is numbers, where
they become NaN), and integers that float64 cannot hold stay text instead of being rounded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from harness.data.table.table import Table, open_table
from harness.runs.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

# What pandas.read_csv takes for missing.
_MISSING = pa.array(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"]
    + ["NULL", "NaN", "None", "n/a", "nan", "null"]
)
_BOOLS = pa.array(["True", "TRUE", "true", "False", "FALSE", "false"])
_EXACT = 1 << 53  # integers up to here are exact in float64
_POLL_S = 0.02


def read_shard(
    source: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    columns: Sequence[str] | None = None,
    cache_dir: Path | None = None,
) -> pd.DataFrame:
    """Rows int(rank * rows / world_size) to int((rank + 1) * rows / world_size), indexed by their row numbers.

    ``columns`` chooses columns and their order. Any number of ranks of one node may call it at once: one converts the
    file, as in ``open_table``, whose DataErrors it raises. A rank may get no rows if there are fewer rows than ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks, which count from 0")
    table = open_table(source, text=columns or (), cache_dir=cache_dir)
    chosen = list(table.columns if columns is None else columns)
    kinds = column_kinds(table)
    start, stop = int(rank * table.num_rows / world_size), int((rank + 1) * table.num_rows / world_size)
    view = table.view(start, stop, chosen)
    arrays = [_converted(view.column(i), kinds[column]) for i, column in enumerate(chosen)]
    frame: pd.DataFrame = pa.Table.from_arrays(arrays, names=chosen).to_pandas()
    frame.index = frame.index + start
    return frame


def column_kinds(table: Table) -> dict[str, str]:
    """``int64``, ``float64``, ``bool`` or ``string`` for every text column; found once per node, then kept."""
    path = table.entry.kinds
    while True:
        try:
            kinds: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
            return kinds
        except (OSError, ValueError):
            lock = table.entry.try_lock()
        if lock is None:
            time.sleep(_POLL_S)
            continue
        try:
            if not path.exists():
                names = [c for c in table.columns if c != table.label]
                with table.entry.writing():
                    write_atomically(path, json.dumps({name: infer_kind(table.chunks(name)) for name in names}))
        finally:
            lock.release()


def infer_kind(chunks: Iterable[pa.Array]) -> str:
    """What a whole column of text holds; stops at the first chunk that is neither numbers nor booleans."""
    possible, any_missing, any_value, inexact = {"int64", "float64", "bool"}, False, False, False
    for chunk in chunks:
        missing = pc.is_in(chunk, value_set=_MISSING)
        values = chunk.filter(pc.invert(missing))
        any_missing |= len(values) < len(chunk)
        if not len(values):
            continue
        any_value = True
        possible, large = _kinds_of(values, possible)
        inexact |= large
        if not possible:
            return "string"
    if "int64" in possible and any_value and not any_missing:
        return "int64"
    if "float64" in possible and any_value and not inexact:
        return "float64"
    return "bool" if possible == {"bool"} and any_value and not any_missing else "string"


def _kinds_of(values: pa.Array, possible: set[str]) -> tuple[set[str], bool]:
    """(which of the possible kinds these values may have, whether there is an integer that float64 would round)."""
    if "bool" in possible and pc.all(pc.is_in(values, value_set=_BOOLS)).as_py():
        return {"bool"}, False
    if "int64" in possible and (numbers := _cast(values, pa.int64())) is not None:
        ends = pc.min_max(numbers).as_py()
        return possible - {"bool"}, max(-ends["min"], ends["max"]) > _EXACT
    if "float64" in possible and _cast(values, pa.float64()) is not None:
        large = pc.any(pc.match_substring_regex(values, r"^\s*[+-]?[0-9]{16,}\s*$")).as_py()
        return {"float64"}, large
    return set(), False


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """The values as numbers; None if one of them is none."""
    try:
        numbers = values.cast(kind)
    except pa.ArrowInvalid:
        try:
            numbers = _tidied(values).cast(kind)
        except pa.ArrowInvalid:
            return None
    # Arrow reads 0x1f as a number; pandas does not.
    return None if pc.any(pc.match_substring(values, "x", ignore_case=True)).as_py() else numbers


def _tidied(values: pa.Array) -> pa.Array:
    """Without what pandas allows around a number and Arrow does not: blanks, a plus sign."""
    return pc.replace_substring_regex(pc.utf8_trim_whitespace(values), r"^\+([0-9.])", r"\1")


def _converted(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    if kind == "string":
        return column
    values = pc.if_else(pc.is_in(column, value_set=_MISSING), None, column)
    try:
        return values.cast(pa.type_for_alias(kind))
    except pa.ArrowInvalid:
        return _tidied(values).cast(pa.type_for_alias(kind))
