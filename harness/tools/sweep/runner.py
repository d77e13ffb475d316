"""Runs all trials: starts those that fit on the machine, watches them, and stores their results.

An interrupted trial (killed, or stopped by someone else) is started again and resumes from its checkpoint. A trial that
fails is reported and left. Neither stops the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.config.merge import typed
from harness.config.schema import Config
from harness.distributed import processes
from harness.distributed.signals import Requests, signal_name
from harness.errors import HarnessError
from harness.runs import layout
from harness.tools.sweep import process, results
from harness.tools.sweep.plan import Plan
from harness.tools.sweep.process import TrialEnd, TrialLogReader, TrialProcess, final_value
from harness.tools.sweep.slots import Grant, Slots, needed
from harness.tools.sweep.study import Study, SweepTrial

log = logging.getLogger("harness")

_POLL_S = 0.1
_STARTS = 3  # of a trial that is interrupted each time, per start of the sweep
_ORPHANS_S = 30.0  # for the processes of a killed trial to end by themselves with a checkpoint
_GRACE_S = 20.0  # in addition to launch.grace_s, for a launcher to report on ranks that it had to kill


@dataclass
class RunningTrial:
    """A running trial with its process and resources."""

    trial: SweepTrial
    config: Config
    process: TrialProcess
    reader: TrialLogReader
    grant: Grant
    reported: set[int]
    """Epochs whose evaluations the study has."""
    pruned: bool = False
    deadline: float = float("inf")
    """When it is killed, after it was asked to stop."""

    def stop(self) -> None:
        self.process.stop()
        self.deadline = min(self.deadline, time.monotonic() + self.config.launch.grace_s + _GRACE_S)


class Runner:
    """Runs the trials of ``study`` until none is left or a stop is requested; leaves ``trials``."""

    def __init__(
        self, plan: Plan, study: Study, environ: Mapping[str, str], lock: list[int], requests: Requests
    ) -> None:
        """Adopt the processes that killed trials leave behind. ``lock``: file descriptors that trials keep open;
        ``requests``: the stop signals so far."""
        self._plan, self._study = plan, study
        self._environ, self._lock, self._requests = environ, lock, requests
        self._folder = plan.file.spec.folder
        self._slots = Slots(plan.machine, plan.file.spec.parallel)
        self._running: dict[int, RunningTrial] = {}
        self._waiting: list[SweepTrial] = []  # interrupted ones, and one that waits for resources
        self._given_up: dict[int, str] = {}  # interrupted too often: {number: reason}
        self._starts: Counter[int] = Counter()
        self._stopping = 0
        self._changed = True
        self.trials: list[SweepTrial] = []
        self._bystanders = processes.adopt_orphans()

    def run(self) -> bool:
        """Run all trials; return True if each ended by itself, False if a stop was requested."""
        try:
            while True:
                self._obey_stops()
                if not self._stopping:
                    self._start_what_fits()
                self._publish()
                if not self._running:  # and any trial fits on the idle machine
                    return not self._stopping
                for running in list(self._running.values()):
                    self._watch(running)
                time.sleep(_POLL_S)
        finally:
            self._stop_all()

    # Starting

    def _start_what_fits(self) -> None:
        # A search draws as late as possible, when the most results are available: only when a trial might fit.
        while not self._slots.full:
            trial = self._waiting.pop(0) if self._waiting else self._study.start_next()
            if trial is None:
                return
            if (config := self._admit(trial)) is None:
                continue
            if (grant := self._slots.take(needed(config, self._plan.machine))) is None:
                self._waiting.insert(0, trial)
                return
            self._start(trial, config, grant)

    def _admit(self, trial: SweepTrial) -> Config | None:
        """Return the trial's configuration; None if it ends before it starts, which is stored and reported."""
        try:
            config = self._plan.config(trial.settings)
            lacking = needed(config, self._plan.machine).lacks(self._plan.machine)
        except HarnessError as error:  # a draw of a search can be invalid although all corners are valid
            lacking = " ".join(str(error).split())
        if lacking:
            self._study.fail(trial.number, lacking)
            self._message(trial, f"failed: {lacking}")
            return None
        reported = self._study.reported(trial.number)
        if reported and max(reported) < (config.train.epochs or math.inf) and self._study.should_prune(trial.number):
            self._study.prune(trial.number)
            self._message(trial, f"pruned after epoch {max(reported)}")
            return None
        return config

    def _start(self, trial: SweepTrial, config: Config, grant: Grant) -> None:
        folder = results.run_folder(self._folder, trial.number)
        command = process.launch_command(self._plan.file.base, self._plan.words(trial.settings), folder)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus)} if grant.gpus else {}
        reader = TrialLogReader(folder, self._plan.metric)
        reader.read()
        self._message(trial, f"{'resumes' if reader.step else 'starts'}: {' '.join(typed(trial.settings))}")
        started = TrialProcess(command, folder, {**self._environ, **gpus}, self._lock)
        reported = set(self._study.reported(trial.number))
        self._running[trial.number] = RunningTrial(trial, config, started, reader, grant, reported)
        self._starts[trial.number] += 1

    # Watching

    def _watch(self, running: RunningTrial) -> None:
        end = running.process.ended()  # before reading the log, which is complete if the process has ended
        running.reader.read()
        self._report(running)
        if end is not None:
            self._conclude(running, end)
        elif time.monotonic() > running.deadline:
            running.process.kill()

    def _report(self, running: RunningTrial) -> None:
        """Report new evaluations to the study in order; stop the trial at the first that the pruner rejects."""
        for epoch, value in sorted(running.reader.evaluations.items()):
            if running.pruned or epoch in running.reported:
                continue
            running.reported.add(epoch)
            self._study.report(running.trial.number, epoch, value)
            # After the last epoch pruning would save nothing.
            if epoch < (running.config.train.epochs or math.inf) and self._study.should_prune(running.trial.number):
                running.pruned = True
                running.stop()

    def _conclude(self, running: RunningTrial, end: TrialEnd) -> None:
        """Store and report the end of a trial; an interrupted one waits for another start."""
        trial, number = running.trial, running.trial.number
        del self._running[number]
        if end.how == "interrupted":
            processes.end_orphans(self._known(), 0.0 if running.process.killed else _ORPHANS_S)
        self._slots.give_back(running.grant)
        value = None
        if end.how == "done" and not running.pruned:
            value = final_value(results.run_folder(self._folder, number), self._plan.metric, self._plan.direction)
            if value is None:
                end = TrialEnd("failed", f"it ended without a finite {self._plan.metric}")
        if running.pruned:
            self._study.prune(number)
            self._message(trial, f"pruned after epoch {max(running.reported)}")
        elif value is not None:
            self._study.finish(number, value)
            self._message(trial, f"finished: {self._plan.metric} {value:.5g}")
        elif end.how == "failed":
            self._study.fail(number, end.why)
            self._message(trial, f"failed: {end.why}; see {results.run_folder(self._folder, number)}.log")
        elif self._stopping:
            self._message(trial, f"interrupted: {end.why}")
        elif self._starts[number] < _STARTS:
            self._waiting.append(trial)
            self._message(trial, f"interrupted, will be restarted: {end.why}")
        else:
            self._given_up[number] = end.why
            self._message(trial, f"interrupted {_STARTS} times, will not be restarted: {end.why}")

    # The sweep as a whole

    def _obey_stops(self) -> None:
        """Stop all trials: at the first signal with a checkpoint, at the second at once."""
        if (asked := len(self._requests.numbers)) <= self._stopping:
            return
        if not self._stopping:
            which = signal_name(self._requests.numbers[0])
            log.info(
                "stopping (%s): running trials will write a checkpoint; Ctrl-C or another signal kills them", which
            )
        for running in self._running.values():
            if self._stopping:
                running.process.kill()
            else:
                running.stop()
        self._stopping = asked

    def _publish(self) -> None:
        """Write ``sweep.json`` if anything changed."""
        if self._changed:
            self._changed = False
            self.trials = [self._as_known_here(trial) for trial in self._study.trials()]
            results.write(self._folder / layout.SWEEP, self._plan, self.trials)

    def _as_known_here(self, trial: SweepTrial) -> SweepTrial:
        """Return ``trial`` with its state in this process; the study only stores that it was started."""
        if trial.state != "running" or trial.number in self._running:
            return trial
        if why := self._given_up.get(trial.number):
            return replace(trial, state="failed", error=f"{why}; run the same command to resume it")
        return replace(trial, state="waiting")

    def _message(self, trial: SweepTrial, text: str) -> None:
        self._changed = True
        log.info("trial %s %s", results.run_name(trial.number), text)

    def _known(self) -> set[int]:
        return self._bystanders | {running.process.pid for running in self._running.values()}

    def _stop_all(self) -> None:
        """Leave no process running after any error."""
        for running in self._running.values():
            running.process.stop()
        for running in self._running.values():
            running.process.wait(running.config.launch.grace_s)
        self._running.clear()
        processes.end_orphans(self._known(), _ORPHANS_S)
