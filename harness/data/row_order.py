"""Orders of rows, and random permutations, that are computed by position and take no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import DTypeLike

_CHUNK = 1 << 17  # rows that are computed at once: 1 MiB, 20 ms
_SMALL = 1 << 12  # rows up to which a permutation is a table: 32 KiB
_ROUNDS = 8  # of the Feistel network; 4 suffice for random functions (Luby and Rackoff 1988), a hash gets twice as many
_WORD = np.uint64(64)


class RowOrder:
    """Row numbers in an order, computed in chunks. ``rows[start:stop]`` and ``numpy.asarray(rows)`` are int64.

    Orders are composed: ``at`` of one calls ``at`` of the order that it selects from.
    """

    def __init__(self, length: int, at: Callable[[np.ndarray], np.ndarray]) -> None:
        """``at`` maps positions, int64 and in range(length), to row numbers."""
        self._length, self.at = length, at
        self._chunk = lru_cache(2)(self._compute)  # a loader is a few batches ahead of training

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, stride = part.indices(self._length)
        assert stride == 1
        first, last = start // _CHUNK, (stop - 1) // _CHUNK
        if first == last:
            return self._chunk(first)[start - first * _CHUNK : stop - first * _CHUNK].copy()
        return self.at(np.arange(start, stop))

    def __iter__(self) -> Iterator[int]:
        """Yield the row numbers, as a sampler of torch's DataLoader does."""
        for start in range(0, self._length, _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.int64)

    def _compute(self, index: int) -> np.ndarray:
        return self.at(np.arange(index * _CHUNK, min((index + 1) * _CHUNK, self._length)))


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` of ``rows``, evenly spread, or all of them."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]


def permutation(num: int, key: tuple[int, ...], small: int = _SMALL) -> Callable[[np.ndarray], np.ndarray]:
    """Return a random permutation of range(num) that ``key`` determines: a function from positions to values, both
    int64.

    Up to ``small`` elements it is a table. Above, it takes no memory: an alternating Feistel network permutes all
    numbers of as many bits, and is applied again where it leaves the range (cycle walking; Black and Rogaway 2002).
    """
    generator = np.random.default_rng(key)
    if num <= small:
        table = generator.permutation(num)
        return lambda index: table[index]
    keys = generator.integers(1 << 64, size=_ROUNDS, dtype=np.uint64)
    bits = max((num - 1).bit_length(), 2)
    low, high = np.uint64(bits - bits // 2), np.uint64(bits // 2)  # bits of the two halves
    mask, end = np.uint64((1 << int(low)) - 1), np.uint64(num)

    def network(value: np.ndarray) -> np.ndarray:
        left, right = value >> low, value & mask
        for step in range(0, _ROUNDS, 2):
            left ^= hashed(right, keys[step]) >> (_WORD - high)
            right ^= hashed(left, keys[step + 1]) >> (_WORD - low)
        return left << low | right

    def at(index: np.ndarray) -> np.ndarray:
        value = network(index.astype(np.uint64))
        while (outside := value >= end).any():
            value[outside] = network(value[outside])
        return value.astype(np.int64)

    return at


def hashed(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a hash of ``value`` and ``key`` whose upper bits depend on all bits: the finalizer of SplitMix64 (Steele,
    Lea and Flood 2014)."""
    value = value + key
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
