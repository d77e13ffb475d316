"""Checks of the images of tables before training: whether they exist, can be decoded, have one size, and are copies."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from harness.data.image_errors import UNREADABLE
from harness.data.image_folders import looked_at
from harness.data.images import ImageTable
from harness.data.row_order import spread
from harness.data.table.source import require_root
from harness.errors import DataError, plural

_AT_ONCE = 512  # paths that are read at once from the table
_MOST = 20_000  # images of a table that are decoded before training
_THREADS = 8  # that decode a sample
_NAMED = 8  # further missing images in a message
_NAMED_UNREADABLE = 4


@dataclass(frozen=True)
class ImageChecks:
    """The checks of ``images``. Where images may be skipped, none that is missing or damaged is an error."""

    images: ImageTable

    def require_files(self, rows: np.ndarray, limit_s: float) -> None:
        """Raise DataError if the root or, unless images may be skipped, images of ``rows`` do not exist. Looks for at
        most ``limit_s`` seconds: a network disk has thousands of files per second, a local one hundreds of thousands.
        """
        files, errors = self.images.files, self.images.errors
        if not self.images.is_new:  # whose paths may all be absolute
            require_root(files.root)
        if self.images.on_bad_row != "stop":
            return
        missing: list[tuple[int, str]] = []
        looked = 0
        until = time.monotonic() + limit_s
        for part in np.array_split(rows, -(-len(rows) // _AT_ONCE) or 1):
            missing += [(row, path) for row, path in self.images.paths(part) if not self._exists(path)]
            looked += len(part)
            if time.monotonic() > until:
                break
        if missing:
            first = errors.unreadable(*missing[0], FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
            first.message += f" (missing: {len(missing):,} of {plural(looked, 'row')} looked at)"
            raise errors.with_others(first, [row for row, _ in missing[1:]], 0 if errors.wrong_root() else _NAMED)

    def problems(self, limit_s: float) -> Iterator[DataError]:
        """Yield an error for the missing images, and one for the damaged ones of those that are decoded in time."""
        rows = np.arange(len(self.images))
        try:
            self.require_files(rows, limit_s)
        except DataError as error:
            yield error
        try:
            self.sample(in_order(rows, _AT_ONCE), None, limit_s, of_missing=False)
        except DataError as error:
            yield error

    def require_decodable(self, rows: range, ended: Callable[[], bool]) -> None:
        """Raise DataError for the first of ``rows`` whose image cannot be decoded, unless ``ended()`` before."""
        for part in range(rows.start, rows.stop, _AT_ONCE):
            for row, path in self.images.paths(np.arange(part, min(part + _AT_ONCE, rows.stop))):
                if ended():
                    return
                if isinstance(image := self._decoded(row, path), Exception):
                    raise self.images.errors.unreadable_first(row, path, image)

    def sample(self, rows: np.ndarray, epoch: int | None, limit_s: float, of_missing: bool = True) -> str:
        """Decode images of ``rows`` in threads, for at most ``limit_s`` seconds but at least one per thread; return
        their number and sizes, in words. One of each size is transformed as in ``epoch``. Raises DataError that lists
        those that cannot be decoded (if images may be skipped: if none can), or if they then differ in size. Unless
        ``of_missing``, those that ``require_files`` reports are left out."""
        stops, errors = self.images.on_bad_row == "stop", self.images.errors
        sizes: Counter[tuple[int, ...]] = Counter()
        scaled: list[tuple[int, ...]] = []
        bad: list[tuple[int, str, Exception]] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            until, jobs = time.monotonic() + limit_s, iter(self.images.paths(rows))
            while part := list(islice(jobs, _THREADS)):
                images = pool.map(self._decoded, *zip(*part, strict=True))
                for (row, path), image in zip(part, images, strict=True):
                    if isinstance(image, Exception):
                        if of_missing or self._exists(path):
                            bad.append((row, path, image))
                        continue
                    size = tuple(image.shape[1:])
                    sizes[size] += 1
                    if sizes[size] == 1:
                        scaled.append(tuple(self.images.transformed(image, row, epoch).shape[1:]))
                        if scaled[-1] != scaled[0] and not (bad and stops):
                            raise errors.differ(row, scaled[0], scaled[-1])
                if time.monotonic() > until:
                    break
        if bad and (stops or not sizes):
            bad.sort(key=lambda entry: entry[0])
            first = errors.unreadable(*bad[0])
            first.message += f" (unreadable: {len(bad):,} of {plural(len(bad) + sizes.total(), 'image')} looked at)"
            raise errors.with_others(first, [row for row, *_ in bad[1:]], _NAMED_UNREADABLE)
        return self._sampled(sizes, bad)

    def _sampled(self, sizes: Counter[tuple[int, ...]], skipped: list[tuple[int, str, Exception]]) -> str:
        """Return how many images of which ``sizes`` were decoded, and which were ``skipped``, in words."""
        sizes_text = ", ".join(f"{height}x{width}" for height, width in sorted(sizes)[:3])
        of = f", ... in {len(sizes)} sizes" if len(sizes) > 3 else ""
        left_out = "".join(
            f"; skipped {plural(len(rows), f'{state} image')}: {self.images.errors.row_names(rows, _NAMED_UNREADABLE)}"
            for state, is_missing in (("missing", True), ("damaged", False))
            if (rows := sorted(row for row, _, error in skipped if isinstance(error, FileNotFoundError) == is_missing))
        )
        return f"{sizes.total():,} of {len(self.images):,} images decoded ({sizes_text}{of}){left_out}"

    def _decoded(self, row: int, path: str) -> torch.Tensor | Exception:
        try:
            return self.images.decoded(self.images.content(row, path))
        except UNREADABLE as error:
            return error

    def _exists(self, path: str) -> bool:
        return bool(path.strip()) and self.images.files.exists(path)


ImageRow = tuple[ImageTable, int]


class Copy(NamedTuple):
    """A row with the same image as one before it."""

    original: ImageRow
    row: ImageRow
    is_renamed: bool
    """It is a file of its own."""


def copies(tables: Sequence[ImageTable], limit_s: float) -> tuple[list[Copy], int]:
    """Return (the rows whose image an earlier row of ``tables`` has, how many rows were compared). Compares the content
    of local files, for about ``limit_s`` seconds."""
    found, num_rows, row_of = list[Copy](), 0, dict[str, ImageRow]()
    until = time.monotonic() + limit_s

    def new_files() -> Iterator[str]:
        nonlocal num_rows
        for images in tables:
            for rows in np.array_split(np.arange(len(images)), -(-len(images) // _AT_ONCE) or 1):
                if time.monotonic() > until:
                    return
                num_rows += len(rows)
                for row, path in images.paths(rows):
                    if not path.strip() or not images.files.is_file(path):
                        continue
                    file, this = images.files.locate(path), (images, row)
                    if (original := row_of.setdefault(file, this)) is this:
                        yield file
                    else:
                        found.append(Copy(original, this, False))

    for file, _, original in looked_at(Path(), new_files()):
        if original:
            found.append(Copy(row_of[original], row_of[file], True))
    return found, num_rows


def in_order(rows: np.ndarray, first: int) -> np.ndarray:
    """Return ``first`` of ``rows``, evenly spread, and then up to _MOST others in an order that is always the same."""
    start = spread(rows, first)
    others = np.setdiff1d(spread(rows, _MOST), start)
    return np.concatenate([start, np.random.default_rng(0).permutation(others)])
