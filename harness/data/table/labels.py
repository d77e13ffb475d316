"""Labels during a conversion: the columns they are in; text in, codes out, and at the end the sorted vocabulary.

If all labels are integer literals (7, 0, -3; not 007, +7 or 7.0), the vocabulary is of integers, sorted as numbers.
Otherwise it is of text, sorted by code point, and ``NA``, ``None`` and ``null`` are labels like any other. A blank
label (white space only, or a null in Parquet) is an error, and so are two labels that differ only in surrounding white
space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from harness.errors import DataError

MAX_LABELS = 1_000_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 18 digits always fit into int64


@dataclass(frozen=True)
class LabelColumns:
    """The label columns of a table.

    class: one label per row, in one column. tags: any number of labels per row, in one column, with ``separator``
    between them; a row may have none only if ``allow_empty``. numbers: one finite number per row in each column.
    ``setting``: what names the columns, for messages.
    """

    kind: Literal["class", "tags", "numbers"]
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


@dataclass
class BadRows:
    """Rows whose labels cannot be used: their number, and the first of them with what is in the file."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, rows: np.ndarray, texts: Sequence[str] = ()) -> None:
        """Add row numbers in ascending order. ``texts``: the content of the first five, if it is to be shown."""
        self.count += len(rows)
        for place, row in enumerate(rows[: max(0, 5 - len(self.first))].tolist()):
            self.first.append((row, f": {texts[place]!r:.60}" if texts else ""))


class LabelCoder:
    """Numbers the distinct labels in order of first appearance; ``finish`` sorts them."""

    def __init__(self, column: str, where: str, setting: str = "") -> None:
        self.column, self.where, self.setting = column, where, setting or "the key of the label column"
        self.num_rows = 0
        self.blank = BadRows()
        self._code_of: dict[str | None, int] = {}
        self._first_row: list[int] = []  # per code

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
        codes = np.fromiter(
            (self._code(w, f) for w, f in zip(words, first.tolist(), strict=True)), np.int32, len(words)
        )
        self._note_blanks(words, indices)
        self.num_rows += len(indices) if owners is None else num_rows
        code_of_row: np.ndarray = codes[indices]
        return code_of_row

    def _code(self, word: str | None, first: int) -> int:
        code = self._code_of.setdefault(word, len(self._code_of))
        if code == len(self._first_row):
            self._first_row.append(self.num_rows + first)
            if code >= MAX_LABELS:
                raise DataError(
                    f"column {self.column!r} has more than {MAX_LABELS:,} different values, too many for labels",
                    where=self.where,
                    hint=f"set {self.setting} to a column of class labels; numbers need task.labels.kind=regression",
                )
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
        place = np.empty(len(words), dtype=np.int32)
        place[order] = np.arange(len(words), dtype=np.int32)
        return vocabulary, place, self._notes(words, integers)

    def _refuse_twins(self, words: list[str]) -> None:
        stripped: dict[str, str] = {}
        for word in words:
            twin = stripped.setdefault(word.strip(), word)
            if twin != word:
                rows = self._first_row[self._code_of[twin]], self._first_row[self._code_of[word]]
                raise DataError(
                    f"labels {twin!r} (row {rows[0]}) and {word!r} (row {rows[1]}) differ only in whitespace",
                    where=self.where,
                    hint=f"strip the whitespace in column {self.column!r}",
                )

    def _notes(self, words: list[str], integers: list[bool]) -> list[str]:
        others = [word for word, is_integer in zip(words, integers, strict=True) if not is_integer]
        if not others:
            return []
        row = self._first_row[self._code_of[others[0]]]
        if all(_is_number(word) for word in words):
            return [
                f"labels in {self.column!r} are numbers but not all integers ({others[0]!r} in row {row}): "
                f"each distinct value is a class ({len(words)} in all); to predict the number, write "
                f"labels: {{kind: regression, column: {self.column}}} below task, without label_column"
            ]
        if len(others) < len(words):
            return [
                f"labels in {self.column!r} are a mix of integers ({len(words) - len(others)}) and other values "
                f"({len(others)}, such as {others[0]!r} in row {row}): all are treated as text"
            ]
        return []


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
