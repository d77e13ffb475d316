"""What the task of engine flyte does: it starts ranks, waits for them, and returns what they left as Flyte files.

Imported by the workflow's page alone, where flytekit is. Here is nothing of how a workflow is made or started.
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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Optional

from flytekit import current_context
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile

from harness.distributed.launch_env import detect
from harness.distributed.monitor import attend
from harness.distributed.worker_group import Gang
from harness.engines import local
from harness.engines.base import Job, plan
from harness.engines.flyte.engine import OUTCOME
from harness.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE, HarnessError
from harness.runs import layout
from harness.runs.outcome import Aftermath
from harness.runs.storage import UrlStore

_ONE_MACHINE = ("launch.engine=local", "launch.nnodes=1", "launch.max_restarts=0")
_STOPPING = "stopping: every rank writes a checkpoint"
_REPORT_S = 120.0  # for the report of a run


class Results(NamedTuple):
    """What an experiment leaves, as files of its run folder."""

    weights: FlyteFile  # of the best step
    epochs: FlyteFile  # JSON lines: the held-out metrics of each epoch
    summary: FlyteFile
    record: FlyteFile  # JSON lines: all that was measured
    report: Optional[FlyteFile]  # noqa: UP045 - a page with curves, where plotly is installed; Flyte knows this spelling


def train_node(path: str, overrides: Sequence[str]) -> Results:
    """Train ``path`` with ``launch.nproc`` ranks on this machine. Raises FlyteRecoverableException if it failed or was
    stopped, so that Flyte's retries go on from the checkpoint, and HarnessError where trying again is of no use."""
    job = _job(path, overrides)
    _bring_back(job.folder)
    aftermath = Aftermath(job.folder, job.world_size, job.url)
    asked = os.environ.get(OUTCOME)
    if asked:
        threading.Thread(target=_end_with_whoever_asked, daemon=True).start()
    outcome = attend(local.start(job), _STOPPING)
    if asked:
        Path(asked).write_text(json.dumps({"exits": outcome.exits}), encoding="utf-8")
    conclusion = aftermath.conclude(outcome)
    if conclusion.exit_code != EXIT_DONE:
        if asked:
            raise SystemExit(conclusion.exit_code)  # whoever asked reports on it: once, and without a traceback of ours
        _keep(job.folder)
        raise _error(conclusion.exit_code, conclusion.text)
    return _results(job)


def train_rank(path: str, overrides: Sequence[str]) -> Results | None:
    """Train ``path`` as the rank that torch's elastic agent has made of this process; every rank calls it, and what
    rank 0 returns is what the task returns. Raises as ``train_node`` does."""
    place = detect(os.environ)
    job = _job(path, overrides, f"launch.nproc={place.world_size}")  # whatever the page was made for
    gang = Gang(job.command(), {0: {**os.environ, **job.environ()}}, job.settings.grace_s)
    code = attend(gang, _STOPPING).exits[0]
    if code != EXIT_DONE:
        raise _error(code, f"a rank ended with exit code {code}{_first_failure(job.folder)}")
    return _results(job) if place.rank == 0 else None  # the others may not see the run folder


def _end_with_whoever_asked() -> None:
    """Standard input is a pipe that the engine holds and never writes to: it ends with the engine's process."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _job(path: str, overrides: Sequence[str], *more: str) -> Job:
    return replace(plan(path, [*overrides, *_ONE_MACHINE, *more]), overrides=tuple(overrides))


def _error(exit_code: int, text: str) -> Exception:
    if exit_code in (EXIT_USAGE, EXIT_DATA):
        return HarnessError(text)
    return FlyteRecoverableException(text)


def _first_failure(folder: Path) -> str:
    """What the rank that failed first has left, as far as this machine can see it."""
    with suppress(OSError, ValueError, KeyError):
        told = json.loads((folder / layout.FAILURE).read_text(encoding="utf-8"))
        return f"; rank {told['rank']} failed at step {told['step']}: {told['error']}: {told['message']}"
    return ""


def _results(job: Job) -> Results:
    folder = job.folder
    if job.url:  # where it all is by now, and here no more
        folder = Path(tempfile.mkdtemp(prefix="harness-results-"))
        for name in (layout.WEIGHTS, layout.SUMMARY, layout.METRICS):
            UrlStore(job.url).get(name, folder / name)
    epochs = folder / "epochs.jsonl"
    lines = (folder / layout.METRICS).read_text(encoding="utf-8").splitlines()
    epochs.write_text("".join(f"{line}\n" for line in lines if json.loads(line).get("split") == "eval"))
    page = _report(job.url or str(folder), folder / layout.REPORT)
    return Results(
        FlyteFile(str(folder / layout.WEIGHTS)),
        FlyteFile(str(epochs)),
        FlyteFile(str(folder / layout.SUMMARY)),
        FlyteFile(str(folder / layout.METRICS)),
        FlyteFile(str(page)) if page else None,
    )


def _report(run: str, page: Path) -> Path | None:
    """The report on a run, or None where it cannot be made: it is no reason to fail a run that has trained."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "harness", "report", run, "--out", str(page)]
        subprocess.run(command, check=False, capture_output=True, timeout=_REPORT_S)
    return page if page.is_file() else None


def _bring_back(folder: Path) -> None:
    """The run folder that an earlier attempt of this task kept, where no disk has kept it."""
    kept = current_context().checkpoint
    if kept.prev_exists() and not folder.exists():
        folder.mkdir(parents=True)
        kept.restore(folder)


def _keep(folder: Path) -> None:
    """Hand the run folder to Flyte, for the next attempt."""
    if folder.is_dir():
        current_context().checkpoint.save(folder)
