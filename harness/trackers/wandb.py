"""Weights & Biases: without an account a whole run on disk, to be uploaded later; with an API key, live."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from requests.utils import get_netrc_auth

from harness.trackers.mirror import Facts, Line, Sample, scalars

PROJECT = "apex-harness"  # unless WANDB_PROJECT says otherwise


class Mirror:
    def start(self, facts: Facts, lines: Iterable[Line]) -> str:
        """Offline, each start writes the run anew from the record, in place of what it left before: one folder, whole.
        Online, the same run goes on, and lines that it has already are not told again."""
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        folder = Path(os.environ.get("WANDB_DIR") or facts.folder)
        offline = mode in ("offline", "dryrun")
        # Where images of tables wait for their upload; it would be the user's home, and a run would not be whole.
        staged = Path(os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb" / "data").resolve())))
        if offline:
            for old in (folder / "wandb").glob(f"offline-run-*-{facts.id}"):
                shutil.rmtree(old, ignore_errors=True)
            if staged.parent == (folder / "wandb").resolve():
                shutil.rmtree(staged, ignore_errors=True)
        self._run: Any = wandb.init(
            id=facts.id,
            name=facts.name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            config=facts.settings,
            dir=str(folder.resolve()),
            mode=mode,
            resume=None if offline else "allow",
            # Its progress is told by the harness, and the terminal is not its to record.
            settings=wandb.Settings(console="off", silent=True, quiet=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._told = {} if offline else dict(self._run.summary)
        for line in lines:
            self.log(line)
        if mode == "online":
            return f"look at {self._run.url}"
        if not offline:
            return f"WANDB_MODE={mode}"
        why = "" if os.environ.get("WANDB_MODE") else "no API key is configured, so nothing is sent; "
        return f"{why}upload with: wandb sync {Path(self._run.dir).parent}"

    def log(self, line: Line) -> None:
        counter = f"{line['split']}/step"
        if line["step"] > self._told.get(counter, -1):
            self._run.log({"step": line["step"], counter: line["step"], **scalars(line)})

    def show(self, sample: Sample) -> None:
        if sample.images is None:
            table = wandb.Table(columns=sample.columns, data=sample.rows)
        else:
            images = [wandb.Image(np.moveaxis(image, 0, -1).squeeze()) for image in sample.images]
            rows = [[row[0], image, *row[1:]] for row, image in zip(sample.rows, images, strict=True)]
            table = wandb.Table(columns=[sample.columns[0], "image", *sample.columns[1:]], data=rows)
        self._run.log({"predictions": table})

    def finish(self, files: list[Path], done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


def _has_key() -> bool:
    """Whether W&B can be logged in to without asking: by the environment, or by what `wandb login` has left."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None
