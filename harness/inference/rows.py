"""The rows that a caller of the Python API gives: the name of a file, a table of pandas, images, or a list."""

from __future__ import annotations

import csv
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.places import IMAGE_SUFFIXES, is_url
from harness.config.targets import image_column
from harness.data.image_errors import BadImage
from harness.data.image_folders import SUFFIXES, images_at
from harness.errors import ConfigError, DataError, HarnessError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from PIL import Image

    from harness.config.schema import TaskSection

    Picture = str | os.PathLike[str] | Image.Image | np.ndarray
    Rows = Picture | pd.DataFrame | list[Picture] | tuple[str, ...] | list[tuple[str, ...]] | list[Mapping[str, object]]

log = logging.getLogger("harness")
_IMAGES = "a path that ends like an image, an image of PIL, or an array of uint8 of shape (height, width, 3)"
_OTHER_IMAGES = (".heic", ".avif")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")


@contextmanager
def as_file(rows: Rows, columns: Sequence[str] = (), of_images: bool = False) -> Iterator[tuple[str, str | None]]:
    """Context with (a file of ``rows``, the cache folder for it if it is temporary).

    ``columns``: what the model reads, if it is known; texts in a list are values of the only one, tuples in it of all.
    An error in a table names its rows. ``of_images``: images of PIL and arrays, too, are written to files.
    """
    if isinstance(rows, str | os.PathLike) and not os.fspath(rows).lower().endswith(IMAGE_SUFFIXES):
        if os.fspath(rows).lower().endswith(_OTHER_IMAGES):
            raise DataError("this kind of image cannot be read", where=os.fspath(rows), hint=SUFFIXES)
        if columns and isinstance(rows, str) and not may_be_table(rows):
            raise _no_rows(f"there is no file {rows!r}", columns)
        yield os.fspath(rows), None
        return
    is_one = isinstance(rows, str | os.PathLike) or (
        of_images and not (isinstance(rows, list) or hasattr(rows, "to_csv"))
    )
    given: Any = [rows] if is_one else rows
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        if of_images and isinstance(given, list) and not any(isinstance(row, Mapping) for row in given):
            given = [_saved(image, Path(folder, f"{place}.png")) for place, image in enumerate(given)]
        table = _as_frame(given, columns)
        file = str(Path(folder, "rows.csv"))
        table.to_csv(file, index=False, quoting=csv.QUOTE_ALL)  # pandas alone does not quote a carriage return
        try:
            with without_temporary({re.escape(file): "the table"}, folder):
                yield file, folder
        except HarnessError as error:
            error.message, error.where = (_of_table(text, file) for text in (error.message, error.where))
            if of_images and isinstance(error, BadImage):
                error.hint = error.hint.removesuffix(error.skip)  # all rows are needed
                if given is not rows:
                    _name_image(error, given)
            raise


def images_of(task: TaskSection, places: Sequence[str], where: str, skipped: Counter[str]) -> tuple[str, list[str]]:
    """Return (the column of ``task`` with the paths of images, ``images_at(places, skipped)``). Raises DataError, and
    ConfigError, with ``where``, if the task reads no images."""
    column = image_column(task)
    if not column:
        columns = getattr(task, "input_columns", {})
        what = f"the task {task.name} has no column of paths of images"
        raise ConfigError(what, where=where, hint=f"give a CSV with {' and '.join(columns) or 'its rows'}: --csv CSV")
    return column, images_at(places, skipped)


def _name_image(error: BadImage, images: Sequence[Any]) -> None:
    """Let ``error`` name one of ``images``, not a row of the table that they were written to."""
    if error.missing not in ("", typed := str(images[error.row])):
        error.message += f", nor {typed} in the working folder"
    near = did_you_mean(error.missing, os.path.isfile) if error.missing else ""
    hint = f"give {_IMAGES}; paths are relative to the working folder or task.root"
    error.where, error.hint = f"image {error.row}", f"{near} {hint}".strip()


@contextmanager
def images_as_file(names: Sequence[str], column: str) -> Iterator[tuple[str, str]]:
    """Context with (a table that has ``names`` in its ``column``, the cache folder for it).

    Errors and the log name images, but no line of it.
    """
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        file = str(Path(folder, "images.csv"))
        with open(file, "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([[column], *([name] for name in names)])
        shown = {rf"{re.escape(file)}:\d+: ": "", rf"{re.escape(file)}(:\d+)?": "--images"}
        try:
            with without_temporary(shown, folder):
                yield file, folder
        except HarnessError as error:
            error.message, error.where = (_renamed(text, shown) for text in (error.message, error.where))
            raise


def _saved(image: Any, file: Path) -> str:
    """Return the path of ``image``, which is one or else is written to ``file``. Raises DataError."""
    from PIL import Image, ImageOps

    if isinstance(image, str | os.PathLike):
        return os.fspath(image)
    if hasattr(image, "dtype") and str(image.dtype) == "uint8" and image.ndim == 3 and image.shape[2] == 3:
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        shape = f" of {image.dtype}, {tuple(image.shape)}" if hasattr(image, "dtype") else ""
        raise DataError(f"not an image: {type(image).__name__}{shape}", hint=f"give {_IMAGES}, or a list of them")
    if image.mode not in _MODES:
        hint = 'give its path, or image.convert("RGB"), which cuts values above 255'
        raise DataError(f"an image of mode {image.mode} is not one of 8 bits: {', '.join(_MODES)}", hint=hint)
    image = ImageOps.exif_transpose(image)
    image.convert("RGB" if image.mode not in ("L", "RGBA") else image.mode).save(file, compress_level=1)
    return str(file)


def _as_frame(rows: pd.DataFrame | list[Any], columns: Sequence[str]) -> pd.DataFrame:
    """Return ``rows`` as a table. Raises DataError if they cannot be one."""
    if isinstance(rows, list) and rows:
        import pandas as pd

        if all(isinstance(row, Mapping) for row in rows):
            return pd.DataFrame(list(rows))
        if len(columns) == 1 and all(isinstance(row, str | os.PathLike) for row in rows):
            return pd.DataFrame({columns[0]: [_from_here(str(row)) for row in rows]})
        if len(columns) > 1 and all(isinstance(row, tuple | list) and len(row) == len(columns) for row in rows):
            return pd.DataFrame(rows, columns=list(columns))
    if isinstance(rows, list) or not hasattr(rows, "to_csv"):
        of = f" of {type(rows[0]).__name__}" if isinstance(rows, list) and rows else ""
        raise _no_rows(f"rows are a {type(rows).__name__}{of}", columns)
    return rows


def may_be_table(name: str) -> bool:
    """Return whether ``name`` is a path that is there, a URL, or ends like a table."""
    return os.path.exists(name) or is_url(name) or name.lower().endswith((".csv", ".csv.gz", ".parquet"))


def _no_rows(what: str, columns: Sequence[str]) -> DataError:
    shown = ", ".join(f'"{column}": ...' for column in columns or ("COLUMN",))
    one = f", a list of values of {columns[0]}" if len(columns) == 1 else ""
    one = f", a list of tuples ({', '.join(columns)})" if len(columns) > 1 else one
    return DataError(what, hint=f"use a file, a table of pandas{one}, or a list of dictionaries: [{{{shown}}}]")


def _from_here(value: str) -> str:
    """Return the full path of an image that is there from the working folder; anything else as it is."""
    is_image = value.lower().endswith(IMAGE_SUFFIXES) and os.path.isfile(value)
    return os.path.abspath(value) if is_image else value


@contextmanager
def without_temporary(names: Mapping[str, str], folder: str) -> Iterator[None]:
    """Context in which the log has ``names``, by pattern, in place of temporary files, and no line on others of their
    ``folder``."""

    def rename(record: logging.LogRecord) -> bool:
        text = _renamed(record.getMessage(), names)
        record.msg, record.args = text, ()
        return folder not in text or record.levelno > logging.INFO

    log.addFilter(rename)
    try:
        yield
    finally:
        log.removeFilter(rename)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for pattern, name in names.items():
        text = re.sub(pattern, name, text)
    return text


def _of_table(text: str, file: str) -> str:
    """Return ``text`` with places in ``file`` as rows of the table that it was written from: "rows.csv:2" is row 0."""

    def row(place: re.Match[str]) -> str:
        with open(file, encoding="utf-8", newline="") as stream:
            rows = csv.reader(stream)  # of which one may have several lines
            number = next((number for number, _ in enumerate(rows, -1) if rows.line_num >= int(place[1])), 0)
        return f"row {number} of the table" if number >= 0 else "the table"  # whose columns are on the first line

    return re.sub(rf"{re.escape(file)}:(\d+)", row, text).replace(file, "the table")
