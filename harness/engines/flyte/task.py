"""The body of the Flyte task: starts ranks, waits for them, and returns their results as Flyte files.

Only the workflow's source imports it, where flytekit is installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, Optional

from flytekit import current_context
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile

from harness.distributed.launch_env import detect
from harness.distributed.monitor import follow_until_done
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import Job, plan
from harness.engines.flyte.engine import EXITS
from harness.engines.local import engine as local
from harness.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE, HarnessError
from harness.runs import layout
from harness.runs.files import write_atomically
from harness.runs.outcome import ExitCollector
from harness.runs.url_store import UrlStore

_ONE_MACHINE = ("launch.engine=local", "launch.nnodes=1", "launch.max_restarts=0")
_STOPPING = "every rank will write a checkpoint"
_REPORT_S = 120.0  # for the report of a run


class Results(NamedTuple):
    """The results of an experiment, as files of its run folder."""

    weights: FlyteFile
    """The weights of the best step."""
    epochs: FlyteFile
    """JSON lines: the validation metrics of each epoch."""
    summary: FlyteFile
    record: FlyteFile
    """JSON lines: every measurement."""
    report: Optional[FlyteFile]  # noqa: UP045 - if plotly is installed; Flyte supports only this spelling


def train_node(path: str, overrides: Sequence[str]) -> Results:
    """Train ``path`` with ``launch.nproc`` ranks on this machine.

    Raises FlyteRecoverableException if the run failed or was stopped, so that a retry resumes from the checkpoint, and
    HarnessError for an error that a retry cannot fix.
    """
    job = _job(path, overrides)
    _restore(job.folder)
    collector = ExitCollector(job.folder, job.world_size, job.url)
    exits_file = os.environ.get(EXITS)  # set by engine flyte on this machine, which then reports on the run
    if exits_file:
        threading.Thread(target=_end_with_engine, daemon=True).start()
    report = follow_until_done(lambda: local.start(job), _STOPPING)
    if exits_file:
        write_atomically(Path(exits_file), json.dumps([asdict(exit) for exit in report.exits]))
    outcome = collector.conclude(report)
    if outcome.exit_code != EXIT_DONE:
        if exits_file:
            raise SystemExit(outcome.exit_code)
        _keep(job.folder)
        raise _error(outcome.exit_code, outcome.text)
    return _results(job)


def train_rank(path: str, overrides: Sequence[str]) -> Results | None:
    """Train ``path`` as the rank that torch's elastic agent made of this process. Every rank calls it; the task returns
    the result of rank 0. Raises as ``train_node`` does."""
    launch = detect(os.environ)
    job = _job(path, overrides, f"launch.nproc={launch.world_size}")  # whatever the source was written for
    worker = Worker(job.command(), {**os.environ, **job.environ()})
    report = follow_until_done(lambda: WorkerGroup({launch.rank: worker}, job.settings.grace_s), _STOPPING)
    code = report.exits[0].exit_code
    if code != EXIT_DONE:
        raise _error(code, f"a rank ended with exit code {code}{_first_failure(job.folder)}")
    return _results(job) if launch.rank == 0 else None  # other machines may not have the run folder


def _end_with_engine() -> None:
    """End with the engine's process: standard input is a pipe that it holds and never writes to."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _job(path: str, overrides: Sequence[str], *more: str) -> Job:
    return replace(plan(path, [*overrides, *_ONE_MACHINE, *more]), overrides=tuple(overrides))


def _error(exit_code: int, text: str) -> Exception:
    if exit_code in (EXIT_USAGE, EXIT_DATA):
        return HarnessError(text)
    return FlyteRecoverableException(text)


def _first_failure(folder: Path) -> str:
    """Return the first failure, if this machine has the run folder."""
    with suppress(OSError, ValueError, KeyError):
        first = json.loads((folder / layout.FAILURE).read_text(encoding="utf-8"))
        return f"; rank {first['rank']} failed at step {first['step']}: {first['error']}: {first['message']}"
    return ""


def _results(job: Job) -> Results:
    folder = job.folder
    if job.url:  # which has everything; the local copy is removed
        folder = Path(tempfile.mkdtemp(prefix="harness-results-"))
        for name in (layout.WEIGHTS, layout.SUMMARY, layout.METRICS):
            UrlStore(job.url).get(name, folder / name)
    epochs = folder / layout.EPOCHS
    lines = (folder / layout.METRICS).read_text(encoding="utf-8").splitlines()
    evaluations = [line for line in lines if json.loads(line).get("split") == "eval"]
    write_atomically(epochs, "".join(f"{line}\n" for line in evaluations))
    page = _report(job.url or str(folder), folder / layout.REPORT)
    return Results(
        FlyteFile(str(folder / layout.WEIGHTS)),
        FlyteFile(str(epochs)),
        FlyteFile(str(folder / layout.SUMMARY)),
        FlyteFile(str(folder / layout.METRICS)),
        FlyteFile(str(page)) if page else None,
    )


def _report(run: str, page: Path) -> Path | None:
    """Return the report on a run, or None if it cannot be written: that must not fail a finished run."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "harness", "report", run, "--out", str(page)]
        subprocess.run(command, check=False, capture_output=True, timeout=_REPORT_S)
    return page if page.is_file() else None


def _restore(folder: Path) -> None:
    """Restore the run folder that an earlier attempt of this task handed to Flyte, unless the disk still has it."""
    checkpoint = current_context().checkpoint
    if checkpoint.prev_exists() and not folder.exists():
        folder.mkdir(parents=True)
        checkpoint.restore(folder)


def _keep(folder: Path) -> None:
    """Hand the run folder to Flyte for the next attempt."""
    if folder.is_dir():
        current_context().checkpoint.save(folder)
