"""Split an annotation table into training and evaluation rows, as a stream: only one number per row is in memory."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from harness.data.table import convert
from harness.data.table.convert import require_columns
from harness.data.table.source import kind_of, locate
from harness.errors import ConfigError, DataError, plural
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
    suffix, kind = table_file.suffix_of(source), kind_of(source, str(source))
    stem = source.name[: -len(suffix)]
    outs = [(folder or source.parent) / f"{stem}.{part}{suffix}" for part in ("train", "eval")]
    table_file.require_new(outs, force)
    if (kind == "parquet") != (suffix == ".parquet"):
        raise ConfigError(f"the content is {kind}", where=name, hint=f"rename it to {stem}.{kind}")
    columns = _columns(source, kind)
    needed = {column: option for column, option in ((by, "--by"), (stratify, "--stratify")) if column}
    require_columns(columns, needed, name)
    rows, codes, values = _codes(source, kind, [column for column in (by, stratify) if column])
    wanted = round(rows * fraction)
    if not 0 < wanted < rows:
        raise ConfigError(
            f"{fraction:g} of {plural(rows, 'row')} is {wanted}: one part would be empty",
            where="--eval",
            hint="choose a share that leaves at least one row in each file, such as 0.5",
        )
    generator = np.random.default_rng(seed)
    strata = codes[-1] if stratify else np.zeros(rows, np.int32)
    chosen = _of_groups(codes[0], strata, wanted, generator) if by else _of_rows(strata, wanted, generator)
    if not chosen.any() or chosen.all():
        what = (
            f"column {by!r} has {plural(len(values[0]), 'value')}, so one part would be empty" if by else "too few rows"
        )
        raise ConfigError(what, where="--by" if by else "--stratify", hint="choose another column or another --eval")
    _write(source, kind, outs, chosen)
    lines = [f"wrote {plural(rows - chosen.sum(), 'row')} to {outs[0]} and {chosen.sum()} to {outs[1]}"]
    if by:
        lines.append(f"values of {by} in {outs[1].name}: {len(np.unique(codes[0][chosen]))} of {len(values[0])}")
    if stratify and len(lacking := np.setdiff1d(strata, strata[chosen])):
        named = ", ".join(values[-1][code] for code in lacking[:_NAMED])
        more = ", ..." if len(lacking) > _NAMED else ""
        lines.append(
            f"note: {plural(len(lacking), 'value')} of {stratify} found only in {outs[0].name}, not in {outs[1].name}: "
            f"{named}{more}"
        )
    return "\n".join([*lines, f"next: harness init {shlex.join(map(str, outs))}"])


def _of_rows(strata: np.ndarray, wanted: int, generator: np.random.Generator) -> np.ndarray:
    """True for ``wanted`` rows, spread over the strata by largest remainder; one row of each stratum stays False."""
    sizes = np.bincount(strata)
    exact = sizes * (wanted / len(strata))
    take = np.minimum(exact.astype(np.int64), np.maximum(sizes - 1, 0))
    for stratum in np.lexsort((generator.random(len(sizes)), take - exact))[: max(0, wanted - take.sum())]:
        take[stratum] += take[stratum] + 1 < sizes[stratum] or (len(sizes) == 1)
    order = np.lexsort((generator.random(len(strata)), strata))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = np.empty(len(strata), np.int64)
    place[order] = np.arange(len(strata)) - first[strata[order]]
    chosen: np.ndarray = place < take[strata]
    return chosen


def _of_groups(groups: np.ndarray, strata: np.ndarray, wanted: int, generator: np.random.Generator) -> np.ndarray:
    """True for whole groups, about ``wanted`` rows. A group is taken if that brings the number of rows of its strata
    closer to their shares, and leaves rows of each of them."""
    sizes = np.bincount(strata)
    left, current, share = sizes.astype(float), np.zeros(len(sizes)), sizes * (wanted / len(groups))
    order = np.argsort(groups, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    chosen = np.zeros(len(groups), bool)
    for number in generator.permutation(len(parts)):
        found, counts = np.unique(strata[parts[number]], return_counts=True)
        gain = np.abs(share[found] - current[found]) - np.abs(share[found] - current[found] - counts)
        if gain.sum() > 0 and (left[found] > counts).all():
            chosen[parts[number]] = True
            current[found] += counts
            left[found] -= counts
    return chosen


# Reading and writing


def _columns(source: Path, kind: str) -> list[str]:
    columns: list[str] = convert.reader_of(kind).read_header(source, str(source))
    return columns


def _codes(source: Path, kind: str, columns: list[str]) -> tuple[int, list[np.ndarray], list[list[str]]]:
    """(number of rows, the code of each row's value, for each column, and the values by code)."""
    reader = convert.reader_of(kind)
    found: list[dict[str, int]] = [{} for _ in columns]
    parts: list[list[np.ndarray]] = [[] for _ in columns]
    rows = 0
    needed = columns or _columns(source, kind)[:1]
    for batch in reader.read_batches(source, str(source), needed if kind == "parquet" else _columns(source, kind)):
        rows += batch.num_rows
        for index, column in enumerate(columns):
            encoded = pc.dictionary_encode(batch.column(batch.schema.get_field_index(column)))
            known = [found[index].setdefault(value, len(found[index])) for value in encoded.dictionary.to_pylist()]
            parts[index].append(np.asarray(known, np.int32)[encoded.indices.to_numpy(zero_copy_only=False)])
    if not rows:
        raise DataError("the file has a header but no rows", where=str(source))
    return rows, [np.concatenate(part) for part in parts], [list(values) for values in found]


def _batches(source: Path, kind: str) -> Generator[pa.RecordBatch, None, None]:
    """All rows; of a Parquet file with their types."""
    if kind == "parquet":
        with pa.parquet.ParquetFile(source) as file:
            yield from file.iter_batches()
    else:
        yield from convert.reader_of(kind).read_batches(source, str(source), _columns(source, kind))


def _write(source: Path, kind: str, outs: list[Path], chosen: np.ndarray) -> None:
    schema = pa.schema([(column, pa.string()) for column in _columns(source, kind)])
    if kind == "parquet":
        schema = pa.parquet.read_schema(source)
    start = 0
    with table_file.writing(outs[0], schema) as train, table_file.writing(outs[1], schema) as evaluate:
        for batch in _batches(source, kind):
            mask = chosen[start : start + batch.num_rows]
            start += batch.num_rows
            for write, keep in ((train, ~mask), (evaluate, mask)):
                if keep.any():
                    write(batch.filter(pa.array(keep)))
    if start != len(chosen):
        raise DataError("the file changed while it was being read", where=str(source), hint="run the command again")
