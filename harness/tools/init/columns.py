"""What the columns of an annotation file seem to hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from harness.config.places import IMAGE_SUFFIXES
from harness.data.table.source import kind_of, locate, reader_of
from harness.errors import ConfigError, DataError, plural

_ROWS = 100_000  # looked at, from the start of a file
_PATH_NAMES = ("path", "image", "file", "filename", "img", "filepath", "image_path")
_LABEL_NAMES = ("label", "class", "target", "category", "y", "labels", "tags", "classes")
# Columns that hold a box: four numbers, none of which is a class.
_BOXES = (
    ("xmin", "ymin", "xmax", "ymax"), ("x_min", "y_min", "x_max", "y_max"), ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"), ("left", "top", "width", "height"), ("x", "y", "width", "height"),
    ("x", "y", "w", "h"), ("cx", "cy", "w", "h"), ("x_center", "y_center", "width", "height"),
)  # fmt: skip
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_PACKED = re.compile(rf"[\[(]?\s*{_NUMBER.pattern}([\s,;]+{_NUMBER.pattern}){{3}}\s*[\])]?")
_Kind = Literal["classes", "numbers", "|", ";", ",", ""]
_SEPARATORS: tuple[_Kind, ...] = ("|", ";", ",")


class Guess(NamedTuple):
    """A setting of the task in YAML, and ``why`` it is so. ``doubt``: it cannot be right, or leaves something out."""

    setting: str
    why: str
    doubt: bool = False

    def __str__(self) -> str:
        return f"  {self.setting}  # {comment(self.why)}"


@dataclass(frozen=True)
class Annotations:
    """The first rows of an annotation file, as text by column."""

    source: str
    columns: dict[str, list[str]]
    more: bool
    """There are more rows than were looked at."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def described(self) -> str:
        return f"{self.source} ({'more than ' if self.more else ''}{plural(self.num_rows, 'row')})"


def read(source: str) -> Annotations:
    """Return the first rows of ``source``. Raises DataError."""
    located = locate(source)
    if located.is_remote:
        raise ConfigError(
            "this is a URL", where=source, hint="download the file first; the YAML file can still use the URL"
        )
    path = Path(located.identity)
    reader = reader_of(kind_of(path, source))
    names = reader.read_header(path, source)
    columns: dict[str, list[str]] = {name: [] for name in names}
    count, more = 0, False
    for batch in reader.read_batches(path, source, names):
        if more := count >= _ROWS:
            break
        count += batch.num_rows
        for name in names:
            columns[name] += batch.column(name).to_pylist()
    if not count:
        raise DataError("the file has a header and no rows", where=source)
    return Annotations(source, columns, more)


def plain(value: object) -> str:
    """Return ``value`` as YAML on one line."""
    settings: Any = {"default_flow_style": True, "sort_keys": False, "width": 10_000, "allow_unicode": True}
    text = str(yaml.safe_dump(value, **settings)).removesuffix("\n").removesuffix("\n...")
    return text if text.isprintable() else str(yaml.safe_dump(value, default_style='"', **settings)).removesuffix("\n")


def comment(text: str) -> str:
    """Return ``text``, such as a name from the data, as it may stand in a comment of YAML."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def path_column(rows: Annotations) -> tuple[str, str] | None:
    """Return the column with the paths of images, and why; None if there is none."""
    counts = {
        name: sum(value.lower().endswith(IMAGE_SUFFIXES) for value in values) for name, values in rows.columns.items()
    }
    best = max(counts, key=lambda name: (counts[name], name.lower() in _PATH_NAMES))
    if counts[best] <= rows.num_rows / 2:
        return None
    return best, f"{counts[best]} of {rows.num_rows} values end with the extension of an image file"


def text_columns(rows: Annotations) -> dict[str, float]:
    """Return the column with the most words per row, or two that look like a pair, with these numbers of words; none if
    no column has two words per row."""
    columns = rows.columns
    words = {name: sum(len(value.split()) for value in values) / rows.num_rows for name, values in columns.items()}
    pair = [
        name
        for name, values in columns.items()
        if words[name] >= 2
        and len(set(values)) > rows.num_rows / 10  # a label is in more rows
        and name.lower() not in _LABEL_NAMES
        and _kind(values, False) in ("", "classes")
    ]
    labels = (_kind(values, name.lower() in _LABEL_NAMES) for name, values in columns.items() if name not in pair)
    if len(pair) == 2 and any(labels):
        return {name: words[name] for name in pair}
    best = max(words, key=words.__getitem__)
    return {best: words[best]} if words[best] >= 2 else {}


def labels(rows: Annotations, inputs: Collection[str]) -> Guess:
    """Return the setting for the column with the labels, and which others there are. Raises ConfigError."""
    columns = {name: values for name, values in rows.columns.items() if name not in inputs}
    packed = [name for name, values in columns.items() if "box" in name.lower() and all(map(_PACKED.fullmatch, values))]
    box = _box(columns)
    kinds = {
        name: kind
        for name, values in columns.items()
        if name not in (*box, *packed) and (kind := _kind(values, name.lower() in _LABEL_NAMES))
    }
    counts = {name: len(set(values)) for name, values in columns.items()}
    descriptions = {name: f"{name} ({plural(counts[name], 'value')})" for name in columns}
    if not kinds and box:
        reason = f"the numbers of a box, one per image{_other_columns(descriptions, box)}"
        return Guess(f"labels: {{kind: regression, column: {plain(list(box))}}}", reason)
    if not kinds:
        raise ConfigError(
            f"no column looks like labels; columns other than {', '.join(inputs)}: "
            f"{', '.join(descriptions.values()) or 'none'}; {plural(rows.num_rows, 'row')}",
            where=rows.source,
            hint=f"the four numbers in {packed[0]} need a column each, such as xmin, ymin, xmax and ymax"
            if packed
            else "add a column such as label that holds one class, several labels or a number in each row",
        )
    names = list(rows.columns)
    best = min(kinds, key=lambda name: (
        _LABEL_NAMES.index(name.lower()) if name.lower() in _LABEL_NAMES else len(_LABEL_NAMES),
        kinds[name] != "classes", names.index(name) < max(map(names.index, inputs)), names.index(name),
    ))  # fmt: skip
    rest = _other_columns(descriptions, [best])
    if kinds[best] == "numbers":
        values = [float(value) for value in columns[best]]
        reason = f"numbers from {min(values):g} to {max(values):g}{rest}"
        return Guess(f"labels: {{kind: regression, column: {plain(best)}}}", reason)
    separator = "" if kinds[best] == "classes" else kinds[best]
    by_value = {value: _labels(value, separator) for value in set(columns[best])}
    names = sorted(set().union(*by_value.values()))
    few = ", ".join(plain(label) for label in names[:3]) + (", ..." if len(names) > 3 else "")
    if separator:
        empty = ", empty: allow" if not all(by_value.values()) else ""
        setting = f"labels: {{column: {plain(best)}, separator: {plain(separator)}{empty}}}"
        reason = f"several of {len(names)} labels per row{', or none' if empty else ''}: {few}{rest}"
        return Guess(setting, reason)
    if len(names) > 10 and all(map(_NUMBER.fullmatch, names)):
        few += f"; for numbers instead of classes: labels: {{kind: regression, column: {plain(best)}}}"
    return Guess(f"label_column: {plain(best)}", f"{len(names)} classes: {few}{rest}")


def _box(columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the four of ``columns`` that hold the box of an image, as they are written; none without."""
    spelled = {name.lower(): name for name in columns}
    for box in _BOXES:
        names = tuple(spelled[part] for part in box if part in spelled)
        if len(names) == len(box) and all(_NUMBER.fullmatch(value) for name in names for value in columns[name]):
            return names
    return ()


def _other_columns(descriptions: Mapping[str, str], used: Collection[str]) -> str:
    """Return the end of a reason: the columns that are not ``used``."""
    return f"; other columns: {', '.join(text for name, text in descriptions.items() if name not in used) or 'none'}"


def _labels(value: str, separator: str) -> set[str]:
    """Return the labels of a row, as ``TagWriter`` reads them."""
    return {label.strip() for label in (value.split(separator) if separator else [value])} - {""}


def _kind(values: Sequence[str], is_label_name: bool) -> _Kind:
    """Return the likely content of a column: ``classes``, ``numbers``, the separator of several labels per row, or
    nothing. ``is_label_name``: it has the name of a label."""
    distinct = set(values)
    for separator in _SEPARATORS:
        several = [value for value in values if separator in value]
        labels = set().union(*(_labels(value, separator) for value in distinct))
        if (
            len(several) > len(values) / 20
            and len(labels) < max(3, len(values) / 2)
            and len(labels) < len(distinct) + 2
        ):
            return separator
    if all(map(_NUMBER.fullmatch, distinct)) and (
        any("." in value or (len(distinct) > 10 and float(value) < -1) for value in distinct)  # -1: maybe no class
        or (is_label_name and len(distinct) > max(20, len(values) / 2))
    ):
        return "numbers"
    return "classes" if 2 <= len(distinct) <= max(2, len(values) / 2) else ""
