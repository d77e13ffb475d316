"""Progress and result of a trial, read from its run folder while the trial writes it."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.runs import layout
from harness.runs.files import read_json


@dataclass
class TrialProgress:
    """The state of a running trial. ``epoch``: number of finished epochs."""

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    value: float | None = None  # metric of the newest evaluation
    wall_s: float = 0.0


class TrialLogReader:
    """Follows the log of a run, reading only new lines.

    A resumed run rewrites the end of its log. If the last line that was read is gone, everything is read again.
    """

    def __init__(self, run: Path, metric: str) -> None:
        self._path, self._metric = run / layout.METRICS, metric
        self._forget()

    def _forget(self) -> None:
        self._offset, self._last = 0, b""
        self.progress = TrialProgress()
        self.evaluations: dict[int, float] = {}  # epoch -> metric of its first evaluation

    def read(self) -> None:
        """Read the lines written since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, self._offset - len(self._last)))
                if file.read(len(self._last)) != self._last:
                    self._forget()
                    file.seek(0)
                fresh = file.read()
        except OSError:
            return  # not written yet
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines(keepends=True):
            self._last = line
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        seen = self.progress
        seen.step, seen.wall_s = line.get("step", seen.step), line.get("wall_s") or seen.wall_s
        if line.get("split") == "train":
            seen.loss = line.get("loss")
            seen.epoch = line.get("epoch", seen.epoch)
        elif line.get("split") == "eval":
            seen.epoch = line.get("epoch", seen.epoch)
            value = line.get(self._metric)
            if isinstance(value, int | float) and math.isfinite(value):
                seen.value = float(value)
                self.evaluations.setdefault(seen.epoch, seen.value)


def final_value(run: Path, metric: str, direction: str) -> float | None:
    """The best value of ``metric`` in the finished run ``run``; None if it has none or is not finished."""
    summary = summary_of(run)
    values = [
        evaluation[metric]
        for evaluation in [*summary.get("history", ()), summary.get("evaluation") or {}]
        if isinstance(evaluation.get(metric), int | float)
    ]
    if not summary.get("finished") or not values:
        return None
    return float(max(values) if direction == "maximize" else min(values))


def summary_of(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = read_json(run / layout.SUMMARY)
        return content if isinstance(content, dict) else {}
    return {}
