"""Trackio: a database on this machine, or the Space or server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import trackio

from harness.trackers import pictures
from harness.trackers.base import Entry, RunInfo, Sample, scalars

PROJECT = "apex-harness"  # unless TRACKIO_PROJECT names another


class Tracker:
    """A run of Trackio, named after the run folder and its identity."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """On this machine, replace what an earlier start wrote with a replay of the log. Elsewhere, where nothing can
        be removed, resume the run: steps that it has are not sent again, but for the last, which may lack a part."""
        project, name = os.environ.get("TRACKIO_PROJECT") or PROJECT, f"{info.name}-{info.id}"
        server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if not server:
            runs: list[Any] = []
            with contextlib.suppress(ValueError):  # there is no such project yet
                runs += trackio.Api().runs(project)
            for run in runs:
                if run.name == name:
                    run.delete()
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the command
            self._run: Any = trackio.init(
                project=project, name=name, group=info.name, config=info.settings, embed=False,
                resume="allow" if server else "never",
            )  # fmt: skip
        self._first = self._run._next_step - 1 if server else 0  # it has no public name
        self._step = 0
        for entry in entries:
            self.log(entry)
        return f"view at {server}" if server else f"view with: trackio show --project {project}"

    def log(self, entry: Entry) -> None:
        self._step = entry["step"]
        if self._step >= self._first and (values := scalars(entry)):
            self._run.log(values, step=self._step)

    def show(self, sample: Sample) -> None:
        table = pd.DataFrame(sample.rows, columns=sample.columns)
        if sample.images is not None:
            table.insert(1, "image", [_image(image) for image in sample.images])
        content: dict[str, Any] = {sample.name: trackio.Table(dataframe=table)}
        if sample.confusion is not None:
            content["confusion"] = _image(pictures.confusion(sample.confusion))
        self._run.log(content, step=self._step)

    def finish(self, files: list[Path], done: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def _image(pixels: np.ndarray) -> Any:
    """Return the picture of ``pixels``, uint8 (1 or 3, height, width), for a table."""
    return trackio.Image(np.broadcast_to(np.moveaxis(pixels, 0, -1), (*pixels.shape[1:], 3)))
