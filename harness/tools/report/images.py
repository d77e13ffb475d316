"""Images of validation rows, for a page.

They are searched under ``task.root``, from the working folder and from the folders above the run; predicted ones in
the run folder. Images that cannot be found or read, or are outside of that folder, are left out: predictions.csv may
have been written by someone else.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from harness.runs import layout
from harness.tools.report.run_set import ReportedRun

_PIXELS = 96  # longer side of an image on the page
_PREDICTED_ROWS = 12
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
_PUBLISHED = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def image_finder(run: ReportedRun) -> Callable[[str], str]:
    """Return a function from a row's id to its image as a data URI, empty if there is none."""
    task = str(run.settings.get("task.name", ""))
    root = str(run.settings.get("task.root") or "")
    if task in _PUBLISHED:
        rows = _published(run, Path(root) / _PUBLISHED[task] / "raw" / "t10k-images-idx3-ubyte")
        if rows is None:
            return lambda name: ""
        return lambda name: _uri(Image.fromarray(rows[int(name)])) if _is_below(name, len(rows)) else ""

    def find(name: str) -> str:
        if Path(name).suffix.lower() not in Image.registered_extensions():
            return ""
        for folder in _places(run):
            try:
                if (path := _inside(folder / root, name)) is None:
                    continue
                with Image.open(path) as image:
                    image.draft("RGB", (_PIXELS, _PIXELS))
                    return _uri(ImageOps.exif_transpose(image))
            except _UNREADABLE:
                continue
        return ""

    return find


def predicted(run: ReportedRun, table: pa.Table, find: Callable[[str], str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (id, [(column, image as a data URI)]) of rows spread over ``table``, the run's predictions.csv, for its
    columns of PNG files, after the input as ``find`` finds it."""
    columns = [name for name in table.column_names if _names_images(table[name])]
    rows = table.filter(table[columns[0]].is_valid()) if columns else table.slice(0, 0)
    spread = np.linspace(0, len(rows) - 1, min(_PREDICTED_ROWS, len(rows))).astype(np.int64)
    shown = rows.take(pa.array(spread)).to_pylist()
    images = [(column, _alike(run.record.path, [row[column] for row in shown])) for column in columns]
    found = []
    for place, row in enumerate(shown):
        if of_row := [(column, uris[place]) for column, uris in images if uris[place]]:
            name = str(row.get("id", ""))
            found.append((name, [*([("input", uri)] if (uri := find(name)) else []), *of_row]))
    return found


def _names_images(column: pa.ChunkedArray) -> bool:
    first = column.drop_null().slice(0, 1).to_pylist() if pa.types.is_string(column.type) else ()
    return any(name.startswith(f"{layout.PREDICTED}/") and name.endswith(".png") for name in first)


def _alike(folder: Path, names: list[str | None]) -> list[str]:
    """Return the PNG files ``names`` in ``folder`` as data URIs, empty for one that is not there. Numbers of classes
    are nearly black: grey images are brightened, all by the same factor."""
    images = [_opened(folder, name) for name in names]
    brightest = [int(np.asarray(image).max()) for image in images if image and image.mode == "L"]
    factor = 255 // (max(brightest, default=0) or 255)
    return [
        "" if image is None else _uri(image.point(lambda value: value * factor) if image.mode == "L" else image)
        for image in images
    ]


def _opened(folder: Path, name: str | None) -> Image.Image | None:
    try:
        if name and (path := _inside(folder, name)):
            with Image.open(path, formats=["PNG"]) as image:
                image.load()
                return image
    except _UNREADABLE:
        pass
    return None


def _inside(folder: Path, name: str) -> Path | None:
    """Return the file ``name`` in ``folder``; None if it is outside, even through a link, or not a regular file (such
    as a pipe)."""
    root, path = folder.resolve(), (folder / name).resolve()
    inside = ".." not in Path(name).parts and root != Path(root.anchor) and path.is_relative_to(root)
    return path if inside and path.is_file() else None


def _is_below(name: str, num_rows: int) -> bool:
    return name.isdecimal() and int(name) < num_rows


def _places(run: ReportedRun) -> Iterator[Path]:
    """Folders that relative paths may start from: the working folder, and the folders above the run."""
    yield Path()
    yield from run.record.path.resolve().parents[:4]


def _published(run: ReportedRun, path: Path) -> np.ndarray | None:
    """Memory-mapped images of an IDX file, (rows, height, width); None if it is missing or incomplete."""
    for folder in _places(run):
        try:
            if not (folder / path).is_file():
                continue
            header = np.fromfile(folder / path, dtype=">u4", count=4)
            shape = tuple(int(number) for number in header[1:])
            if len(header) == 4 and (folder / path).stat().st_size == 16 + math.prod(shape):
                return np.memmap(folder / path, dtype=np.uint8, mode="r", offset=16, shape=shape)
        except (OSError, ValueError):
            continue
    return None


def _uri(image: Any) -> str:
    """Return a small PNG as a data URI."""
    small = image.convert("L" if image.mode in ("1", "L", "I;16", "I") else "RGB")
    small.thumbnail((_PIXELS, _PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
