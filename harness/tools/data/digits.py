"""The digits dataset in the form of a user's own: PNG files and two annotation CSVs.

1,797 handwritten digits of 8x8 pixels, part of scikit-learn (https://archive.ics.uci.edu/dataset/80, CC BY 4.0).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from harness.errors import ConfigError, DataError, reason, remedy
from harness.runs.files import commit, write_atomically

NUM_EVAL = 360


def write(folder: Path) -> str:
    """Write images, ``train.csv`` and ``eval.csv`` (path, label) into ``folder``; return a sentence to print.

    A complete folder is not changed. An incomplete one never has this name: files are written elsewhere, then renamed.
    """
    folder = folder.resolve()  # "." has no name to derive a temporary name from
    if (folder / "train.csv").exists() and (folder / "eval.csv").exists():
        return f"{folder} already has the digits"
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        (temporary / "images").mkdir(parents=True)
        train, validation = _write(temporary)
        commit(temporary, folder)  # which replaces an empty folder
    except OSError as error:
        if (folder / "train.csv").exists():
            return f"{folder} already has the digits"  # another process was faster
        raise DataError(
            f"the digits cannot be written: {reason(error)}",
            where=str(folder),
            hint=remedy(error, "or choose an empty or new folder"),
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"wrote {train} training and {validation} validation rows to {folder}"


def write_config(folder: Path) -> str:
    """Write a configuration for the digits in ``folder`` there, unless there is one; return its path for a shell.

    It is ``configs/digits.yaml`` of a clone, which an installed package does not have.
    """

    path = folder / "digits.yaml"
    text = Path(__file__).with_name("digits.yaml").read_text()
    if not path.exists():
        try:
            config = re.sub(r"(?<=: )data/digits(\S*)", lambda match: json.dumps(f"{folder}{match[1]}"), text)
            write_atomically(path, config)
        except OSError as error:
            raise DataError(f"it cannot be written: {reason(error)}", where=str(path), hint=remedy(error)) from None
    return shlex.quote(str(path))


def _load() -> tuple[np.ndarray, pd.DataFrame, pd.DataFrame]:
    """Return (images of 8x8 as uint8, the training rows and the validation rows of a table with their labels)."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ConfigError(
            "the digits are part of scikit-learn, which is not installed", hint="pip install 'apex-harness[digits]'"
        ) from None
    digits = load_digits()
    table = pd.DataFrame({"path": [f"images/{i:04d}.png" for i in range(len(digits.target))], "label": digits.target})
    train, validation = train_test_split(table, test_size=NUM_EVAL, stratify=table["label"], random_state=0)
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), train, validation.sort_index()


def _write(folder: Path) -> tuple[int, int]:
    import torch

    from harness.data import vision  # late: as torch

    write_png = vision.torchvision("io").write_png
    images, train, validation = _load()
    for index, image in enumerate(images):
        write_png(torch.from_numpy(image)[None], str(folder / "images" / f"{index:04d}.png"))
    train.to_csv(folder / "train.csv", index=False)
    validation.to_csv(folder / "eval.csv", index=False)
    return len(train), len(validation)
