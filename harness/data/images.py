"""The dataset of images that an annotation table names: read, decoded and transformed, in batches.

The augmentation of a row depends on (seed, epoch, row), not on the worker, the rank or the order, so a resumed run gets
the same pixels. uint8 images are normalized on the device, per batch.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch

from harness.config.places import is_url
from harness.data import reduced_jpeg, vision
from harness.data.batch import Batch, StageClock
from harness.data.image_files import ImageFiles
from harness.data.row_labels import RowLabels
from harness.data.row_order import spread
from harness.data.seeds import EVALUATION_SEED, row_seed, seeded_torch
from harness.data.table.source import require_root
from harness.data.table.table import Table
from harness.data.transforms import Pipeline
from harness.errors import ConfigError, DataError, did_you_mean, first_line, plural

NUM_TRIES = 100  # rows tried as a replacement for an unreadable one
_CHUNK_ROWS = 1 << 16  # paths in memory at once, as a view of the table
_AT_ONCE = 512  # paths that are read at once from the table
_MOST = 20_000  # images of a table that are decoded before training
_FEW = 20  # images of which nearly all are missing if the root is wrong
_THREADS = 8  # that decode a sample
_NAMED = 8  # further missing images in a message
_NAMED_UNREADABLE = 4
_UNREADABLE = (RuntimeError, OSError)  # raised by torchvision and the file system


Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class ImageTable:
    """The images and labels of a table, as a dataset."""

    table: Table
    files: ImageFiles
    """Where the images are."""
    path_column: str
    labels: RowLabels
    seed: int
    channels: int
    """vision.RGB or vision.GRAY, to which images are converted."""
    for_training: Transform
    """Applied to each image, uint8 (channels, height, width) -> the same kind, or float32."""
    for_evaluation: Transform
    """The same, in evaluations."""
    on_bad_row: str = "stop"
    """ "stop", or "skip" to replace an unreadable image by the next readable row (omit it in evaluation)."""
    is_new: bool = False
    """True for rows to predict, which have not been trained on."""
    reduced: bool = False
    """True to decode JPEGs at a reduced size where the transforms scale them down; these are then Pipelines."""
    channels_last: bool = False
    """True to deliver batches in this memory format."""

    def __len__(self) -> int:
        return self.table.num_rows

    def row_name(self, row: int) -> str:
        """Return the place of ``row``, with its path."""
        return f"{self.table.where(row, quickly=True)}: {self.table.strings(self.path_column, np.array([row]))[0]}"

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return these rows in order, transformed as in training in ``epoch``, or as in evaluation if that is None.
        Raises DataError or, from a transform, ConfigError."""
        images, used, bad, clock = [], [], [], StageClock()
        paths = self.table.strings(self.path_column, rows)
        self.files.read_ahead(paths)
        for row, path in zip(rows.tolist(), paths, strict=True):
            clock.start()
            try:
                image, transform = self._loaded(row, path, epoch, clock)
            except _UNREADABLE as error:
                if self.on_bad_row == "stop":
                    found = self._unreadable(row, path, error)
                    found.hint += "" if self.is_new else "; harness check -c FILE finds the others"
                    raise found from None
                bad.append(row)
                if epoch is None:
                    continue
                row, image, transform = self._replacement(row, epoch)
            clock.start()
            images.append(transform(image))
            clock.end("transform")
            used.append(row)
        numbers = np.asarray(used, dtype=np.int64)
        targets = torch.from_numpy(self.labels.targets(numbers))
        return Batch(self._stack(images, used), targets, numbers, bad, clock.spent_s)

    def require_files(self, rows: np.ndarray, limit_s: float) -> None:
        """Raise DataError if the root or, unless images may be skipped, images of ``rows`` do not exist. Looks for at
        most ``limit_s`` seconds: a network disk has thousands of files per second, a local one hundreds of thousands.
        """
        require_root(self.files.root)
        if self.on_bad_row != "stop":
            return
        missing: list[tuple[int, str]] = []
        looked = 0
        until = time.monotonic() + limit_s
        for part in np.array_split(rows, -(-len(rows) // _AT_ONCE) or 1):
            for row, path in zip(part.tolist(), self.table.strings(self.path_column, part), strict=True):
                if not (path.strip() and self.files.exists(path)):
                    missing.append((row, path))
            looked += len(part)
            if time.monotonic() > until:
                break
        if not missing:
            return
        first = self._unreadable(*missing[0], FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        first.message += f" (missing: {len(missing):,} of {plural(looked, 'row')} looked at)"
        raise self._with_others(first, missing[1:], 0 if self._wrong_root() else _NAMED)

    def problems(self, limit_s: float) -> Iterator[DataError]:
        """Yield an error for the missing images, and one for the damaged ones of those that are decoded in time."""
        try:
            self.require_files(np.arange(len(self)), limit_s)
        except DataError as error:
            yield error
        try:
            self.sample(in_order(np.arange(len(self)), _AT_ONCE), None, limit_s, of_missing=False)
        except DataError as error:
            yield error

    def require_decodable(self, rows: range, ended: Callable[[], bool]) -> None:
        """Raise DataError for the first of ``rows`` whose image cannot be decoded, unless ``ended()`` before."""
        for part in range(rows.start, rows.stop, _AT_ONCE):
            numbers = np.arange(part, min(part + _AT_ONCE, rows.stop))
            for row, path in zip(numbers.tolist(), self.table.strings(self.path_column, numbers), strict=True):
                if ended():
                    return
                try:
                    self._decoded(self._content(row, path))
                except _UNREADABLE as error:
                    found = self._unreadable(row, path, error)
                    found.hint += "; harness check -c FILE finds the others"
                    raise found from None

    def archives(self, start: int, stop: int) -> set[str]:
        """Return the archives behind URLs that rows in [start, stop) name; none if the first row's path is on this
        machine."""
        if start >= stop or not is_url(self.files.place(self.table.strings(self.path_column, np.array([start]))[0])):
            return set()  # without reading the whole table
        edges = range(start, stop, _CHUNK_ROWS)
        parts = (self.table.slice(self.path_column, edge, min(edge + _CHUNK_ROWS, stop)) for edge in edges)
        return set().union(*map(self.files.archives, parts))

    def _with_others(self, first: DataError, others: Sequence[tuple[int, str]], limit: int) -> DataError:
        """Return ``first`` with the line and path of up to ``limit`` other rows, and the number of the rest."""
        also = f"; also {self.named([row for row, _ in others], limit)}" if limit and others else ""
        return DataError(f"{first.message}{also}", where=first.where, hint=first.hint)

    def named(self, rows: Sequence[int], limit: int) -> str:
        """Return the line and path of up to ``limit`` of ``rows``, and the number of the rest."""
        paths = self.table.strings(self.path_column, np.asarray(rows[:limit], np.int64))
        names = [
            f"{self.table.where(row)}: {path.strip() or 'no path'}" for row, path in zip(rows, paths, strict=False)
        ]
        return ", ".join(names) + (f" and {len(rows) - limit} more" if len(rows) > limit else "")

    def sample(self, rows: np.ndarray, epoch: int | None, limit_s: float, of_missing: bool = True) -> str:
        """Decode images of ``rows`` in threads, for at most ``limit_s`` seconds but at least one per thread; return
        their number and sizes, in words. One of each size is transformed as in ``epoch``. Raises DataError that lists
        those that cannot be decoded (if images may be skipped: if none can), or if they then differ in size. Unless
        ``of_missing``, those that ``require_files`` reports are left out."""
        paths = self.table.strings(self.path_column, rows)
        sizes: Counter[tuple[int, ...]] = Counter()
        scaled: list[tuple[int, ...]] = []
        bad: list[tuple[int, str, Exception]] = []

        def decode(row: int, path: str) -> torch.Tensor | Exception:
            try:
                return self._decoded(self._content(row, path))
            except _UNREADABLE as error:
                return error

        with ThreadPoolExecutor(_THREADS) as pool:
            until, jobs = time.monotonic() + limit_s, zip(rows.tolist(), paths, strict=True)
            while part := list(islice(jobs, _THREADS)):
                for (row, path), image in zip(part, pool.map(decode, *zip(*part, strict=True)), strict=True):
                    if isinstance(image, Exception):
                        if of_missing or (path.strip() and self.files.exists(path)):
                            bad.append((row, path, image))
                        continue
                    sizes[tuple(image.shape[1:])] += 1
                    if sizes[tuple(image.shape[1:])] == 1:
                        scaled.append(tuple(self._transformed(image, row, epoch).shape[1:]))
                        if scaled[-1] != scaled[0] and not (bad and self.on_bad_row == "stop"):
                            raise self._differ(row, scaled[0], scaled[-1])
                if time.monotonic() > until:
                    break
        if bad and (self.on_bad_row == "stop" or not sizes):
            bad.sort(key=lambda one: one[0])
            first = self._unreadable(*bad[0])
            first.message += f" ({len(bad):,} of {plural(len(bad) + sizes.total(), 'image')} looked at)"
            raise self._with_others(first, [(row, path) for row, path, _ in bad[1:]], _NAMED_UNREADABLE)
        found = ", ".join(f"{height}x{width}" for height, width in sorted(sizes)[:3])
        of = f" in {len(sizes)} sizes" if len(sizes) > 3 else ""
        skipped = "".join(
            f"; skipped {plural(len(some), f'{what} image')}: {self.named(some, _NAMED_UNREADABLE)}"
            for what, is_missing in (("missing", True), ("damaged", False))
            if (some := sorted(row for row, _, error in bad if isinstance(error, FileNotFoundError) == is_missing))
        )
        return f"{sum(sizes.values()):,} of {len(self):,} images decoded ({found}{', ...' if of else ''}{of}){skipped}"

    def _loaded(self, row: int, path: str, epoch: int | None, clock: StageClock) -> tuple[torch.Tensor, Transform]:
        """Return the image, uint8 (channels, height, width), and what is left to do with it. Raises as ``_content``,
        and RuntimeError for an image that cannot be decoded."""
        content = self._content(row, path)
        clock.end("read")
        try:
            if self.reduced and (found := self._reduced(content, row, epoch)):
                return found
            return self._decoded(content), partial(self._transformed, row=row, epoch=epoch)
        finally:
            clock.end("decode")

    def _content(self, row: int, path: str) -> torch.Tensor:
        """Return the bytes of ``path``. Raises one of _UNREADABLE, or DataError if the archive or the server of the
        file cannot be read."""
        try:
            return self.files.read(path)
        except DataError as error:
            what = f"{error.where}: {error.message}" if error.where else error.message
            raise DataError(what, where=self.table.where(row), hint=error.hint) from None

    def _decoded(self, content: torch.Tensor) -> torch.Tensor:
        return _converted(vision.decode(content, self.channels), self.channels)

    def _reduced(self, content: torch.Tensor, row: int, epoch: int | None) -> tuple[torch.Tensor, Transform] | None:
        """Return ``_loaded`` of a JPEG whose first transform scales it down by 2 or more; None for other images."""
        pipeline = self.for_evaluation if epoch is None else self.for_training
        assert isinstance(pipeline, Pipeline)
        file = reduced_jpeg.open_jpeg(content) if pipeline.scales_first else None
        if file is None:
            return None
        with self._seeded(row, epoch):
            region = pipeline.region(file.height, file.width)
            state = torch.get_rng_state()
        if region.factor == 1:
            return None
        image = reduced_jpeg.decode_region(file, region, self.channels)

        def rest(image: torch.Tensor) -> torch.Tensor:
            with seeded_torch(state):
                return pipeline.after_region(image)

        return None if image is None else (image, rest)

    def _transformed(self, image: torch.Tensor, row: int, epoch: int | None) -> torch.Tensor:
        if epoch is None:
            return self.for_evaluation(image)
        with self._seeded(row, epoch):
            return self.for_training(image)

    def _seeded(self, row: int, epoch: int | None) -> AbstractContextManager[None]:
        return seeded_torch(EVALUATION_SEED if epoch is None else row_seed(self.seed, epoch, row))

    def _replacement(self, row: int, epoch: int | None) -> tuple[int, torch.Tensor, Transform]:
        """Return the next readable row after ``row``, cyclically, and what ``_loaded`` returns for it, so the batch
        keeps its size."""
        tried, why = min(NUM_TRIES, len(self) - 1), ""
        for candidate in range(row + 1, row + 1 + tried):
            number = candidate % len(self)
            path = self.table.strings(self.path_column, np.asarray([number]))[0]
            try:
                return number, *self._loaded(number, path, epoch, StageClock())
            except FileNotFoundError:
                why = self._other_root(path)
            except _UNREADABLE:
                why = f"replace {self.files.place(path)} and the others, which are damaged or not images"
        raise DataError(
            f"the image of this row cannot be read, and no readable image replaces it (rows tried: {tried})",
            where=self.table.where(row),
            hint=why or "add readable images to the table",
        )

    def _unreadable(self, row: int, path: str, error: Exception) -> DataError:
        """Return the error for an image. It finds the line in the CSV by reading it, which is too slow for skipped
        rows."""
        file, where = self.files.place(path), self.table.where(row)
        if not path.strip():
            hint = f"fill it in or remove the row; {self._skip}"
            return DataError(f"this row has no path in column {self.path_column!r}", where=where, hint=hint)
        is_file = self.files.is_file(path)
        if isinstance(error, FileNotFoundError) and not (is_file and os.path.islink(file)):
            in_archive = not is_file and os.strerror(errno.ENOENT) not in str(error) and "archive" in str(error)
            what = f" ({error.strerror})" if in_archive else ""
            near = did_you_mean(file) if is_file else ""  # a frequent reason is .JPG instead of .jpg
            wrong_root = self._wrong_root()
            may_be_root = wrong_root or is_url(file)  # which is not asked for other images
            hints = [near or (self._other_root(path) if may_be_root else "restore it, or remove the row")]
            hint = "; ".join(hints if wrong_root else [*hints, self._skip])
            return DataError(f"image not found: {file}{what}", where=where, hint=hint)
        if isinstance(error, OSError):
            return DataError(
                f"image cannot be read: {file}: {error.strerror}", where=where, hint=f"replace it, {self._skip}"
            )
        return DataError(
            f"image cannot be decoded: {file}: {first_line(error)}",
            where=where,
            hint=f"replace the file, {self._skip}",
        )

    @property
    def _skip(self) -> str:
        """The hint that leaves unreadable rows out."""
        what = "leave such rows without a prediction" if self.is_new else "count and replace such rows"
        return f"or set task.on_bad_row=skip to {what}"

    def _wrong_root(self) -> bool:
        """Return True if nearly all images are missing, of a few that are spread over the table."""
        rows = spread(np.arange(len(self)), _FEW)
        return sum(map(self.files.exists, self.table.strings(self.path_column, rows))) <= len(rows) // 10

    def _other_root(self, path: str) -> str:
        """Return the hint for a file that is not below the root, with a folder in which ``path`` is, if that is
        near."""
        root = self.files.root or "the working folder"
        folder = next((place for place in (self.table.folder, ".") if place and self.files.is_below(place, path)), None)
        found = f"task.root={folder}" if folder else "task.root=FOLDER"
        return f"paths in the CSV are relative to {root}: set {shlex.quote(found)}"

    def _stack(self, images: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
        """Return the images of ``rows`` as a batch. Raises DataError if they differ in size, ConfigError in type."""
        if not images:
            return torch.empty(0, dtype=torch.uint8)
        shape, kind = images[0].shape, images[0].dtype
        for row, image in zip(rows, images, strict=True):
            if image.dtype != kind:
                raise ConfigError(
                    f"the transforms return {image.dtype} for {self.table.where(row)}, but {kind} for other images",
                    where="task.transforms",
                    hint="return the same type for each",
                )
            if image.shape != shape:
                raise self._differ(row, tuple(shape[1:]), tuple(image.shape[1:]))
        if self.channels_last:
            return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        return torch.stack(images)

    def _differ(self, row: int, size: tuple[int, ...], other: tuple[int, ...]) -> DataError:
        return DataError(
            f"images differ in size: {size} and {other} (height, width)",
            where=self.table.where(row),
            hint="set task.image_size=[height,width], or end task.transforms.train with RandomResizedCrop and "
            "task.transforms.eval with Resize and CenterCrop",
        )


def in_order(rows: np.ndarray, first: int) -> np.ndarray:
    """Return ``first`` of ``rows``, evenly spread, and then up to _MOST others in an order that is always the same."""
    start = spread(rows, first)
    rest = np.setdiff1d(spread(rows, _MOST), start)
    return np.concatenate([start, np.random.default_rng(0).permutation(rest)])


def _converted(image: torch.Tensor, channels: int) -> torch.Tensor:
    """Convert to uint8 with ``channels``, which torchvision ignores for 16-bit PNG, WebP and GIF."""
    if image.dim() != 3:
        raise RuntimeError(f"an animation of {len(image)} frames, not one image")
    if len(image) in (2, 4):  # the last channel is opacity
        image = image[:-1]
    to_gray = channels == vision.GRAY and len(image) == vision.RGB
    if image.dtype == torch.uint8 and not to_gray:
        return image
    functional = vision.torchvision("transforms.v2.functional")
    image = functional.to_dtype(image, torch.uint8, scale=True)
    return functional.rgb_to_grayscale(image) if to_gray else image
