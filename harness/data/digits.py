"""The digits data set in the form of a user's own: PNG files and two annotation CSVs.

1,797 handwritten digits of 8x8 pixels, part of scikit-learn (https://archive.ics.uci.edu/dataset/80, CC BY 4.0).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pandas as pd

from harness.errors import ConfigError, DataError, reason, remedy
from harness.runs.files import commit

NUM_EVAL = 360


def write(folder: Path) -> str:
    """Write ``images/*.png``, ``train.csv`` and ``eval.csv`` (path, label) into ``folder``; return a sentence to print.

    A complete folder is not changed. An incomplete one never has this name: files are written elsewhere, then renamed.
    """
    folder = folder.resolve()  # "." has no name to derive a temporary name from
    if (folder / "train.csv").exists() and (folder / "eval.csv").exists():
        return f"{folder} already has the digits"
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ConfigError(
            "the digits are part of scikit-learn, which is not installed", hint="pip install 'apex-harness[digits]'"
        ) from None
    import torch
    from torchvision.io import write_png

    digits = load_digits()
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        (temporary / "images").mkdir(parents=True)
        for index, image in enumerate(digits.images):
            pixels = torch.from_numpy(image * (255 / 16)).round().to(torch.uint8)
            write_png(pixels[None], str(temporary / "images" / f"{index:04d}.png"))
        table = pd.DataFrame(
            {"path": [f"images/{i:04d}.png" for i in range(len(digits.target))], "label": digits.target}
        )
        train, validation = train_test_split(table, test_size=NUM_EVAL, stratify=table["label"], random_state=0)
        train.to_csv(temporary / "train.csv", index=False)
        validation.sort_index().to_csv(temporary / "eval.csv", index=False)
        commit(temporary, folder)  # which replaces an empty folder
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (folder / "train.csv").exists():
            return f"{folder} already has the digits"  # another process was faster
        raise DataError(
            f"the digits cannot be written: {reason(error)}",
            where=str(folder),
            hint=remedy(error, "or choose an empty or new folder"),
        ) from None
    return f"wrote {len(train)} training and {len(validation)} validation rows to {folder}"
