"""Files of the table cache in blocks with a digest each, which is compared when a block is used for the first time."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 16  # of an array: a batch of shuffled rows reads few bytes of each of many blocks
_DIGEST_BYTES = 16


class DamagedError(Exception):
    """A block of a file is not as it was written."""


class BlockWriter:
    """A file that is written in blocks of any length; ``end_block`` ends each."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close
        self._edges, self._digests, self._hash = [0], bytearray(), _hash()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._hash.update(view)
        return self._file.write(view)

    def flush(self) -> None:
        """Do nothing: the file is not buffered."""

    def tell(self) -> int:
        return self._file.tell()

    def end_block(self) -> None:
        self._edges.append(self._file.tell())
        self._digests += self._hash.digest()
        self._hash = _hash()

    def digests(self) -> dict[str, Any]:
        """Return the edges and digests of the blocks as JSON, for ``CheckedFile``."""
        return {"edges": self._edges, "digests": self._digests.hex()}

    def close(self) -> None:
        self._file.close()


def array_digests(path: Path, row_bytes: int) -> str:
    """Return the digests of an array, for ``CheckedArray``."""
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(_block_rows(row_bytes) * row_bytes), b"")
        return b"".join(_hash(block).digest() for block in blocks).hex()


class _Blocks:
    def __init__(self, path: Path, content: np.ndarray, edges: np.ndarray, digests: str) -> None:
        """``content``: the mapped bytes. Block i is ``content[edges[i]:edges[i + 1]]``."""
        self._path, self.content, self._edges = path, content, edges
        self._digests = bytes.fromhex(digests)
        self._unchecked = np.ones(len(edges) - 1, bool)
        self._num_unchecked = len(self._unchecked)

    def require(self, block: int) -> None:
        """Raise DamagedError unless the block is as it was written; -1 is the last one."""
        block = range(len(self._unchecked))[block]
        if not self._unchecked[block]:
            return
        start, stop = self._edges[block], self._edges[block + 1]
        offset = block * _DIGEST_BYTES
        if _hash(self.content[start:stop]).digest() != self._digests[offset : offset + _DIGEST_BYTES]:
            raise DamagedError(f"{self._path.name} is damaged between bytes {start} and {stop}")
        self._unchecked[block] = False
        self._num_unchecked -= 1


class CheckedFile(_Blocks):
    """A mapped file that a BlockWriter has written."""

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        super().__init__(path, _mapped(path, "u1"), np.asarray(index["edges"], np.int64), index["digests"])


class CheckedArray(_Blocks):
    """A mapped array; indexing it by rows raises DamagedError if a row is in a damaged block."""

    def __init__(self, path: Path, kind: str, columns: int | None, digests: str) -> None:
        """``columns``: None for one dimension."""
        array = _mapped(path, kind)
        self.array = array if columns is None else array.reshape(-1, columns)
        row_bytes = self.array.strides[0]
        self._block_rows = _block_rows(row_bytes)
        edges = np.arange(0, len(self.array) + self._block_rows, self._block_rows).clip(max=len(self.array))
        super().__init__(path, array.view("u1"), edges * row_bytes, digests)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if self._num_unchecked:
            blocks = rows // self._block_rows
            for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
                self.require(block)
        values: np.ndarray = self.array[rows]
        return values


def _block_rows(row_bytes: int) -> int:
    return max(1, _BLOCK_BYTES // row_bytes)


def _hash(content: Any = b"") -> Any:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, usedforsecurity=False)


def _mapped(path: Path, kind: str) -> np.ndarray:
    """Return a plain array over the mapping, because indexing an np.memmap is slower."""
    return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.empty(0, kind)
