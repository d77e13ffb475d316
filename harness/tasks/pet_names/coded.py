"""Names as rows of character codes: the split by name, and rows as views of one stream of bytes.

A character's code is its index in ALPHABET.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.data.names import ALPHABET, BLANK, STOP, clean
from harness.errors import DataError, require_regular_file

BLANK_CODE, STOP_CODE = ALPHABET.index(BLANK), ALPHABET.index(STOP)
ONE_IN = 10  # distinct names is for validation
_CODES = np.full(128, 255, dtype=np.uint8)
_CODES[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET), dtype=np.uint8)


def read(path: Path, hint: str) -> tuple[list[str], int]:
    """Read a text file with one name per line: (cleaned names in order, number of lines without one).

    Raises DataError, with ``hint``.
    """
    try:
        require_regular_file(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise DataError("the file of names does not exist", where=str(path), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise DataError(f"the names cannot be read: {reason}", where=str(path), hint=hint) from None
    names = [name for line in lines if (name := clean(line))]
    return names, len(lines) - len(names)


def is_validation(name: str) -> bool:
    """Return True for one name in ten, by a hash of its letters: independent of the seed and of the other names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % ONE_IN == 0


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (training names with repeats, validation names once each), in order. No name is in both."""
    validation = {name: is_validation(name) for name in dict.fromkeys(names)}
    return [name for name in names if not validation[name]], [name for name, chosen in validation.items() if chosen]


def encode(text: str) -> np.ndarray:
    """Return the uint8 codes of a text whose characters are in ALPHABET."""
    return _CODES[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]


@dataclass(frozen=True)
class CodeRows:
    """Row r is ``stream[starts[r] : starts[r] + lengths[r]]``. Its inputs are all codes but the last, its targets all
    but the first. Rows overlap in the stream, so memory grows with the number of characters, not of rows.
    """

    stream: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Return uint8 (rows, length of the longest); shorter rows are padded with BLANK on the right."""
        lengths = self.lengths[rows]
        places = np.arange(lengths.max(initial=2))
        inside = places < lengths[:, None]
        index = np.where(inside, self.starts[rows][:, None] + places, 0)
        return np.where(inside, self.stream[index], np.uint8(BLANK_CODE))


def windows(names: Sequence[str], window: int) -> CodeRows:
    """Return one row per character of each name and per STOP: the ``window`` codes before it, then the character."""
    stream, starts, lengths = _stream(names, window)
    # A name of n characters has n + 1 windows; the first starts at its first BLANK, each next one a code later.
    first = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]), lengths + 1)
    rows = first + np.arange(len(first))
    return CodeRows(stream, rows, np.full(len(rows), window + 1, dtype=np.int64))


def whole(names: Sequence[str]) -> CodeRows:
    """Return one row per name: BLANK, its characters and STOP."""
    stream, starts, lengths = _stream(names, 1)
    return CodeRows(stream, starts, lengths + 2)


def _stream(names: Sequence[str], num_blanks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (codes of all names, each after ``num_blanks`` BLANKs and before STOP; start of each; lengths of the
    names)."""
    lengths = np.asarray([len(name) for name in names], dtype=np.int64)
    starts = np.cumsum(np.concatenate([[0], lengths + num_blanks + 1]))[:-1]
    return encode("".join(f"{BLANK * num_blanks}{name}{STOP}" for name in names)), starts, lengths
