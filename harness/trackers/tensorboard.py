"""TensorBoard: event files in ``RUN/tensorboard``, written anew from the record at each start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from harness.trackers.mirror import Clock, Facts, Line, Sample, scalars


class Mirror:
    def start(self, facts: Facts, lines: Iterable[Line]) -> str:
        """A resumed run repeats steps: the old files are emptied, the record is told again, and ``purge_step`` makes a
        TensorBoard that is looking at this moment forget what it had read."""
        folder = facts.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            os.truncate(old, 0)  # not removed: a TensorBoard that reads one would never go on to the next
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._clock = Clock(facts.started)
        self._writer.add_text("config", f"```yaml\n{facts.text}```", 0, walltime=facts.started)
        for line in lines:
            self._add(line)
        self._writer.flush()
        return f"look with: tensorboard --logdir {folder}"

    def log(self, line: Line) -> None:
        self._add(line)
        self._writer.flush()

    def _add(self, line: Line) -> None:
        now = self._clock.time(line)
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"], walltime=now)

    def show(self, sample: Sample) -> None:
        rows = [sample.columns, ["---"] * len(sample.columns), *sample.rows]
        cells = [[f"{c:.4g}" if isinstance(c, float) else str(c).replace("|", "\\|") for c in row] for row in rows]
        self._writer.add_text("predictions", "\n".join("|" + "|".join(row) + "|" for row in cells), 0)
        if sample.images is not None:
            for row, image in enumerate(sample.images):
                self._writer.add_image(f"predictions/{row:02d} {sample.title(row)}", image, 0)
        self._writer.flush()

    def finish(self, files: list[Path], done: bool) -> None:
        self._writer.close()
