"""Split an annotation table, which is read into memory, into training and evaluation rows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from harness.data.table.header import require_columns
from harness.data.table.source import kind_of, locate, reader_of
from harness.errors import ConfigError, DataError, plural, reason, remedy
from harness.runs.console import working
from harness.tools.data import table_file

_NAMED = 5  # labels in a message


def split(
    source: Path, fraction: float, by: str | None, stratify: str | None, seed: int, folder: Path | None, force: bool
) -> str:
    """Write NAME.train and NAME.eval next to ``source``, or into ``folder``; return a summary to print.

    ``fraction``: share of the evaluation rows, above 0 and below 1. Rows with the same value of ``by`` stay together.
    Each value of ``stratify`` has about the same share in both. Depends on the rows, their order and ``seed`` alone.
    """
    name = locate(source).name
    kind, suffix = kind_of(source, str(source)), table_file.suffix_of(source)
    stem = source.name[: -len(suffix)]
    outs = [(folder or source.parent) / f"{stem}.{part}{suffix}" for part in ("train", "eval")]
    if (kind == "parquet") != (suffix == ".parquet"):
        raise ConfigError(f"the content is {kind}", where=name, hint=f"rename it to {stem}.{kind}")
    columns = reader_of(kind).read_header(source, str(source))
    require_columns(
        columns, {column: option for column, option in ((by, "--by"), (stratify, "--stratify")) if column}, name
    )
    table_file.require_new(outs, force)
    with working(f"reading {source.name}"):
        table = _read(source, kind, columns)
    rows = len(table)
    if not rows:
        raise DataError("the file has a header but no rows", where=str(source))
    num_eval = round(rows * fraction)
    if not 0 < num_eval < rows:
        raise ConfigError(
            f"{fraction:g} of {plural(rows, 'row')} is {num_eval}: one part would be empty",
            where="--eval",
            hint="choose a share that leaves at least one row in each file, such as 0.5",
        )
    chosen, notes = _chosen(table, by, stratify, num_eval, seed, [out.name for out in outs])
    with ExitStack() as stack:
        work = stack.enter_context(working(f"writing {outs[0].name} and {outs[1].name}", "rows", rows))
        for out, mask in zip(outs, (~chosen, chosen), strict=True):
            write = stack.enter_context(table_file.writing(out, table.schema))
            for batch in table.filter(pa.array(mask)).to_batches(table_file.BATCH_ROWS):
                write(batch)
                work.done += len(batch)
    done = f"wrote {plural(rows - chosen.sum(), 'row')} to {outs[0]} and {chosen.sum()} to {outs[1]}"
    tables = outs if folder else [source]  # init finds both beside the source
    root = source.with_name(stem)  # as after harness data folder photos photos.csv
    first = (os.path.join(root, value) for value in table.slice(0, 1).to_pylist()[0].values() if isinstance(value, str))
    root_option = ["--root", root] if root.is_dir() and any(map(os.path.isfile, first)) else []
    return "\n".join([done, *notes, f"next: harness init {shlex.join(map(str, [*tables, *root_option]))}"])


def _chosen(
    table: pa.Table, by: str | None, stratify: str | None, num_eval: int, seed: int, names: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Return (True for each evaluation row, notes on the values in the files ``names``). Raises ConfigError."""
    generator = np.random.default_rng(seed)
    strata, labels = _codes(table, stratify) if stratify else (np.zeros(len(table), np.int32), [])
    groups, values = _codes(table, by) if by else (strata, [])
    chosen = _of_groups(groups, strata, num_eval, generator) if by else _of_rows(strata, num_eval, generator)
    if not chosen.any() or chosen.all():
        message = (
            f"column {by!r} has {plural(len(values), 'value')}, so one part would be empty" if by else "too few rows"
        )
        raise ConfigError(message, where="--by" if by else "--stratify", hint="choose another column or another --eval")
    notes = []
    if by:
        notes.append(f"values of {by} in {names[1]}: {len(np.unique(groups[chosen]))} of {len(values)}")
    if stratify and len(lacking := np.setdiff1d(strata, strata[chosen])):
        examples = ", ".join(labels[code].strip() or "(blank)" for code in lacking[:_NAMED])
        more = ", ..." if len(lacking) > _NAMED else ""
        notes.append(
            f"note: {plural(len(lacking), 'value')} of {stratify} found only in {names[0]}, not in {names[1]}: "
            f"{examples}{more}"
        )
    return chosen, notes


def _of_rows(strata: np.ndarray, num_eval: int, generator: np.random.Generator) -> np.ndarray:
    """Return True for ``num_eval`` rows, spread over the strata by largest remainder; one row of each stratum stays
    False."""
    sizes = np.bincount(strata)
    exact = sizes * (num_eval / len(strata))
    take = np.minimum(exact.astype(np.int64), np.maximum(sizes - 1, 0))
    for stratum in np.lexsort((generator.random(len(sizes)), take - exact))[: max(0, num_eval - take.sum())]:
        take[stratum] += take[stratum] + 1 < sizes[stratum] or (len(sizes) == 1)
    order = np.lexsort((generator.random(len(strata)), strata))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    position = np.empty(len(strata), np.int64)
    position[order] = np.arange(len(strata)) - first[strata[order]]
    chosen: np.ndarray = position < take[strata]
    return chosen


def _of_groups(groups: np.ndarray, strata: np.ndarray, num_eval: int, generator: np.random.Generator) -> np.ndarray:
    """Return True for whole groups, about ``num_eval`` rows. A group is taken if that brings the number of rows of its
    strata closer to their shares, and leaves rows of each of them."""
    sizes = np.bincount(strata)
    remaining, current, share = sizes.astype(float), np.zeros(len(sizes)), sizes * (num_eval / len(groups))
    order = np.argsort(groups, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    chosen = np.zeros(len(groups), bool)
    for number in generator.permutation(len(parts)):
        present, counts = np.unique(strata[parts[number]], return_counts=True)
        gain = np.abs(share[present] - current[present]) - np.abs(share[present] - current[present] - counts)
        if gain.sum() > 0 and (remaining[present] > counts).all():
            chosen[parts[number]] = True
            current[present] += counts
            remaining[present] -= counts
    return chosen


def _read(source: Path, kind: str, columns: list[str]) -> pa.Table:
    """All rows as text; of a Parquet file with their types. Raises DataError."""
    if kind != "parquet":
        batches = reader_of(kind).read_batches(source, str(source), columns)
        return pa.Table.from_batches(batches, pa.schema([(column, pa.string()) for column in columns]))
    try:
        return pa.parquet.read_table(source)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the file cannot be read: {reason(error)}", where=str(source), hint=remedy(error)) from None


def _codes(table: pa.Table, column: str) -> tuple[np.ndarray, list[str]]:
    """Return (the code of each row's value, the values by code)."""
    # as text, which any column of read_header can be, while few types can be encoded
    encoded = table[column].cast(pa.large_string()).combine_chunks().dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False), list(map(str, encoded.dictionary.to_pylist()))
