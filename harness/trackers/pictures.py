"""The picture of a confusion matrix, for trackers that show images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from harness.trackers.base import LabelPairs

_NUMBERED = 20  # classes, up to which cells have numbers
_LETTERS = 14  # of a name that are shown
_SIZE = 20  # of the letters, in pixels: trackers show the picture at about half its size
_TEXT = (31, 36, 48)
_RIGHT, _WRONG = (30, 95, 60), (170, 40, 40)


def confusion(matrix: LabelPairs) -> np.ndarray:
    """Return a picture, uint8 (3, height, width), with a row for each label and a column for each prediction. The
    darker a cell, the larger the share of its label. With few classes, the cells have their counts."""
    font, names = _font(), short_names(matrix.names)
    numbered = len(names) <= _NUMBERED
    cell = 60 if numbered else 24
    longest = int(max(font.getlength(name) for name in names))
    left, top = longest + 16, longest + 44
    picture = Image.new("RGB", (max(left + cell * len(names) + 10, 330), top + cell * len(names) + 10), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((6, 4), "row: label, column: prediction", fill=_TEXT, font=font)
    share = matrix.counts / np.maximum(matrix.counts.sum(axis=1, keepdims=True), 1)
    for (row, column), part in np.ndenumerate(share):
        x, y = left + column * cell, top + row * cell
        color = tuple(round(255 + part * (dark - 255)) for dark in (_RIGHT if row == column else _WRONG))
        draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=color, outline=(225, 228, 235))
        if numbered and (count := int(matrix.counts[row, column])):
            fill = "white" if part > 0.5 else _TEXT
            draw.text((x + cell / 2 - 1, y + cell / 2 - 1), str(count), fill=fill, font=font, anchor="mm")
    for place, name in enumerate(names):
        middle = place * cell + cell // 2
        draw.text((left - 8, top + middle), name, fill=_TEXT, font=font, anchor="rm")
        upwards = _line(name, font).rotate(90, expand=True)
        picture.paste(upwards, (left + middle - upwards.width // 2, top - 8 - upwards.height))
    return np.moveaxis(np.asarray(picture), -1, 0).copy()


def _font() -> Any:
    try:
        return ImageFont.load_default(size=_SIZE)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()


def short_names(names: Sequence[str]) -> list[str]:
    """Return what is shown of each name: its first letters, with the number of its class where others have the same."""
    cut = [name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}~" for name in names]
    short = [name.encode("ascii", "replace").decode() for name in cut]  # the font has no others
    return [f"{name} {number}" if short.count(name) > 1 else name for number, name in enumerate(short)]


def _line(text: str, font: Any) -> Image.Image:
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
    line = Image.new("RGB", (max(1, right - left), max(1, bottom - top)), "white")
    ImageDraw.Draw(line).text((-left, -top), text, fill=_TEXT, font=font)
    return line
