"""The columns of an annotation file: which ones are needed, which are missing, and what was meant instead."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from harness.config.places import is_url
from harness.data.table.labels import LabelColumns
from harness.data.table.source import kind_of, locate, reader_of, require_root
from harness.errors import DataError, listed, similar

Text = Sequence[str] | Mapping[str, str]  # columns of text, perhaps each with the setting that names it


def needed_columns(text: Text, label: LabelColumns | None) -> dict[str, str]:
    """Return {column: the setting that names it, or ""}."""
    column_settings = text if isinstance(text, Mapping) else dict.fromkeys(text, "")
    return {**column_settings, **dict.fromkeys(label.columns if label else (), label.setting if label else "")}


def problems(places: Iterable[str], needed: Mapping[str, str], root: str = "") -> Iterator[DataError]:
    """Yield the problems of the annotation files ``places``, as far as their headers show them, and of ``root``, to
    which paths in the rows are relative. URLs are not asked. A folder that does not exist is one problem."""
    absent: set[Path] = set()

    def require_file(place: str) -> None:
        folder = Path(place).absolute().parent
        if folder in absent:
            return
        if not folder.exists():
            absent.add(folder)
        require_header(Path(locate(place).identity), place, needed)

    def require_folder() -> None:
        if Path(root).absolute() not in absent:
            require_root(root)

    checks: list[Callable[[], None]] = [partial(require_file, place) for place in places if not is_url(place)]
    for check in [*checks, require_folder]:
        try:
            check()
        except DataError as error:
            yield error


def require_header(path: Path, name: str, needed: Mapping[str, str]) -> list[str]:
    """Return the columns of the file ``path``. Raises DataError unless all of ``needed`` are among them and can be
    text."""
    columns = reader_of(kind_of(path, name)).read_header(path, name, needed)
    require_columns(columns, needed, name)
    return columns


def require_columns(columns: Sequence[str], needed: Mapping[str, str], name: str) -> None:
    """Raise DataError unless all columns of ``needed``, {column: the setting that names it}, are among ``columns``."""
    missing = [column for column in needed if column not in columns]
    if not missing:
        return
    hints = [_instead(column, columns, needed) for column in missing]
    noun = "column" if len(missing) == 1 else "columns"
    raise DataError(
        f"no {noun} {', '.join(map(repr, missing))}; the columns are {listed(columns)}",
        where=name,
        hint="; ".join(dict.fromkeys(filter(None, hints))),
    )


def _instead(column: str, columns: Sequence[str], needed: Mapping[str, str]) -> str:
    """Return the hint for ``column``, which does not exist; empty if there is nothing to suggest."""
    setting, nearest = needed[column], similar(column, columns)
    if not setting or list(needed.values()).count(setting) > 1:  # a list of columns
        meant = f"did you mean {nearest!r}? " if nearest else ""
        return f"{meant}{setting} names the columns" if setting else meant.strip()
    used_columns = {*needed, *(similar(other, columns) for other in needed if other not in columns)}
    unused = [other for other in columns if other not in used_columns]
    word = nearest or (unused[0] if len(unused) == 1 else "NAME")
    option = setting.startswith("--")
    typed = f"{setting} {shlex.quote(word)}" if option else shlex.quote(f"{setting}={word}")
    return f"did you mean {typed}?" if nearest else f"{'use' if option else 'set'} {typed}"
