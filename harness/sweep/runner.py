"""All trials from first to last: start what fits on the machine, watch it, judge it, and take note.

A trial that was interrupted (killed, or asked to stop by somebody else) is started again and goes on from its
checkpoint; one that failed by itself is told and left. Neither stops the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness.config.schema import Config
from harness.errors import HarnessError
from harness.runs import layout
from harness.sweep import process, results
from harness.sweep.board import Board
from harness.sweep.plan import Plan
from harness.sweep.process import How, Process
from harness.sweep.progress import Progress, Reader, final_value
from harness.sweep.slots import Grant, Slots, need
from harness.sweep.space import typed
from harness.sweep.study import Study, Trial

_POLL_S = 0.1
_STARTS = 3  # of a trial that is interrupted each time, in one sweep
_GRACE_S = 20.0  # beyond launch.grace_s, for a launcher to report on ranks that it had to kill


@dataclass
class Running:
    """A trial that runs, with what it was given."""

    trial: Trial
    config: Config
    process: Process
    reader: Reader
    grant: Grant
    judged: set[int]  # epochs whose evaluations the study knows
    given_up: bool = False
    deadline: float = float("inf")  # when it is killed, having been asked to end

    def stop(self) -> None:
        self.process.stop()
        self.deadline = min(self.deadline, time.monotonic() + self.config.launch.grace_s + _GRACE_S)


class Runner:
    """Runs the trials of ``study`` until none is left, or until somebody asks for the end."""

    def __init__(
        self, plan: Plan, study: Study, board: Board, environ: Mapping[str, str], lock: int, stops: Callable[[], int]
    ) -> None:
        """``lock``: a file descriptor that trials keep open; ``stops``: how often somebody has asked for the end."""
        self._plan, self._study, self._board = plan, study, board
        self._environ, self._lock, self._stops = environ, lock, stops
        self._folder = plan.file.sweep.folder
        self._slots = Slots(plan.machine, plan.parallel)
        self._next: Trial | None = None  # begun, and waiting for room
        self._running: dict[int, Running] = {}
        self._again: list[Trial] = []  # interrupted, and to be started once more
        self._interrupted: dict[int, str] = {}  # by number: those that were so too often, and how
        self._starts: Counter[int] = Counter()
        self._stopping = 0
        self._changed = True
        self.trials: list[Trial] = []
        self.seen: dict[int, Progress] = {}  # how far trials came, by number
        self._bystanders = process.adopt_orphans()

    def run(self) -> bool:
        """Whether all trials came to an end of their own; False if somebody asked to stop."""
        try:
            while True:
                self._obey()
                if not self._stopping:
                    self._start_what_fits()
                self._take_note()
                if not self._running:  # and there was room for any trial
                    return not self._stopping
                for running in list(self._running.values()):
                    self._look_after(running)
                time.sleep(_POLL_S)
        finally:
            self._abandon()
            self._board.close()

    # Starting

    def _start_what_fits(self) -> None:
        while trial := self._next or self._pick():
            self._next = None
            config = self._admit(trial)
            if config is None:
                continue
            grant = self._slots.take(need(config, self._plan.machine))
            if grant is None:
                self._next = trial
                return
            self._start(trial, config, grant)

    def _pick(self) -> Trial | None:
        """A trial to start, if there is room at all: a search draws as late as it can, knowing all that is over."""
        if self._slots.full:
            return None
        return self._again.pop(0) if self._again else self._study.begin()

    def _admit(self, trial: Trial) -> Config | None:
        """Its configuration; None for a trial that is over before it starts, which is told and noted."""
        self._changed = True
        try:
            config = self._plan.config(trial.settings)
            lacking = need(config, self._plan.machine).lacks(self._plan.machine)
        except HarnessError as error:  # a draw that no corner of the space foretold
            lacking = " ".join(str(error).split())
        if lacking:
            self._study.fail(trial.number, lacking)
            self._tell(trial, f"failed: {lacking}")
            return None
        known = self._study.reported(trial.number)
        if known and max(known) < config.train.epochs and self._study.hopeless(trial.number):
            self._study.prune(trial.number)
            self._tell(trial, f"pruned after epoch {max(known)}")
            return None
        return config

    def _start(self, trial: Trial, config: Config, grant: Grant) -> None:
        name, output = results.run_name(trial.number), self._folder / layout.TRIALS
        command = process.command(self._plan.file.base, self._plan.words(trial.settings), name, output)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus)} if grant.gpus else {}
        reader = Reader(output / name, self._plan.metric)
        reader.read()
        self._tell(trial, f"{'resumes' if reader.progress.step else 'starts'}: {' '.join(typed(trial.settings))}")
        started = Process(command, output / name, {**self._environ, **gpus}, [self._lock])
        known = set(self._study.reported(trial.number))
        self._running[trial.number] = Running(trial, config, started, reader, grant, known)
        self._starts[trial.number] += 1

    # Watching

    def _look_after(self, running: Running) -> None:
        end = running.process.ended()  # asked before the record is read, which then is whole
        running.reader.read()
        self.seen[running.trial.number] = running.reader.progress
        self._judge(running)
        if end is not None:
            self._conclude(running, *end)
        elif time.monotonic() > running.deadline:
            running.process.kill()

    def _judge(self, running: Running) -> None:
        """Tell the study of new evaluations, in their order; what it says of the first that is too bad, holds."""
        for epoch, value in sorted(running.reader.evaluations.items()):
            if running.given_up or epoch in running.judged:
                continue
            running.judged.add(epoch)
            self._study.report(running.trial.number, epoch, value)
            # After the last epoch there is nothing left to save.
            if epoch < running.config.train.epochs and self._study.hopeless(running.trial.number):
                running.given_up = True
                running.stop()

    def _conclude(self, running: Running, how: How, why: str) -> None:
        trial, number = running.trial, running.trial.number
        del self._running[number]
        self._changed = True
        if how == "interrupted":
            process.end_orphans(self._known(), running.process.killed)
        self._slots.give_back(running.grant)
        if running.given_up:
            self._study.prune(number)
            self._tell(trial, f"pruned after epoch {max(running.judged)}")
        elif how == "done":
            value = final_value(results.run_folder(self._folder, number), self._plan.metric, self._plan.direction)
            if value is None:
                how, why = "failed", f"it ended without a finite {self._plan.metric}"
            else:
                self._study.finish(number, value)
                self._tell(trial, f"finished: {self._plan.metric} {value:.5g}")
        if how == "failed" and not running.given_up:
            self._study.fail(number, why)
            self._tell(trial, f"failed: {why}; see {self._folder / layout.TRIALS / results.run_name(number)}.log")
        elif how == "interrupted" and not running.given_up:
            self._after_interruption(trial, why)

    def _after_interruption(self, trial: Trial, why: str) -> None:
        if self._stopping:
            self._tell(trial, why)
        elif self._starts[trial.number] < _STARTS:
            self._again.append(trial)
            self._tell(trial, f"{why}; it will be started again")
        else:
            self._interrupted[trial.number] = why
            self._tell(trial, f"{why}, {_STARTS} times: given up for now")

    # The whole

    def _obey(self) -> None:
        """Stop trials as often as was asked for: first with a checkpoint, then at once."""
        if (asked := self._stops()) <= self._stopping:
            return
        if not self._stopping:
            self._board.say("stopping: running trials write a checkpoint; once more ends them at once")
        for running in self._running.values():
            running.process.kill() if self._stopping else running.stop()
        self._stopping = asked

    def _take_note(self) -> None:
        """Write ``sweep.json`` if anything is new, and show it."""
        if self._changed:
            self._changed = False
            self.trials = [self._as_seen_here(trial) for trial in self._study.trials()]
            results.write(self._folder / layout.SWEEP, self._plan, self.trials)
        self._board.show(self.trials, self.seen)

    def _as_seen_here(self, trial: Trial) -> Trial:
        """``trial`` of the study, which only knows that it was begun."""
        if trial.state != "running" or trial.number in self._running:
            return trial
        if why := self._interrupted.get(trial.number):
            return replace(trial, state="failed", error=f"{why}; the same command goes on with it")
        return replace(trial, state="waiting")

    def _tell(self, trial: Trial, what: str) -> None:
        self._board.say(f"trial {results.run_name(trial.number)} {what}")

    def _known(self) -> set[int]:
        return self._bystanders | {running.process.pid for running in self._running.values()}

    def _abandon(self) -> None:
        """Leave nothing running, whatever went wrong."""
        for running in self._running.values():
            running.process.stop()
        for running in self._running.values():
            running.process.wait(running.config.launch.grace_s)
        self._running.clear()
        process.end_orphans(self._known())
