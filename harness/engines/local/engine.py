"""Engine local: ``launch.nproc`` processes on this machine, without a launcher between them and ``harness launch``.

With ``launch.max_restarts``, a run that loses ranks continues from its newest checkpoint, on those that are left.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.config import loader
from harness.distributed.launch_env import local_environment
from harness.distributed.monitor import EngineReport, tell
from harness.distributed.network import require_address
from harness.distributed.rank_exit import Cause
from harness.distributed.threads import Background
from harness.distributed.worker_group import LocalRun
from harness.engines.base import Job, refuse, shell
from harness.engines.local.settings import Settings
from harness.errors import EXIT_STOPPED, WorkerKilled, plural
from harness.runs import layout
from harness.runs.outcome import ExitCollector, RunOutcome

ON_THIS_MACHINE = True
_BY = "harness launch, engine local"
_ONE_MACHINE = "this engine uses one machine; use launch.engine=torchrun, slurm, dask or flyte"
_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 60.0  # before a restart; the wait doubles after starts that saved nothing
_CHECK_S = 1.0
# A rank that was killed or hung, or whose device or connection is lost. Its own error would occur again.
_LOST = frozenset([Cause.SIGNAL, Cause.NODE_LOST, Cause.HUNG, Cause.PEER_LOST])
_LOST_BY = frozenset(["AcceleratorError", WorkerKilled.__name__])  # the first is torch's, for a device or its driver


def render(job: Job) -> str:
    _check(job)
    port: Any = "PORT" if job.world_size > 1 else 0
    first = shell(job.command(), job.environ() | local_environment(0, job.world_size, port, _BY))
    if job.world_size == 1:
        return first + "\n"
    return (
        f"# {job.world_size} processes, with RANK and LOCAL_RANK from 0 to {job.world_size - 1}; PORT is a free port, "
        f"on which harness launch serves the store through which they connect\n{first}\n"
    )


def start(job: Job) -> LocalRun | RestartedRun:
    _check(job)
    for error in job.config.task.problems():
        raise loader.placed(error, job.config)
    return RestartedRun(job) if job.settings.max_restarts else _start(job, job.world_size)


def _start(job: Job, num_ranks: int, visible: Sequence[str] = ()) -> LocalRun:
    """Start the ranks on the devices ``visible``; empty: on those that this process sees."""
    environ = {**os.environ, **job.environ(), **({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {})}
    return LocalRun(job.command(), num_ranks, environ, job.settings.grace_s, _BY)


def _check(job: Job) -> None:
    """Raise LaunchError for settings that do not apply to this engine, or contradict each other."""
    refuse(job, "local", nnodes=_ONE_MACHINE)
    settings, config, least = job.settings, job.config, _min_ranks(job)
    if settings.interface is not None:
        require_address(settings.interface)
    if least < settings.nproc and not settings.max_restarts:
        raise job.error(
            "launch.local.min_ranks needs launch.max_restarts: each loss of ranks uses one restart",
            "add --max-restarts 3, or use --nproc N",
        )
    if least < settings.nproc and config.batch.global_ is None and not config.parallel.logical_ranks:
        raise job.error(
            "with launch.local.min_ranks, batch.per_rank would change the global batch when a rank is lost",
            f"set batch.global, or parallel.logical_ranks={settings.nproc}",
        )


def _min_ranks(job: Job) -> int:
    local_settings: Settings = job.settings.engine_settings
    return local_settings.min_ranks or job.settings.nproc


class RestartedRun:
    """The starts of one run: after a loss of ranks it starts again, on those that are left, and returns to all of them
    at a later checkpoint, if this machine can. The bits are the same with ``parallel.logical_ranks``.

    Each loss uses one of ``launch.max_restarts``. An error of the code, the configuration or the data ends the run, and
    so does a second loss at the same step.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._lock, self._stopping = job, threading.Lock(), threading.Event()
        self._num_stops = self._num_restarts = self._num_in_vain = 0
        self._saved_before: str | None = None  # the newest checkpoint at the loss before
        self._lost_at: int | None = None
        self._size = job.world_size
        self._growth = _Growth(job)
        self._collector = ExitCollector(job.folder, self._size, job.url)
        self._run = _start(job, self._size)

    def stop(self) -> None:
        with self._lock:
            self._num_stops += 1
            self._stopping.set()
            if self._num_stops > 1 or not self._growth.stopped:  # else the ranks are stopping already
                self._run.stop()

    def follow(self) -> EngineReport:
        while True:
            report = self._run.follow(self._consider_growth)
            outcome = self._collector.preview(report)
            report = replace(report, stopped=self._num_stops > 0, world_size=self._size)
            if self._num_stops or not self._again(report, outcome) or not self._start_again():
                return report

    def _again(self, report: EngineReport, outcome: RunOutcome) -> bool:
        """Choose the number of ranks for another start, after a pause; False: the run has ended, or is to end."""
        if self._growth.stopped and outcome.exit_code == EXIT_STOPPED:
            self._size = self._growth.size
            tell(f"starting again on {plural(self._size, 'rank')}, since there is room for them again")
            return True
        failure = outcome.failure
        if failure is None or not (failure["cause"] in _LOST or failure["error"] in _LOST_BY):
            return False
        step, settings = int(failure["step"] or 0), self._job.settings
        if step == self._lost_at:
            tell(f"not started again: step {step} has failed twice")
            return False
        if self._num_restarts >= settings.max_restarts:
            tell(f"not started again: launch.max_restarts={settings.max_restarts} is used up")
            return False
        num_killed = sum(exit.cause is Cause.SIGNAL for exit in report.exits)
        remaining = self._growth.left(self._size - max(num_killed, 1))
        size = next((size for size in range(remaining, 0, -1) if fits(self._job, size)), 0)
        if size < (least := _min_ranks(self._job)):
            tell(
                f"not started again: machine and batch allow {plural(size, 'rank')}, and launch.local.min_ranks is "
                f"{least}; run the same command with --nproc {max(size, 1)}:{settings.nproc} to go on with fewer"
            )
            return False
        self._lost_at, self._num_restarts = step, self._num_restarts + 1
        newest = _newest(self._job)
        self._num_in_vain = self._num_in_vain + 1 if newest == self._saved_before else 0
        self._saved_before = newest
        wait_s = min(_LEAST_WAIT_S * 2 ** min(self._num_in_vain, 6), _MOST_WAIT_S)
        self._report(failure, step, size, wait_s)
        self._size = size
        return not self._stopping.wait(wait_s)

    def _report(self, failure: dict[str, Any], step: int, size: int, wait_s: float) -> None:
        """Print the loss, and append it to a file of the run."""
        saved = layout.step_number(_newest(self._job)) or 0
        loss = {
            "time": time.time(), "rank": failure["rank"], "host": failure.get("host") or socket.gethostname(),
            "step": step, "error": failure["error"], "message": failure["message"],
            "ranks_before": self._size, "ranks": size, "restart": self._num_restarts, "resumed_from": saved,
        }  # fmt: skip
        repeated = f"{plural(max(step - saved, 0), 'step')} to repeat" if saved else "from the beginning"
        most = self._job.settings.max_restarts
        tell(
            f"lost rank {loss['rank']} on {loss['host']} at step {step} ({loss['error']}: {loss['message']}); starting "
            f"again on {plural(size, 'rank')} in {wait_s:g} s, restart {self._num_restarts} of {most}, {repeated}"
        )
        try:
            with open(self._job.folder / layout.LOGS / layout.LOSSES, "a", encoding="utf-8") as file:
                file.write(json.dumps(loss) + "\n")
        except OSError as error:
            tell(f"warning: the loss could not be written to the run folder: {error}")

    def _start_again(self) -> bool:
        with self._lock:
            if self._num_stops:
                return False
            self._collector = ExitCollector(self._job.folder, self._size, self._job.url)
            self._growth.start(self._size)
            self._run = _start(self._job, self._size, self._growth.visible)
            return True

    def _consider_growth(self) -> None:
        """Stop the ranks, with a checkpoint, once more of them can be started."""
        if self._growth.due():
            with self._lock:
                if not self._num_stops:
                    self._growth.stopped = True
                    self._run.stop()


class _Growth:
    """What this machine can run: after a loss, and later, when a run on fewer ranks than it should have may grow."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.stopped = False
        """The ranks were stopped, to start ``size`` of them."""
        self.size = job.world_size
        self.visible: list[str] = []
        """The devices of the ranks, by local rank; empty: those that this process sees."""
        self._now, self._checked, self._checkpoint = job.world_size, 0.0, ""
        self._asked: Background[list[str]] | None = None

    def left(self, survivors: int) -> int:
        """Return the number of ranks that can be started now: one per device that opens. On a CPU as many as have
        survived, since a killed rank is usually one too many for the memory, but not fewer than
        ``launch.local.min_ranks``."""
        from harness.distributed import devices  # late: it imports torch

        device = self._job.config.runtime.device
        if device != "cpu" and (names := devices.visible_names()):
            self.visible = devices.working_names(names)[: self._job.world_size]
            if self.visible or device == "cuda":
                return len(self.visible)
        return max(survivors, _min_ranks(self._job))

    def start(self, size: int) -> None:
        """Begin a start on ``size`` ranks."""
        self.stopped, self._now, self._checkpoint, self._asked = False, size, _newest(self._job), None
        self.visible = self.visible[:size]

    def due(self) -> bool:
        """Return True once there is a new checkpoint and room for more ranks. Never blocks: another thread asks the
        devices, at each checkpoint."""
        if self.stopped or self._now == self._job.world_size or time.monotonic() < self._checked + _CHECK_S:
            return False
        self._checked = time.monotonic()
        if self._asked is None and (newest := _newest(self._job)) != self._checkpoint:
            self._checkpoint, self._asked = newest, Background(self._unused, "harness-devices")
        if self._asked is None or not self._asked.done():
            return False
        more, self._asked = [] if self._asked.exception() else self._asked.result(), None
        most = min(self._now + len(more) if self.visible else self._job.world_size, self._job.world_size)
        self.size = next(size for size in range(most, 0, -1) if fits(self._job, size))
        if self.size <= self._now:
            return False
        self.visible = [*self.visible, *more][: self.size] if self.visible else []
        return True

    def _unused(self) -> list[str]:
        """Return the devices that open and that no rank of the run uses."""
        from harness.distributed import devices

        unused = [name for name in devices.visible_names() if name not in self.visible] if self.visible else []
        return devices.working_names(unused)


def fits(job: Job, num_ranks: int) -> bool:
    """Return True if the batch, and the logical ranks, can be divided among ``num_ranks``."""
    logical = job.config.parallel.logical_ranks
    return num_ranks <= logical if logical else job.config.batch.misfit(num_ranks) is None


def _newest(job: Job) -> str:
    """Return the name of the newest checkpoint; empty if there is none."""
    try:
        return (job.folder / layout.CHECKPOINTS / layout.LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
