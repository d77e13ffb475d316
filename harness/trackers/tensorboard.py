"""TensorBoard: event files in ``RUN/tensorboard``, rewritten from the log at each start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from harness.trackers import pictures
from harness.trackers.base import Entry, EntryTimes, RunInfo, Sample, scalars


class Tracker:
    """Event files of one run, with its configuration as text and its recipe as hyperparameters."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Empty the old event files and replay the log, since a resumed run repeats steps. ``purge_step`` makes a
        TensorBoard that is open at this moment discard what it has read."""
        folder = info.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            os.truncate(old, 0)  # not removed: a TensorBoard that reads a removed file never moves on to the next
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._times = EntryTimes(info.started)
        self._writer.add_text("config", f"```yaml\n{info.config_yaml}```", 0, walltime=info.started)
        # In the same files: add_hparams would make another run of them.
        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in info.recipe.items()
        }
        metrics = {f"eval/{name}": 0.0 for name in info.metrics}
        for summary in hparams(settings, metrics):
            self._writer._get_file_writer().add_summary(summary, 0)
        for entry in entries:
            self._add(entry)
        self._writer.flush()
        return f"view with: tensorboard --logdir {folder}"

    def log(self, entry: Entry) -> None:
        self._add(entry)
        self._writer.flush()

    def _add(self, entry: Entry) -> None:
        now = self._times.time(entry)
        for name, value in scalars(entry).items():
            self._writer.add_scalar(name, value, entry["step"], walltime=now)

    def show(self, sample: Sample) -> None:
        rows = [sample.columns, ["---"] * len(sample.columns), *sample.rows]
        cells = [[f"{c:.4g}" if isinstance(c, float) else str(c).replace("|", "\\|") for c in row] for row in rows]
        self._writer.add_text(sample.name, "\n".join("|" + "|".join(row) + "|" for row in cells), 0)
        if sample.images is not None:
            for row, image in enumerate(sample.images):
                self._writer.add_image(f"{sample.name}/{row:02d} {sample.title(row)}", image, 0)
        if sample.confusion is not None:
            self._writer.add_image("confusion", pictures.confusion(sample.confusion), 0)
        self._writer.flush()

    def finish(self, files: list[Path], done: bool) -> None:
        self._writer.close()
