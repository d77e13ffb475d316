"""What to tell of images of a table that cannot be used: the line, the file, the likely reason and the remedy."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.config.places import is_url
from harness.data.row_order import spread
from harness.data.table.table import Table
from harness.errors import DataError, did_you_mean, first_line

if TYPE_CHECKING:
    from harness.data.image_files import ImageFiles  # it imports torchvision

UNREADABLE = (RuntimeError, OSError)  # raised by torchvision and the file system
_FEW = 20  # images of which nearly all are missing if the root is wrong


class BadImage(DataError):
    """The image of a row of a table cannot be used."""

    row = 0
    missing = ""
    """The file, if there is none."""
    skip = ""
    """The end of the hint, which leaves the row out."""


@dataclass(frozen=True)
class ImageErrors:
    """The errors of the images that ``path_column`` of a table names. ``is_new``: the rows are not trained on."""

    table: Table
    files: ImageFiles
    path_column: str
    is_new: bool

    def unreadable(self, row: int, path: str, error: Exception) -> BadImage:
        """Return the error for an image. It finds the line in the CSV by reading it, which is too slow for skipped
        rows."""
        file = self.files.locate(path)
        if not path.strip():
            what = f"this row has no path in column {self.path_column!r}"
            return self._bad(row, what, "fill it in or remove the row", "; ")
        is_file = self.files.is_file(path)
        if isinstance(error, FileNotFoundError) and not (is_file and os.path.islink(file)):
            in_archive = not is_file and os.strerror(errno.ENOENT) not in str(error) and "archive" in str(error)
            cause = f" ({error.strerror})" if in_archive else ""
            spelling_hint = self._other_spelling(path) if is_file else ""
            wrong_root = self.wrong_root()
            may_be_root = wrong_root or is_url(file)  # which is not asked for other images
            hint = spelling_hint or (self._other_root(path) if may_be_root else "restore it, or remove the row")
            bad = self._bad(row, f"image not found: {file}{cause}", hint, "" if wrong_root else "; ")
            bad.missing = file
            return bad
        if isinstance(error, OSError):
            return self._bad(row, f"image cannot be read: {file}: {error.strerror}", "replace it")
        return self._bad(row, f"image cannot be decoded: {file}: {first_line(error)}", "replace the file")

    def _bad(self, row: int, message: str, hint: str, then: str = ", ") -> BadImage:
        """Return the error with ``hint``, and ``then`` how to skip the row; without ``then``, that is left out."""
        effect = "leave such rows without a prediction" if self.is_new else "count and replace such rows"
        skip = f"{then}or set task.on_bad_row=skip to {effect}" if then else ""
        bad = BadImage(message, where=self.table.where(row), hint=f"{hint}{skip}")
        bad.row, bad.skip = row, skip
        return bad

    def unreadable_first(self, row: int, path: str, error: Exception) -> BadImage:
        """Return ``unreadable`` for the first such image, with the command that finds the others."""
        unreadable = self.unreadable(row, path, error)
        unreadable.hint += "" if self.is_new else "; harness check -c FILE finds the others"
        return unreadable

    def irreplaceable(self, row: int, tried: int, path: str, error: Exception | None) -> DataError:
        """Return the error for ``row``, for which ``tried`` other rows cannot be read either; of the last, ``path`` is
        the image, and ``error`` the reason."""
        hint = "add readable images to the table"
        if error is not None:
            replace_hint = f"replace {self.files.locate(path)} and the others, which are damaged or not images"
            hint = self._other_root(path) if isinstance(error, FileNotFoundError) else replace_hint
        message = f"the image of this row cannot be read, and no readable image replaces it (rows tried: {tried})"
        return DataError(message, where=self.table.where(row), hint=hint)

    def differ(self, row: int, first_size: tuple[int, ...], second_size: tuple[int, ...]) -> DataError:
        return DataError(
            f"images differ in size: {first_size} and {second_size} (height, width)",
            where=self.table.where(row),
            hint="set task.image_size=[height,width], or end task.transforms.train with RandomResizedCrop and "
            "task.transforms.eval with Resize and CenterCrop",
        )

    def with_others(self, first: DataError, others: Sequence[int], limit: int) -> DataError:
        """Return ``first`` with the line and path of up to ``limit`` of the rows ``others``, and the number of the
        rest."""
        also = f"; also {self.row_names(others, limit)}" if limit and others else ""
        first.message += also
        return first

    def row_names(self, rows: Sequence[int], limit: int) -> str:
        """Return the line and path of up to ``limit`` of ``rows``, and the number of the rest."""
        paths = self.table.strings(self.path_column, np.asarray(rows[:limit], np.int64))
        names = [
            f"{self.table.where(row)}: {path.strip() or 'no path'}" for row, path in zip(rows, paths, strict=False)
        ]
        return ", ".join(names) + (f" and {len(rows) - limit} more" if len(rows) > limit else "")

    def wrong_root(self) -> bool:
        """Return True if nearly all images are missing, of a few that are spread over the table."""
        rows = spread(np.arange(len(self.table)), _FEW)
        return sum(map(self.files.exists, self.table.strings(self.path_column, rows))) <= len(rows) // 10

    def _other_spelling(self, path: str) -> str:
        """Return the hint with the name of an image like ``path``, of which .JPG for .jpg is frequent; empty without
        one."""
        slashes = path.replace("\\", "/")
        if slashes != path and self.files.exists(slashes):
            return f"write {slashes}, with / for \\, as in all paths of the table"
        return did_you_mean(self.files.locate(path), os.path.isfile)

    def _other_root(self, path: str) -> str:
        """Return the hint for a file that is not below the root, with a folder in which ``path`` is, if that is
        near."""
        root = self.files.root or "the working folder"
        folder = next((place for place in (self.table.folder, ".") if place and self.files.is_below(place, path)), None)
        setting = f"task.root={folder}" if folder else "task.root=FOLDER"
        return f"paths in the CSV are relative to {root}: set {shlex.quote(setting)}"
