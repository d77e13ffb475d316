"""Published datasets in their original format (the real ones if they are next to the project, else generated), and
tables for the configurations that have no data of their own."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from benchmarks import made_up_data
from tests.conftest import SHARED_DATA

NAMES = [
    "bella", "luna", "max", "lucy", "charlie", "cooper", "daisy", "buddy", "sadie", "molly", "bailey", "lola",
    "stella", "tucker", "bentley", "zoe", "harley", "maggie", "jack", "sophie", "penny", "oreo", "milo", "leo",
    "jasper", "oliver", "oscar", "simba", "toby", "kitty", "shadow", "smokey", "tiger", "chloe", "lily", "nala",
    "pepper", "ginger", "gracie", "ruby", "rosie", "coco", "riley", "duke", "bear", "rocky", "winston", "murphy",
    "gus", "finn", "louie", "henry", "hazel", "willow", "olive", "mochi", "ollie", "loki",
]  # fmt: skip


def write_idx(raw: Path, split: str, num_rows: int, size: int = 28) -> None:
    """Write images and labels of ``split`` in MNIST's format, plain and gzipped; a bright band shows the label."""
    raw.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(num_rows)
    labels = (np.arange(num_rows) % 10).astype(np.uint8)
    images = generator.integers(0, 60, (num_rows, size, size), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 6] += 190
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        (raw / f"{split}-{name}-ubyte").write_bytes(header + array.tobytes())
        (raw / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def images(folder: Path, kind: str) -> Path:
    """Fill ``folder`` for task.root of mnist or fashion_mnist with the real data, else with generated data."""
    from harness.tools.data import published

    if SHARED_DATA.is_dir():
        getattr(published, kind)(folder, str(SHARED_DATA / kind))
    else:
        raw = folder / {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[kind] / "raw"
        write_idx(raw, "train", 600)
        write_idx(raw, "t10k", 100)
    return folder


def write_names(path: Path) -> Path:
    """Write a file of sixty names, some of them several times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*NAMES, *NAMES[:10], *NAMES[:3]]) + "\n")
    return path


OWN_TABLES = {"multi_label": "image_csv", "regression": "image_csv", "text": "text_csv"}


def own_table(folder: Path, name: str) -> list[str]:
    """Make a table for configs/NAME.yaml, one of ``OWN_TABLES``; return the overrides that name it."""
    overrides = made_up_data.write(folder, OWN_TABLES[name])
    assert overrides is not None
    return overrides
