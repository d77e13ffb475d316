"""Starts of a configuration for ``harness verify-resume``: how it is shortened, and ``harness launch`` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.config import loader
from harness.config.schema import Config, flatten
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.errors import EXIT_FAILURE, CheckpointError, ConfigError, HarnessError
from harness.runs.files import is_url
from harness.runs.probe_plan import PROBE, ProbePlan

LONG_EPOCH, FEW_STEPS = 60, 24  # an epoch of more steps is not trained to its end unless --steps asks for it
_CHECKPOINTS = 7  # in a shortened run, in addition to those at the ends of epochs
_LIMIT_S = 300.0  # for a start, on top of ten times what the uninterrupted run took
_GRACE_S = 60.0
_TAIL_LINES = 25


class Length(NamedTuple):
    """Steps per epoch, and of the whole run."""

    per_epoch: int
    total: int


class Start(NamedTuple):
    """The end of one start. ``wall_s``: its seconds from the command to its exit."""

    code: int
    wall_s: float
    output: str


def examine(path: str, overrides: Sequence[str], world_size: int) -> Length:
    """Return the length of the run that a configuration plans. Raises HarnessError with what ``harness check``
    finds."""
    command = [sys.executable, "-m", "harness", "check", "--json", "-c", path, "--world", str(world_size), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    try:
        record = json.loads(done.stdout.splitlines()[-1])  # what the user's own code printed comes before
    except (ValueError, IndexError):  # it crashed, and has printed why
        record = {"errors": [{"message": f"harness check crashed:\n{done.stderr}", "where": path, "hint": ""}]}
    if errors := record["errors"]:
        texts = [str(HarnessError(each["message"], where=each["where"], hint=each["hint"])) for each in errors]
        error = HarnessError("\n".join(texts))
        error.exit_code = done.returncode or EXIT_FAILURE
        raise error
    return Length(record["facts"]["steps per epoch"], record["facts"]["steps"])


def shortened(
    config: Config, overrides: Sequence[str], length: Length, steps: int | None
) -> dict[str, tuple[str, str]]:
    """Return {key: (value, shorter value)} so that a run has several checkpoints, evaluations and, if its epochs are
    short, an epoch end. Keys in ``overrides`` are the user's choice and are kept."""
    if steps is None:
        steps = FEW_STEPS if length.per_epoch > LONG_EPOCH else length.per_epoch + max(6, length.per_epoch // 2)
    steps = min(steps, length.total)
    every = max(2, steps // _CHECKPOINTS)  # so that a kill loses some steps
    often, saved = config.train.evaluate_every, config.checkpoint.every
    wanted: dict[str, Any] = {
        "train.max_steps": steps if steps < length.total else config.train.max_steps,
        "train.log_every": 1,
        "train.evaluate_every": often.written if often.steps(length.per_epoch) < length.per_epoch else 1,
        "checkpoint.every": min(every, saved.steps(length.per_epoch)) if saved else every,
        "checkpoint.keep": 1000,
    }
    given = {override.partition("=")[0] for override in overrides}
    present = flatten(loader.as_tree(config))
    return {
        key: (_word(present[key]), _word(value))
        for key, value in wanted.items()
        if key not in given and present[key] != value
    }


def _word(value: object) -> str:
    return "null" if value is None else str(value)


class Starts:
    """Starts runs of one configuration in ``folder``, one after the other; their output is appended to a file there."""

    def __init__(self, path: str, overrides: Sequence[str], folder: Path, config: Config) -> None:
        self._command = [sys.executable, "-m", "harness", "launch", "-c", path, *overrides]
        self.folder, self.log = folder, folder / "output.txt"
        self._name, self._scheme = config.name, "file://" if is_url(config.output) else ""
        self._resume = ["checkpoint.resume=auto"] if config.checkpoint.resume == "never" else []
        self.limit_s = float("inf")
        self._plans = 0

    def folder_of(self, name: str) -> Path:
        return self.folder / "runs" / name / self._name

    def start(self, name: str, plan: ProbePlan | None = None, *overrides: str) -> Start:
        """Start the run ``name`` and wait for its end. Raises CheckpointError if it does not end."""
        own = [f"output={self._scheme}{self.folder_of(name).parent}", "trackers=[]", *self._resume, *overrides]
        if plan is not None:
            self._plans += 1
            own.append(f"launch.env.{PROBE}={plan.write(self.folder / f'plan-{self._plans}.json')}")
        before, began = self.log.stat().st_size if self.log.exists() else 0, time.monotonic()
        group = WorkerGroup(
            {0: Worker([*self._command, *own], output=self.log)}, _GRACE_S,
            stdin=subprocess.DEVNULL, ends_with_parent=True,
        )  # fmt: skip
        try:
            code = group.wait(lambda: self._end_if_late(group, began))[0]
        except BaseException:
            group.stop()  # Ctrl-C: the ranks stop, too
            group.wait()
            raise
        wall_s = time.monotonic() - began
        if wall_s > self.limit_s:
            raise CheckpointError(
                f"the run '{name}' had not ended after {self.limit_s:.0f} s and was stopped", where=str(self.log),
                hint="read the end of this file",
            )  # fmt: skip
        return Start(code, wall_s, self._output_since(before))

    def _end_if_late(self, group: WorkerGroup, began: float) -> None:
        if time.monotonic() - began > self.limit_s:
            group.end(_GRACE_S)

    def limit(self, uninterrupted_s: float) -> None:
        """Allow each further start ten times ``uninterrupted_s``, and some minutes."""
        self.limit_s = 10 * uninterrupted_s + _LIMIT_S

    def finish(self, name: str, plan: ProbePlan | None = None, *overrides: str) -> Start:
        """``start``, for a run that must reach its end. Raises HarnessError with its exit code if it fails."""
        done = self.start(name, plan, *overrides)
        if done.code:
            raise failed(name, done, self.log)
        return done

    def _output_since(self, offset: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


def failed(name: str, start: Start, log: Path) -> HarnessError:
    """Return the error of a run that failed without a kill."""
    lines = start.output.rstrip().replace("\r", "\n").splitlines()[-_TAIL_LINES:]
    error = ConfigError(
        f"the run '{name}' failed with exit code {start.code} although it was not killed; its last lines:\n"
        + "\n".join(f"  | {line}" for line in lines),
        hint=f"first make sure that the configuration trains without kills; {log} has the whole output",
    )
    error.exit_code = start.code if start.code > 0 else EXIT_FAILURE
    return error
