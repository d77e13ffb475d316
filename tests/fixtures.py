"""Small datasets and configurations shared by several tests, all generated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torchvision.io import write_jpeg, write_png

from harness.config import loader
from harness.config.schema import Config


def write_rows(folder: Path, name: str, num_rows: int, classes: int = 3, size: tuple[int, int] = (8, 8)) -> Path:
    """Write ``name.csv`` (path, label) with ``num_rows`` gray PNGs into ``folder``; row r has label r % classes.

    The first pixel of image r is r % 256. The position of the bright rows shows the label, so a model can learn it.
    """
    images = folder / f"{name}_images"
    images.mkdir(parents=True, exist_ok=True)
    lines = ["path,label"]
    for row in range(num_rows):
        pixels = torch.full((1, *size), 20, dtype=torch.uint8)
        pixels[0, row % classes :: classes] = 220
        pixels[0, 0, 0] = row % 256
        write_png(pixels, str(images / f"{row}.png"))
        with open(images / f"{row}.png", "ab") as file:
            file.write(name.encode())  # after the image: no file of a table is a copy of one of another
        lines.append(f"{images.name}/{row}.png,{row % classes}")
    csv = folder / f"{name}.csv"
    csv.write_text("\n".join(lines) + "\n")
    return csv


def write_photos(folder: Path, name: str, num_rows: int, classes: int = 3) -> Path:
    """Write ``name.csv`` (path, label) with JPEGs of mixed sizes into ``folder``, every fourth one gray."""
    images = folder / f"{name}_images"
    images.mkdir(parents=True, exist_ok=True)
    rng, lines = np.random.default_rng(num_rows), ["path,label"]
    for row in range(num_rows):
        height, width = rng.integers(40, 400, 2)
        pixels = rng.integers(0, 256, (3, height // 8, width // 8), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
        image = torch.from_numpy(pixels // 2 + 40 * (row % classes))
        write_jpeg(image[:1] if row % 4 == 3 else image, str(images / f"{row}.jpg"))
        lines.append(f"{images.name}/{row}.jpg,{row % classes}")
    csv = folder / f"{name}.csv"
    csv.write_text("\n".join(lines) + "\n")
    return csv


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """A small valid experiment on ``train.csv`` and ``eval.csv`` in ``folder``; ``sections`` are merged into it."""
    tree: dict[str, Any] = {
        "name": "small",
        "output": str(folder / "runs"),
        "task": {
            "name": "image_csv",
            "train_csv": str(folder / "train.csv"),
            "eval_csv": str(folder / "eval.csv"),
            "root": str(folder),
            "color": "gray",
        },
        "data": {"num_workers": 0, "cache_dir": str(folder / "cache")},
        "model": {"name": "linear"},
        "batch": {"global": 4},
        "runtime": {"device": "cpu"},
    }
    for name, section in sections.items():
        merged = isinstance(section, dict) and isinstance(tree.get(name), dict)
        tree[name] = {**tree[name], **section} if merged else section
    return tree


def write_yaml(path: Path, tree: dict[str, Any] | str) -> Path:
    """Replace ``path`` at once: ranks of one test may write and read the same file at the same time."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    return part.replace(path)


def make_config(folder: Path, overrides: Sequence[str] = (), **sections: Any) -> Config:
    """The validated configuration of ``settings(folder, **sections)``."""
    return loader.load(write_yaml(folder / "config.yaml", settings(folder, **sections)), overrides)


class CountingTable:
    """A dataset without files: row r has input [r, random] and target r % 3; row ``fail_at`` raises DataError."""

    def __init__(self, num_rows: int, fail_at: int | None = None) -> None:
        self.num_rows, self.fail_at = num_rows, fail_at

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: np.ndarray, epoch: int | None) -> Any:
        from harness.data.batch import Batch
        from harness.data.seeds import derive
        from harness.errors import DataError

        if self.fail_at is not None and self.fail_at in rows:
            raise DataError("image not found: x.png", where=f"train.csv:{self.fail_at + 2}", hint="restore it")
        marks = [derive(1, 0 if epoch is None else epoch + 1, int(row)) % 10_000 for row in rows]
        inputs = torch.tensor([[float(row), float(mark)] for row, mark in zip(rows, marks, strict=True)])
        return Batch(inputs.view(-1, 2), torch.from_numpy(rows % 3), rows.copy(), [])
