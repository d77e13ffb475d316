"""Names as rows of character codes: cleaning, the split by name, and rows as views of one stream of bytes.

A character's code is its place in ALPHABET. BLANK is what stands before a name begins, STOP is what ends it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.errors import DataError

BLANK, STOP = "*", "+"
ALPHABET = BLANK + STOP + " -." + string.ascii_lowercase
BLANK_CODE, STOP_CODE = ALPHABET.index(BLANK), ALPHABET.index(STOP)
ONE_IN = 10  # names of which one is held out
_IN_NAMES = frozenset(ALPHABET) - {BLANK, STOP}
_CODES = np.full(128, 255, dtype=np.uint8)
_CODES[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET), dtype=np.uint8)


def clean(name: str) -> str:
    """``name`` in lower case, blanks at its ends taken off and several in a row made one.

    Empty where it is no name: it has a character outside a-z, blank, hyphen and full stop, or no letter at all.
    """
    tidied = " ".join(part for part in name.lower().split(" ") if part)
    usable = set(tidied) <= _IN_NAMES and any(character.isalpha() for character in tidied)
    return tidied if usable else ""


def of_csv(content: bytes, column: str) -> list[str]:
    """The cleaned names of a column of a CSV, in its order."""
    rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    return [name for row in rows if (name := clean(row[column] or ""))]


def of_json(content: bytes) -> list[str]:
    """The cleaned names of a JSON list, in its order."""
    return [name for given in json.loads(content) if (name := clean(given))]


def read(path: Path, how_to_get: str) -> tuple[list[str], int]:
    """The cleaned names of a text file, one a line, in its order, and how many lines held none. Raises DataError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError("no such file of names", where=str(path), hint=how_to_get) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"the names cannot be read: {reason}", where=str(path), hint=how_to_get) from None
    names = [name for line in lines if (name := clean(line))]
    return names, len(lines) - len(names)


def is_held_out(name: str) -> bool:
    """One name in ten, by its own letters: the same in every run, whatever the seed and the other names are."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % ONE_IN == 0


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(training names, as often as they occur; held-out names, once each), in order. No name is in both."""
    held_out = {name: is_held_out(name) for name in dict.fromkeys(names)}
    return [name for name in names if not held_out[name]], [name for name, out in held_out.items() if out]


def encode(text: str) -> np.ndarray:
    """uint8 codes of a text of characters of ALPHABET."""
    return _CODES[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]


@dataclass(frozen=True)
class Rows:
    """Row r is ``stream[starts[r] : starts[r] + lengths[r]]``: all but its last code go in, all but its first are what
    comes next. Rows overlap in the stream, which therefore costs a few bytes a character however many rows there are.
    """

    stream: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """uint8 (rows, longest of them); shorter ones are filled up with BLANK on the right."""
        lengths = self.lengths[rows]
        places = np.arange(lengths.max(initial=2))
        inside = places < lengths[:, None]
        index = np.where(inside, self.starts[rows][:, None] + places, 0)
        return np.where(inside, self.stream[index], np.uint8(BLANK_CODE))


def windows(names: Sequence[str], window: int) -> Rows:
    """A row for each character of each name, and for its STOP: that one after the ``window`` before it."""
    stream, starts, lengths = _stream(names, window)
    # A name of n characters has n + 1 windows, which start at its first blank and each one further.
    first = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]), lengths + 1)
    each = first + np.arange(len(first))
    return Rows(stream, each, np.full(len(each), window + 1, dtype=np.int64))


def whole(names: Sequence[str]) -> Rows:
    """A row for each name: one BLANK, its characters and STOP."""
    stream, starts, lengths = _stream(names, 1)
    return Rows(stream, starts, lengths + 2)


def _stream(names: Sequence[str], num_blanks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of all names, ``num_blanks`` before each and STOP behind it; where each starts; how long the names are."""
    lengths = np.asarray([len(name) for name in names], dtype=np.int64)
    starts = np.cumsum(np.concatenate([[0], lengths + num_blanks + 1]))[:-1]
    return encode("".join(f"{BLANK * num_blanks}{name}{STOP}" for name in names)), starts, lengths
