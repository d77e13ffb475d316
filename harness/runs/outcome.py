"""The outcome of a run, judged from the exits of its ranks: one exit code, one report, one failure.json."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness.distributed import signals
from harness.distributed.agreement import rank_names
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit
from harness.errors import (
    EXIT_DATA,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_OWN_CODE,
    EXIT_STOPPED,
    EXIT_USAGE,
    EXITS_BY_SIGNAL,
    HarnessError,
)
from harness.runs import layout
from harness.runs.exit_files import ExitFiles
from harness.runs.files import text_or_empty, write_atomically
from harness.runs.url_store import UrlStore

# Exit codes of ranks that were asked to stop; SIGTERM kills a rank that has not installed its handler yet.
_STOPPED = {EXIT_STOPPED, *EXITS_BY_SIGNAL, -signal.SIGTERM}
_WORDS = {
    Cause.DONE: "done", Cause.STOPPED: "stopped", Cause.ERROR: "failed", Cause.PEER_LOST: "lost contact",
    Cause.LAUNCHER_LOST: "lost contact with the launcher", Cause.HUNG: "hung",
}  # fmt: skip
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "sent by the OOM killer, a user or a scheduler",
    signal.SIGABRT: "a C++ library aborted; see the rank's log; with gloo, the usual cause is that ranks called "
    "different collectives",
}


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, for its launcher."""

    exit_code: int
    text: str
    """The report for the terminal."""
    failure: dict[str, Any] | None = None
    """The content of failure.json; None if the run did not fail."""


def judge(
    exits: Sequence[RankExit], stopped: bool = False, world_size: int = 1, folder: str = "", number: int = 0
) -> RunOutcome:
    """Return the outcome of the run in ``folder``, from ``exits``, the exits of its ranks. Of two errors, the earlier
    one in ``exits`` is the first. ``ExitCollector`` puts the failure first on which the ranks have agreed through their
    store. Then come the ranks' own records, by the clocks of their machines, which may differ by more than it takes an
    error to reach the other ranks: without an agreement, a consequence may be taken for the cause. The last are those
    that the engine saw, in the order in which they ended.

    ``exits`` may hold the rank's own record and what the engine saw of the same rank; then the own one counts, since a
    library that aborts after training does no harm. ``stopped``: a user requested the stop, with the signal ``number``
    if it is known.

    The cause of a failure is the first of these that there is:

    1. an error of a rank that has a step, or a rank that hung;
    2. a killed rank, unless a rank that ended before it explains it, or the user requested the stop and no rank failed;
    3. a lost machine, pod, worker or process;
    4. a rank that lost its peers or its launcher.

    An exit has a step if its rank recorded it after this start had claimed the run folder. Without any of these the run
    is done, stopped, or ended before that.
    """
    recorded = {exit.rank for exit in exits if exit.made_by_rank}
    usable = [exit for exit in exits if exit.made_by_rank or exit.cause is Cause.NODE_LOST or exit.rank not in recorded]
    if (first := _first_failure(usable, stopped)) is None:
        codes = {exit.exit_code for exit in usable}
        code = signals.ended_by(number or signal.SIGTERM) if stopped else 0
        return _without_failure(codes, code, folder)
    if first.rank is None:
        first = replace(first, rank=next((rank for rank in range(world_size) if rank not in recorded), 0))
    if not first.made_by_rank:  # the records of the other ranks have a step and a host
        host = next((exit.host for exit in usable if exit.made_by_rank and exit.rank == first.rank), "")
        first = replace(first, host=host, step=max((exit.step or 0 for exit in usable), default=0))
    usable.sort(key=lambda exit: (exit.made_by_rank, exit.time))  # of several exits of a rank the last one is described
    last = {exit.rank: exit for exit in usable}
    ranks = {
        str(rank): _describe(last[rank], "" if rank == first.rank else first.message)
        for rank in sorted(rank for rank in last if rank is not None)
    }
    unknown = {name for name in ("host", "hint", "time") if not getattr(first, name)}
    failure = {name: value for name, value in asdict(first).items() if name not in unknown} | {"ranks": ranks}
    return RunOutcome(first.exit_code, _failure_text(failure, folder), failure)


def _first_failure(exits: Sequence[RankExit], stopped: bool) -> RankExit | None:
    """Return the cause of the failure, by the order that ``judge`` documents."""
    in_the_run = [exit for exit in exits if exit.step is not None]
    early = [exit for exit in exits if exit.step is None]  # by the engine, or of ranks that ended before the run began

    def first(among: Sequence[RankExit], *causes: Cause) -> RankExit | None:
        return next((exit for exit in among if exit.cause in causes), None)

    if error := first(in_the_run, Cause.ERROR, Cause.HUNG):
        return error
    consequence = first(in_the_run, Cause.PEER_LOST, Cause.LAUNCHER_LOST)
    # The engine itself kills the others after a rank that ended without a record, which then comes before them.
    killed = first(early, Cause.SIGNAL, Cause.ERROR)
    is_requested = stopped and consequence is None  # a rank that does not stop in time is killed
    if killed is not None and killed.cause is Cause.SIGNAL and not is_requested:
        reason = _SIGNALS.get(-killed.exit_code, "see its log")
        message = f"the process received {signals.signal_name(-killed.exit_code)} ({reason})"
        return replace(killed, error="Killed", message=message, exit_code=EXIT_FAILURE)
    if lost := first(early, Cause.NODE_LOST) or first(in_the_run, Cause.NODE_LOST):
        return replace(lost, error="Lost")
    return consequence


def _without_failure(codes: set[int], stopped: int, folder: str) -> RunOutcome:
    """``stopped``: the exit code of a run that was stopped without a checkpoint; 0: no stop was requested."""
    code = _code_without_failure(codes, stopped)
    if code == EXIT_DONE:
        return RunOutcome(code, f"done: {folder}")
    if code in EXITS_BY_SIGNAL and codes <= _STOPPED:
        return RunOutcome(code, f"stopped before the run began: {folder}; the same command starts it again")
    if code == EXIT_STOPPED:
        return RunOutcome(code, f"stopped early with a checkpoint: {folder}; the same command resumes from it")
    if stopped:
        return RunOutcome(code, f"ended on request, without a new checkpoint: {folder}")
    return RunOutcome(code, f"ended with exit code {code} before the run began; the error is printed above")


def _code_without_failure(codes: set[int], stopped: int) -> int:
    """Return the exit code of the run whose ranks ended with ``codes``, by the first line that fits:

    some rank found an error of the configuration, data or own code   its code
    all were done, or stopped; some of them with a checkpoint         EXIT_STOPPED
    all were done                                                     EXIT_DONE
    some were done, the others stopped before they began              EXIT_FAILURE
    a user requested the stop, or some rank ended by a signal         the code of the signal
    otherwise                                                         EXIT_FAILURE
    """
    for code in (EXIT_USAGE, EXIT_DATA, EXIT_OWN_CODE):
        if code in codes:
            return code
    if codes <= {EXIT_DONE, *_STOPPED}:
        if EXIT_STOPPED in codes:
            return EXIT_STOPPED
        if EXIT_DONE in codes:
            return EXIT_DONE if len(codes) == 1 else EXIT_FAILURE
    return stopped or next((code for code in EXITS_BY_SIGNAL if code in codes), EXIT_FAILURE)


def _failure_text(failure: Mapping[str, Any], folder: str) -> str:
    # Without the traceback and the hint: the rank printed them, and failure.json has them.
    host = f" on {failure['host']}" if failure.get("host") else ""
    message = next(iter(str(failure["message"]).strip().splitlines()), "")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in failure["ranks"].items():
        if int(rank) != failure["rank"]:
            ranks_by_text.setdefault(text, []).append(int(rank))
    lines = [
        f"failed: rank {failure['rank']}{host} at step {failure['step']}: {failure['error']}: {message}",
        *(f"  {rank_names(ranks)}: {text}" for text, ranks in ranks_by_text.items()),
        f"logs: {folder}/{layout.LOGS}; report: {folder}/{layout.FAILURE}",
    ]
    return "\n".join(lines)


def _describe(exit: RankExit, first_message: str) -> str:
    """Return a line for the report, without the message of the first failure, which all ranks may raise."""
    if exit.cause is Cause.NODE_LOST or (not exit.made_by_rank and exit.message):
        return exit.message
    if exit.cause is Cause.SIGNAL:
        return f"killed by {signals.signal_name(-exit.exit_code)}, left no record"
    if not exit.made_by_rank:
        return f"exit code {exit.exit_code}, left no record"
    step = "" if exit.step is None else f" at step {exit.step}"
    doing = f", in {exit.doing}" if exit.doing and exit.cause is not Cause.PEER_LOST else ""
    reason = f" ({exit.message.strip().partition(chr(10))[0]})" if exit.message not in ("", first_message) else ""
    return f"{_WORDS[exit.cause]} on {exit.host}{step}{doing}; exit code {exit.exit_code}{reason}"


class ExitCollector:
    """Collects what the ranks of one start leave in their run folder, and determines its outcome.

    Create it before that start: files that already exist belong to an earlier one. ``url``: where the run is kept, if
    not in ``folder``, which may then be on another machine's disk, or removed. Raises ConfigError if the URL cannot be
    read.
    """

    def __init__(self, folder: Path, world_size: int = 1, url: str = "") -> None:
        self._folder, self._world_size = folder, world_size
        self._failure = folder / layout.FAILURE
        self._exit_files = ExitFiles(folder)
        self._url = UrlStore(url) if url else None
        self._start = self._url.read(layout.START) if self._url else None
        self._earlier_local_start = text_or_empty(folder / layout.START)
        self._shown = url or str(folder)

    def conclude(self, report: EngineReport) -> RunOutcome:
        """Return the outcome of a run whose end the engine observed as ``report``. A failure is also written as
        failure.json."""
        outcome, is_at_url = self._judge(report)
        if outcome.failure and outcome.failure["cause"] is Cause.SIGNAL:  # not the run's own fault
            newest = text_or_empty(self._folder / layout.CHECKPOINTS / layout.LATEST).strip()
            hint = f"the same command resumes from {newest or 'the newest checkpoint, if there is one'}"
            outcome = replace(outcome, text=f"{outcome.text}\n-> {hint}", failure=outcome.failure | {"hint": hint})
        if outcome.failure:
            self._write(json.dumps(outcome.failure, indent=1) + "\n", is_at_url)
        return outcome

    def preview(self, report: EngineReport) -> RunOutcome:
        """Return ``conclude`` without writing anything about it, for a run that may start again."""
        return self._judge(report)[0]

    def _judge(self, report: EngineReport) -> tuple[RunOutcome, bool]:
        """Return the outcome, and whether this start has written at the URL."""
        at_url = dict[str, RankExit]()
        is_at_url = self._fetch(at_url)
        agreed = at_url.pop(layout.FAILURE, None)
        first = self._exit_files.first() or agreed  # on which the ranks have agreed, if they could
        recorded = {exit.rank: exit for exit in (*at_url.values(), *self._exit_files.read().values())}.values()
        exits = [*([first] if first else []), *sorted(recorded, key=lambda exit: exit.time), *report.exits]
        world_size = report.world_size or self._world_size
        return judge(exits, report.stopped, world_size, self._shown, report.signal), is_at_url

    def _fetch(self, records: dict[str, RankExit]) -> bool:
        """Add the ``records`` at the URL, by file. False if this start has not written there, or if a later start has
        taken the run over, according to this machine's ``start.json``, if there is one."""
        if self._url is None:
            return False
        try:
            start, local_start = self._url.read(layout.START), text_or_empty(self._folder / layout.START)
            if start in ("", self._start) or local_start not in ("", self._earlier_local_start, start):
                return False
            for name in self._url.files():
                if name == layout.FAILURE or fnmatch(name, f"{layout.LOGS}/{layout.RANK_EXITS}"):
                    with suppress(ValueError):  # it is damaged, or empty: a rank that still runs may have removed it
                        records[name] = RankExit.from_json(self._url.read(name))
        except (HarnessError, OSError) as error:
            print(f"could not fetch the ranks' records: {error}", file=sys.stderr)
            return False
        return True

    def _write(self, failure: str, to_url: bool) -> None:
        if self._folder.is_dir():
            with suppress(OSError):
                write_atomically(self._failure, failure)
        if to_url and self._url:
            with suppress(HarnessError):
                self._url.write(layout.FAILURE, failure)
