"""Small datasets for each built-in task, made up, for runs that only need to start: no network, no other packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torchvision.io import write_png

ROWS = {"train": 256, "eval": 40}
_NAMES = [
    f"{first}{middle}{last}" for first in "bdklmr" for middle in ("a", "el", "oo", "un") for last in ("a", "y", "o")
]


def write(folder: Path, task: str, num_train: int = ROWS["train"]) -> list[str] | None:
    """Write data for ``task`` into ``folder``; return the overrides that a configuration needs to use them, or None if
    there are none for this task. ``num_train``: training images."""
    if task == "image_csv":
        rows = {**ROWS, "train": num_train}
        csvs = {split: _images(folder / task, split, size=8, num_rows=number) for split, number in rows.items()}
        return [f"task.{split}_csv={csv}" for split, csv in csvs.items()] + [
            f"task.root={folder / task}",
            f"data.cache_dir={folder / 'cache'}",
        ]
    if task == "text_csv":
        csvs = {split: _texts(folder / task, split) for split in ROWS}
        return [f"task.{split}_csv={csv}" for split, csv in csvs.items()] + [f"data.cache_dir={folder / 'cache'}"]
    if task in ("mnist", "fashion_mnist"):
        kind = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[task]
        for split, name in (("train", "train"), ("eval", "t10k")):
            _idx(folder / task / kind / "raw", name, ROWS[split])
        return [f"task.root={folder / task}"]
    if task == "pet_names":
        path = folder / task / "names.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_NAMES) + "\n")
        return [f"task.names={path}"]
    return None


def _images(folder: Path, split: str, size: int, num_rows: int) -> Path:
    """A CSV with one gray PNG per row; the position of the bright row shows the label, the tags and the angle."""
    (folder / split).mkdir(parents=True, exist_ok=True)
    lines = ["path,label,tags,angle"]
    for row in range(num_rows):
        pixels = torch.full((1, size, size), 20, dtype=torch.uint8)
        pixels[0, row % size] = 220
        write_png(pixels, str(folder / split / f"{row}.png"))
        bright = row % size
        lines.append(f"{split}/{row}.png,{bright},{bright}|{bright // 2},{45.0 * bright}")
    return _csv(folder / f"{split}.csv", lines)


def _texts(folder: Path, split: str) -> Path:
    """A CSV with a name of two words per row; the first one shows the category."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{_NAMES[row % 4]} {_NAMES[row % 11]},{row % 4}" for row in range(ROWS[split])]
    return _csv(folder / f"{split}.csv", ["name,category", *rows])


def _csv(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _idx(raw: Path, name: str, num_rows: int, size: int = 28) -> None:
    """Images and labels in MNIST's format."""
    raw.mkdir(parents=True, exist_ok=True)
    labels = (np.arange(num_rows) % 10).astype(np.uint8)
    images = np.random.default_rng(0).integers(0, 256, (num_rows, size, size), dtype=np.uint8)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        (raw / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())
