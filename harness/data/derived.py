"""Small datasets for several labels per row, for numbers and for texts, made from what is on every machine.

digit_canvases and rotated_digits are made from the digits of scikit-learn (``harness.data.digits``): training images
from its training rows, validation images from its validation rows. character_names is the Unicode 3.2 character
database, which is part of every Python (https://www.unicode.org/Public/3.2-Update/, Unicode License). All draws have a
fixed seed, so everyone gets the same data.
"""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd

from harness.data import digits

CANVAS = 24  # pixels
MAX_ANGLE = 60.0  # degrees
_ROWS = {"train": 3000, "eval": 600}
_EVAL_SHARE = 8  # one in this many names is for validation


def digit_canvases(folder: Path) -> str:
    """Canvases of 24x24 pixels with one to four digits, each in a quarter of its own, at a random place; ``tags`` are
    the digits on it, such as 2|7. Returns a sentence to print, as the others do."""
    return digits.write_whole(folder, "the canvases", _canvases)


def rotated_digits(folder: Path) -> str:
    """Digits of 16x16 pixels, rotated by up to 60 degrees; ``angle`` is the angle, counterclockwise."""
    return digits.write_whole(folder, "the rotated digits", _rotated)


def character_names(folder: Path) -> str:
    """The names of characters, such as GREEK SMALL LETTER ALPHA, with their general category, such as Ll."""
    return digits.write_whole(folder, "the names", _names)


def _canvases(folder: Path) -> tuple[int, int]:
    images, *splits = digits.load()
    generator = np.random.default_rng(0)
    for (split, rows), source in zip(_ROWS.items(), splits, strict=True):
        lines = []
        for row in range(rows):
            chosen = source.iloc[generator.choice(len(source), generator.integers(1, 5), replace=False)]
            canvas, half = np.zeros((CANVAS, CANVAS), np.uint8), CANVAS // 2
            for quarter, index in zip(generator.permutation(4).tolist(), chosen.index, strict=False):
                top, left = np.asarray(divmod(quarter, 2)) * half + generator.integers(0, half - 8 + 1, 2)
                canvas[top : top + 8, left : left + 8] = images[index]
            tags = "|".join(str(label) for label in sorted(set(chosen["label"])))
            lines.append((_save(folder, f"{split}{row:04d}", canvas), tags))
        pd.DataFrame(lines, columns=["path", "tags"]).to_csv(folder / f"{split}.csv", index=False)
    return _ROWS["train"], _ROWS["eval"]


def _rotated(folder: Path) -> tuple[int, int]:
    from PIL import Image

    images, *splits = digits.load()
    generator = np.random.default_rng(0)
    for (split, rows), source in zip(_ROWS.items(), splits, strict=True):
        lines = []
        for row in range(rows):
            angle = round(generator.uniform(-MAX_ANGLE, MAX_ANGLE), 2)
            image = Image.fromarray(images[source.index[row % len(source)]]).resize((12, 12), Image.Resampling.BICUBIC)
            canvas = Image.new("L", (16, 16))
            canvas.paste(image, (2, 2))
            turned = np.asarray(canvas.rotate(angle, Image.Resampling.BICUBIC))
            lines.append((_save(folder, f"{split}{row:04d}", turned), angle))
        pd.DataFrame(lines, columns=["path", "angle"]).to_csv(folder / f"{split}.csv", index=False)
    return _ROWS["train"], _ROWS["eval"]


def _save(folder: Path, name: str, image: np.ndarray) -> str:
    import torch
    from torchvision.io import write_png

    path = f"images/{name}.png"
    write_png(torch.from_numpy(image.copy())[None], str(folder / path))
    return path


def _names(folder: Path) -> tuple[int, int]:
    (folder / "images").rmdir()
    database = unicodedata.ucd_3_2_0
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "eval": []}
    for code in range(0x110000):
        name = database.name(chr(code), "")
        if name and not name.startswith(("CJK ", "HANGUL SYLLABLE")):  # whose names are numbers and sounds
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            rows["train" if number % _EVAL_SHARE else "eval"].append((name, database.category(chr(code))))
    for split, found in rows.items():
        pd.DataFrame(found, columns=["name", "category"]).to_csv(folder / f"{split}.csv", index=False)
    return len(rows["train"]), len(rows["eval"])
