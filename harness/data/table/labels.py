"""Labels during a conversion: the columns they are in; text in, codes out, and at the end the sorted vocabulary.

If all labels are integer literals (7, 0, -3; not 007, +7 or 7.0), the vocabulary is of integers, sorted as numbers.
Otherwise it is of text, sorted by code point, and ``NA``, ``None`` and ``null`` are labels like any other. A blank
label (white space only, or a null in Parquet) is an error, and so are two labels that differ only in surrounding white
space.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypedDict

import numpy as np
import pyarrow as pa

from harness.errors import DataError, plural

MAX_LABELS = 1_000_000
_RARE_ROWS, _RARE, _TIMES = 2, 0.005, 5  # a rare label: rows, or their share; and how many times the other has
_MIN_LETTERS = 3  # of labels that one edit may have made of each other: A and B are two grades
_MAX_COMPARED, _MAX_NOTES = 300, 3
Places = Callable[[Sequence[int]], list[str]]  # of rows in ascending order, such as "line 12"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 18 digits always fit into int64


Form = Literal["class", "tags", "numbers"]


@dataclass(frozen=True)
class LabelColumns:
    """The label columns of a table.

    class: one label per row, in one column. tags: any number of labels per row, in one column, with ``separator``
    between them; a row may have none only if ``allow_empty``. numbers: one finite number per row in each column.
    ``setting``: what names the columns, for messages.
    """

    kind: Form
    columns: tuple[str, ...]
    separator: str = ""
    allow_empty: bool = False
    setting: str = ""

    @property
    def key(self) -> object:
        """The values that a conversion depends on, as JSON."""
        if self.kind == "class":
            return self.columns[0]
        return [self.kind, *self.columns, self.separator, self.allow_empty]


class LabelFacts(TypedDict):
    """What a conversion finds out about the labels, as JSON."""

    vocabulary: Sequence[str | int]
    notes: list[str]
    """For the user."""
    mean: list[float]
    """Of each column of numbers."""
    std: list[float]
    blocks: dict[str, Any]
    """Digests of the blocks of each file."""


@dataclass
class BadRows:
    """Rows whose labels cannot be used: their number, and the first of them with what is in the file."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, rows: np.ndarray, texts: Sequence[str] = ()) -> None:
        """Add row numbers in ascending order. ``texts``: the content of the first five, if it is to be shown."""
        self.count += len(rows)
        for index, row in enumerate(rows[: max(0, 5 - len(self.first))].tolist()):
            self.first.append((row, f": {texts[index]!r:.60}" if texts else ""))


class LabelCoder:
    """Numbers the distinct labels in order of first appearance; ``finish`` sorts them."""

    def __init__(self, column: str, where: str, places: Places, setting: str = "") -> None:
        self.column, self.where, self.setting = column, where, setting or "the key of the label column"
        self.num_rows = 0
        self.blank = BadRows()
        self._places = places
        self._code_of: dict[str | None, int] = {}
        self._first_row: list[int] = []  # per code
        self._count: list[int] = []  # per code

    def add(self, column: pa.Array, owners: np.ndarray | None = None, num_rows: int = 0) -> np.ndarray:
        """Return the int32 codes of the next rows; or of labels of the next ``num_rows`` rows, where ``owners`` has the
        row of each label."""
        encoded = column.dictionary_encode(null_encoding="encode")
        indices: np.ndarray = encoded.indices.to_numpy(zero_copy_only=False)
        words = encoded.dictionary.to_pylist()
        # Assigned in reverse, so that the first appearance of each word wins.
        first = np.empty(len(words), dtype=np.int64)
        first[indices[::-1]] = np.arange(len(indices) - 1, -1, -1)
        if owners is not None:
            first = owners[first]
        counts = np.bincount(indices, minlength=len(words)).tolist()
        codes_of_words = (self._code(*each) for each in zip(words, first.tolist(), counts, strict=True))
        codes = np.fromiter(codes_of_words, np.int32, len(words))
        self._note_blanks(words, indices)
        self.num_rows += len(indices) if owners is None else num_rows
        code_of_row: np.ndarray = codes[indices]
        return code_of_row

    def _code(self, word: str | None, first: int, count: int) -> int:
        code = self._code_of.setdefault(word, len(self._code_of))
        if code == len(self._first_row):
            self._first_row.append(self.num_rows + first)
            self._count.append(0)
            if code >= MAX_LABELS:
                raise DataError(
                    f"column {self.column!r} has more than {MAX_LABELS:,} different values, too many for labels",
                    where=self.where,
                    hint=f"set {self.setting} to a column of class labels; numbers need task.labels.kind=regression",
                )
        self._count[code] += count
        return code

    def _note_blanks(self, words: list[str | None], indices: np.ndarray) -> None:
        blank = [i for i, word in enumerate(words) if word is None or not word.strip()]
        if blank:
            self.blank.add(self.num_rows + np.flatnonzero(np.isin(indices, blank)))

    def finish(self) -> tuple[list[str] | list[int], np.ndarray, list[str]]:
        """Return (vocabulary, index in the vocabulary of each code as int32, notes for the user)."""
        words = [word for word in self._code_of if word is not None]
        self._refuse_twins(words)
        integers = [bool(_INTEGER.fullmatch(word)) for word in words]
        vocabulary: list[str] | list[int]
        if all(integers):
            numbers = [int(word) for word in words]
            order = sorted(range(len(words)), key=numbers.__getitem__)
            vocabulary = [numbers[i] for i in order]
        else:
            order = sorted(range(len(words)), key=words.__getitem__)
            vocabulary = [words[i] for i in order]
        rank_of_code = np.empty(len(words), dtype=np.int32)
        rank_of_code[order] = np.arange(len(words), dtype=np.int32)
        return vocabulary, rank_of_code, [*self._notes(words, integers), *self._misspelled(words)]

    def _refuse_twins(self, words: list[str]) -> None:
        stripped: dict[str, str] = {}
        for word in words:
            twin = stripped.setdefault(word.strip(), word)
            if twin != word:
                places = self._places([self._first_row[self._code_of[each]] for each in (twin, word)])
                raise DataError(
                    f"labels {twin!r} ({places[0]}) and {word!r} ({places[1]}) differ only in whitespace",
                    where=self.where,
                    hint=f"strip the whitespace in column {self.column!r}",
                )

    def _notes(self, words: list[str], integers: list[bool]) -> list[str]:
        others = [word for word, is_integer in zip(words, integers, strict=True) if not is_integer]
        if not others:
            return []
        (place,) = self._places([self._first_row[self._code_of[others[0]]]])
        if all(_is_number(word) for word in words):
            return [
                f"labels in {self.column!r} are numbers but not all integers ({others[0]!r} in {place}): "
                f"each distinct value is a class ({len(words)} in all); to predict the number, write "
                f"labels: {{kind: regression, column: {self.column}}} below task, without label_column"
            ]
        if len(others) < len(words):
            return [
                f"labels in {self.column!r} are a mix of integers ({len(words) - len(others)}) and other values "
                f"({len(others)}, such as {others[0]!r} in {place}): all are treated as text"
            ]
        return []

    def _misspelled(self, words: list[str]) -> list[str]:
        """Return a warning for each of the first rare labels that is spelled almost like one of far more rows."""
        count = {word: self._count[self._code_of[word]] for word in words}
        notes = []
        for word, other in misspelled(count, self.num_rows):
            (place,) = self._places([self._first_row[self._code_of[word]]])
            rows = plural(count[word], "row")
            notes.append(
                f"{place} of {self.where}: {rows} with the label {word!r}, {count[other]:,} with {other!r}: "
                "if it is a misspelling, correct it, or it stays a class of its own"
            )
        return notes


def misspelled(count: Mapping[str, int], num_rows: int) -> Iterator[tuple[str, str]]:
    """Yield the first rare labels, each with one of far more of the ``num_rows`` rows that is spelled almost like it.
    ``count``: the rows of each label."""
    large = sorted(count, key=count.__getitem__, reverse=True)[:_MAX_COMPARED]
    rare = [word for word in count if count[word] <= max(_RARE_ROWS, _RARE * num_rows)]
    pairs = ((word, other) for word in rare[:_MAX_COMPARED] for other in large
             if count[other] >= _TIMES * count[word] and _alike(word, other))  # fmt: skip
    yield from islice(pairs, _MAX_NOTES)


def _alike(first: str, second: str) -> bool:
    """Return True for labels that differ only by case, white space or one edit that is not of a digit."""
    first, second = ("".join(label.split()).casefold() for label in (first, second))
    if first == second:
        return True
    if min(len(first), len(second)) < _MIN_LETTERS:
        return False
    common = len(os.path.commonprefix([first, second]))
    first, second = first[common:], second[common:]
    is_number = first[:1].isdigit() or second[:1].isdigit()
    return not is_number and (first[1:] in (second, second[1:]) or first == second[1:])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
