"""Reporting how this rank ended: its exit record, failure.json, the terminal, and the peers.

What ends a rank, and the cause and the exit code in its record:

- training ends, or all ranks have agreed to stop: done, 0, or stopped, 75
- its own error: error, the error's code; published as the launch's first failure, if there is none yet
- an error that all ranks raise (``Runtime.together``): peer_lost with the error's code, but for the rank it comes from
- a collective that fails: peer_lost, the first failure's code; the rank that it waited for is published, if it is found
- the main thread is blocked after any of these, or its launcher is gone: the watchdog makes the record, and its thread
  ends the process

A rank that has not met the others writes its record only for torch's launcher and for a sweep (``exit_files.EARLY``).
harness.runs.outcome judges the records.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.data.loader_workers import worker_death
from harness.distributed import collective_errors, stack
from harness.distributed.collective_errors import CollectiveError, Fault
from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.store import PeersMissing
from harness.distributed.watchdog import Watchdog
from harness.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    HarnessError,
    OwnCodeError,
    TrainingError,
    exit_code_of,
    first_line,
    has_remedy,
    is_of_machine,
    readable,
    reason,
    remedy,
    users_line,
    without_harness,
)  # fmt: skip
from harness.runs import console, exit_files, layout
from harness.runs.run_dir import RunFolder
from harness.training.measuring import memory
from harness.training.reproducibility import determinism
from harness.training.run import Run

log = logging.getLogger("harness")

_PRINT_S = 20.0  # for local rank 0 to print an early error; torch's launcher cuts it short once that has exited


class ExitReporter:
    """Writes this rank's RankExit once. ``folder`` and ``run`` are set as soon as they are there; before it has a
    ``folder`` it reports only to the terminal and the other ranks, and without ``shown`` only to the ranks."""

    def __init__(self, runtime: Runtime, folder: RunFolder | None = None, shown: bool = True) -> None:
        self._runtime, self.folder, self._shown = runtime, folder, shown
        self.run: Run | None = None

    def step(self) -> int | None:
        """Return the number of steps so far; None before this start has claimed the run folder."""
        return self.run.step if self.run else 0 if self._claimed else None

    @property
    def _claimed(self) -> RunFolder | None:
        return self.folder if self.folder and self.folder.claimed else None

    def ended(self, done: bool, reason: str) -> int:
        """Report that training is done or was stopped; return the exit code."""
        cause, code = (Cause.DONE, EXIT_DONE) if done else (Cause.STOPPED, EXIT_STOPPED)
        return self._write(self._record(cause, code, message=reason))

    def blocked(self, record: RankExit, first: RankExit | None) -> None:
        """Write ``record``, with which the watchdog is about to end this rank. ``first``: the launch's first failure,
        if it is known."""
        self._write(record)
        if first and self._claimed:
            exit_files.write_first(self._claimed.path, first)
        if self.folder:
            self.folder.detach(self._runtime.rank, done=False)

    def failed(self, error: BaseException, watchdog: Watchdog) -> int:
        """Report ``error``: in failure.json and on the terminal by the rank that failed first, and in every rank's log.
        Returns the exit code, which is that of the first failure."""
        self._runtime.failed, error = True, readable(error)
        lost = lost_peer(error)
        missing = watchdog.missing(stack.raised_at(error), lost.fault is Fault.TIMEOUT) if lost else None
        failure = TrainingError(f"lost contact with rank {missing.rank}") if missing else explained(error, self.run)
        by_peer = isinstance(error, HarnessError) and error.origin_rank not in (None, self._runtime.rank)
        record = self._record(
            Cause.PEER_LOST if by_peer or lost else Cause.ERROR,
            exit_code_of(failure),
            doing=stack.raised_at(error), traceback=traceback.format_exception(error), **_told(failure),
        )  # fmt: skip
        if by_peer:  # all ranks raise this error, and the rank that it comes from reports it
            watchdog.acknowledge()
            return self._write(record)
        reported = missing or record
        first = watchdog.publish_failure(reported) or reported
        if self._claimed:
            first = exit_files.write_first(self._claimed.path, first)
        else:
            exit_files.write_early(first)
        watchdog.stalls.release()
        is_own = first.rank == record.rank and first.cause is Cause.HUNG  # as the other ranks have found
        code = self._write(first if is_own else replace(record, exit_code=first.exit_code))
        if first != reported:
            see = f"; see {self.folder.where}/{layout.FAILURE}" if self.folder else ""
            log.info("exiting: rank %s failed first%s", first.rank, see, extra=console.OF_NODE)
            return code
        if self._shown:
            self._show(reported, failure)
        watchdog.linger()
        return code

    def _show(self, record: RankExit, error: BaseException) -> None:
        """Print the launch's first failure: that of another rank that cannot report it itself, or ``error``."""
        if record.cause in (Cause.HUNG, Cause.NODE_LOST):
            who = f"rank {record.rank}{f' on {record.host}' if record.host else ''}"
            trace = "".join(["\n", *record.traceback]).rstrip()
            log.error("error: lost contact with the other ranks: %s: %s%s", who, record.message, trace)
        else:
            folder = self._claimed
            show(error, record.traceback, f"{folder.where}/{layout.FAILURE}" if folder else "")

    def _record(self, cause: Cause, code: int, **others: Any) -> RankExit:
        return RankExit.now(self._runtime.rank, cause, code, step=self.step(), **others)

    def _write(self, record: RankExit) -> int:
        """Write the record of this rank; return its exit code."""
        if self._claimed:
            exit_files.write(self._claimed.logs, record)
        exit_files.write_for_torch(self._runtime.launch, record)
        return record.exit_code


def failed_early(launch: Launch, error: BaseException) -> int:
    """Report an error before the ranks have connected; return the exit code. A HarnessError occurs on every local rank;
    only local rank 0 prints it, and a rank that may have been started without one."""
    error = readable(error)
    failure = explained(error)
    record = RankExit.now(
        launch.rank, Cause.PEER_LOST if lost_peer(error) or isinstance(error, PeersMissing) else Cause.ERROR,
        exit_code_of(failure), **_told(failure),
    )  # fmt: skip
    exit_files.write_for_torch(launch, record)
    exit_files.write_early(record)
    if not isinstance(failure, HarnessError) or launch.local_rank == 0 or (failure.unmet and not launch.supervised):
        show(failure, traceback.format_exception(error))
    elif launch.elastic and not launch.orphaned:
        time.sleep(_PRINT_S)  # the launcher ends all ranks at the first exit, also local rank 0 before it has printed
    return record.exit_code


def show(error: BaseException, trace: Sequence[str], log_file: str = "") -> None:
    """Print ``error``, and its traceback ``trace`` unless its text explains it. Of an error in the user's own code, the
    first line names its place, and calls within the harness are left to the file ``log_file``, if there is one."""
    if isinstance(error, HarnessError):
        cause = error.__cause__ if isinstance(error, OwnCodeError) else None
        led = without_harness(traceback.format_exception(cause)) if cause else ()
        log.error("%s", "".join([f"error: {error}\n", *led]).rstrip())
        log.debug("%s", "".join(trace).rstrip())
    else:
        trace = getattr(error.__cause__, "worker_trace", trace)  # which alone has calls of the user's
        where = users_line(error)
        heading = f"error: {where}: {type(error).__name__}: {first_line(error, '')}\n" if where else ""
        calls = without_harness(trace) if heading and log_file else trace
        more = f"\n  -> {log_file} has the traceback with the calls of the harness" if len(calls) < len(trace) else ""
        log.error("%s%s%s", heading, "".join(calls).rstrip(), more)


def _told(error: BaseException) -> dict[str, str]:
    """Return the fields of a record that tell of ``error``, and of the line of the user's code that it comes from."""
    where, message, hint = users_line(error), str(error), ""
    if isinstance(error, HarnessError):
        where, message, hint = error.where, error.message, error.hint
    return {"error": type(error).__name__, "message": f"{where}: {message}" if where else message, "hint": hint}


def explained(error: BaseException, run: Run | None = None) -> BaseException:
    """Return ``error``, or another that explains it if its own text does not. ``run``: in which it was raised, if it is
    built."""
    if isinstance(error, SystemExit):
        return OwnCodeError(
            f"the code called sys.exit({error.code!r}) before the end",
            where=users_line(error) or stack.raised_at(error), hint="raise an error instead",
        )  # fmt: skip
    if failure := collective_errors.diagnose(error):
        if failure.fault is Fault.OWN:
            hint = failure.hint or "NCCL_DEBUG=INFO shows what NCCL did before"
            return TrainingError(f"a collective failed: {failure.text}", where=stack.raised_at(error), hint=hint)
        return TrainingError(
            f"lost contact with the other ranks: {failure.text}",
            hint=failure.hint or "see the log of the rank that ended first; a rank that was killed leaves no message",
        )
    if explanation := memory.out_of_memory_error(error, run) or determinism.explained(error):
        return explanation
    if isinstance(error, OSError) and has_remedy(error):
        own_line = "" if is_of_machine(error) else users_line(error)
        text = f"{type(error).__name__}: {first_line(error)}"
        return (OwnCodeError if own_line else TrainingError)(
            text if own_line else f"a file could not be read or written: {reason(error)}",
            where=own_line or str(error.filename or ""),
            hint=remedy(
                error, "run the same command again; training resumes from its newest checkpoint, if there is one"
            ),
        )
    return (worker_death(error) if isinstance(error, Exception) else None) or error


def lost_peer(error: BaseException) -> CollectiveError | None:
    """Return the meaning of the error of a collective in which this rank waited for another one; else None."""
    failure = collective_errors.diagnose(error)
    return failure if failure and failure.fault is not Fault.OWN else None
