"""Weights & Biases: live with an API key; without one, a complete run on disk that can be uploaded later."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from PIL import Image
from requests.utils import get_netrc_auth

from harness.trackers import pictures
from harness.trackers.base import Entry, RunInfo, Sample, scalars

PROJECT = "apex-harness"  # unless WANDB_PROJECT names another


class Tracker:
    """A run of W&B with the identity of the run folder."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Offline, replace what an earlier start wrote with a complete replay of the log, in one folder. Online, resume
        the same W&B run and skip the entries that the server already has."""
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        folder = Path(os.environ.get("WANDB_DIR") or info.folder)
        offline = mode in ("offline", "dryrun")
        # Images in tables are staged here for upload. W&B's default is the user's home, outside the run folder.
        staged = Path(os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb" / f"data-{info.id}").resolve())))
        if offline:
            for old in (folder / "wandb").glob(f"offline-run-*-{info.id}"):
                shutil.rmtree(old, ignore_errors=True)
            if staged == (folder / "wandb" / f"data-{info.id}").resolve():
                shutil.rmtree(staged, ignore_errors=True)
        self._run: Any = wandb.init(
            id=info.id,
            name=info.name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            config=info.settings,
            dir=str(folder.resolve()),
            mode=mode,
            resume=None if offline else "allow",
            # The harness prints progress itself, and W&B must not capture the terminal.
            settings=wandb.Settings(console="off", silent=True, quiet=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._last_steps = {} if offline else dict(self._run.summary)
        for entry in entries:
            self.log(entry)
        if mode == "online":
            return f"view at {self._run.url}"
        if not offline:
            return f"WANDB_MODE={mode}"
        note = "" if os.environ.get("WANDB_MODE") else "no API key is configured, so nothing is uploaded; "
        return f"{note}upload with: wandb sync {Path(self._run.dir).parent}"

    def log(self, entry: Entry) -> None:
        counter = f"{entry['split']}/step"
        if entry["step"] > self._last_steps.get(counter, -1):
            self._run.log({"step": entry["step"], counter: entry["step"], **scalars(entry)})

    def show(self, sample: Sample) -> None:
        if sample.images is None:
            table = wandb.Table(columns=sample.columns, data=sample.rows)
        else:
            pairs = zip(sample.rows, sample.images, strict=True)
            rows = [[row[0], _image(image), *row[1:]] for row, image in pairs]
            table = wandb.Table(columns=[sample.columns[0], "image", *sample.columns[1:]], data=rows)
        content: dict[str, Any] = {sample.name: table}
        if sample.confusion is not None:
            content["confusion"] = _image(pictures.confusion(sample.confusion))
        self._run.log(content)

    def finish(self, files: list[Path], done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


def _image(pixels: np.ndarray) -> Any:
    """Return the picture of ``pixels``, uint8 (1 or 3, height, width). Of an array, W&B would drop a side of 1."""
    return wandb.Image(Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)))


def _has_key() -> bool:
    """Return True if W&B can log in without asking: from the environment, or from the netrc file that `wandb login`
    writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None
