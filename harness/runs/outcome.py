"""How a run ended, over all its ranks: one report and one exit code, from what the ranks left and the engine saw."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness.distributed.monitor import Outcome
from harness.distributed.stack import signal_name
from harness.errors import EXIT_DATA, EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, HarnessError
from harness.runs import layout, rank_exit
from harness.runs.files import identity, write_atomically
from harness.runs.rank_exit import LOST_CONTACT, End
from harness.runs.storage import UrlStore

# Of a rank that was asked to stop; the last before it had begun to listen.
_AS_ASKED = {EXIT_STOPPED, -signal.SIGTERM}


@dataclass(frozen=True)
class Conclusion:
    exit_code: int
    text: str


class Aftermath:
    """The small files of a run folder, before a start and after it."""

    def __init__(self, folder: Path, world_size: int = 1, url: str = "") -> None:
        """To be made before the run is started: what lies there then is of an earlier one. ``world_size`` is that of
        the start, as far as it is known. ``url``: where the run is kept if not in ``folder``, which then may be on
        another machine's disk, or gone. Raises ConfigError where that cannot be read."""
        self._folder, self._world_size = folder, world_size
        self._failure = folder / layout.FAILURE
        self._before = identity(self._failure)
        self._url = UrlStore(url) if url else None
        self._start = self._url.read(layout.START) if self._url else None
        self._shown = url or str(folder)
        # Remembered, not removed: another machine's ranks may be writing theirs to the same disk.
        self._earlier = rank_exit.read(folder / layout.LOGS)

    def conclude(self, outcome: Outcome) -> Conclusion:
        """The report on the run that ``outcome`` was seen of; a failure is also left as ``failure.json``, with what is
        known of each rank under ``ranks``."""
        begun = self._bring_home()
        left = rank_exit.since(self._earlier, self._folder / layout.LOGS)
        told = _read(self._failure) if identity(self._failure) != self._before else None
        failure = _first_failure(told, left, outcome, outcome.world_size or self._world_size)
        if failure is None:
            # What a rank wrote at its end counts: a library that aborts later, as Python is torn down, does no harm.
            codes = {*(outcome.exits | {rank: end.exit_code for rank, end in left.items()}).values()}
            code = _quiet_code(codes, outcome.stopped)
            text = self._quiet_text(code, codes, outcome.stopped)
            if begun and code == EXIT_DONE:
                shutil.rmtree(self._folder, ignore_errors=True)  # the URL has it
            return Conclusion(code, text)
        failure["ranks"] = _each(left, outcome)
        if self._folder.is_dir():
            with contextlib.suppress(OSError):
                write_atomically(self._failure, json.dumps(failure, indent=1) + "\n")
        if begun and self._url:
            with contextlib.suppress(HarnessError):
                self._url.write(layout.FAILURE, json.dumps(failure, indent=1) + "\n")
        return Conclusion(int(failure["exit_code"]), self._report(failure))

    def _bring_home(self) -> bool:
        """Fetch what the ranks left at the URL, if this start got as far as to write there."""
        if self._url is None:
            return False
        try:
            if self._url.read(layout.START) in ("", self._start):
                return False
            for name in self._url.files():
                if name in (layout.FAILURE, layout.SUMMARY) or fnmatch(name, f"{layout.LOGS}/{layout.RANK_EXITS}"):
                    self._url.get(name, self._folder / name)
        except (HarnessError, FileNotFoundError) as error:
            print(f"what the ranks left cannot be fetched: {error}", file=sys.stderr)
            return False
        return True

    def _quiet_text(self, code: int, codes: set[int], stopped: bool) -> str:
        if code == EXIT_DONE:
            summary = _read(self._folder / layout.SUMMARY) or {}
            best = summary.get("best") or {}
            shown = "".join(f"; best {name} {value:.4f} at step {best.get('step')}" for name, value in best.items()
                            if name != "step" and isinstance(value, float))  # fmt: skip
            return f"done: {self._shown}, {summary.get('step', '?')} steps{shown}"
        if code == EXIT_STOPPED and EXIT_STOPPED not in codes:
            return f"stopped before it had begun: {self._shown}; the same command goes on with what is there"
        if code == EXIT_STOPPED:
            return f"stopped early with a checkpoint: {self._shown}; the same command goes on from it"
        if stopped:
            return f"ended as asked, before there was a new checkpoint: {self._shown}"
        return f"ended with exit code {code} before the run began; what is wrong is said above"

    def _report(self, failure: dict[str, Any]) -> str:
        # No traceback: the rank showed it on its terminal, and failure.json has it.
        where = f" on {failure['host']}" if failure.get("host") else ""
        lines = [f"failed: rank {failure['rank']}{where} at step {failure['step']}: "
                 f"{failure['error']}: {failure['message']}"]  # fmt: skip
        lines += [f"  rank {rank}: {said}" for rank, said in failure["ranks"].items() if int(rank) != failure["rank"]]
        return "\n".join([*lines, f"logs: {self._shown}/{layout.LOGS}; the report: {self._shown}/{layout.FAILURE}"])


def _first_failure(
    told: dict[str, Any] | None, left: dict[int, End], outcome: Outcome, world_size: int
) -> dict[str, Any] | None:
    """The first failure: what the rank itself told, unless it only told of a peer that is gone."""
    consequence = told is not None and str(told.get("message", "")).startswith(LOST_CONTACT)
    if told is not None and not consequence:
        return told
    # The first without a word: whoever started the others may have ended them for its sake.
    wordless = ((rank, code) for rank, code in outcome.exits.items() if code and rank not in left)
    rank, code = next(wordless, (0, EXIT_DONE))
    if code < 0 and not (outcome.stopped and told is None):
        why = "out of memory, a person or a scheduler" if code == -signal.SIGKILL else "see its log"
        return _made_up(rank, left, told, "Killed", f"it died of {signal_name(-code)} ({why})")
    if outcome.lost:
        silent = next((rank for rank in range(world_size) if rank not in left), 0)
        lost = silent if outcome.lost_rank is None else outcome.lost_rank  # which may have ended by itself after that
        return _made_up(lost, left, told, "Lost", outcome.lost)
    failed = [end for end in left.values() if end.how in ("failed", "blocked")]
    if told is None and failed:  # failure.json could not be written, or is on another machine's disk
        first = min(failed, key=lambda end: end.time)
        return _made_up(first.rank, left, told, "Failed", first.reason) | {"exit_code": first.exit_code}
    return told


def _made_up(rank: int, left: dict[int, End], told: dict[str, Any] | None, error: str, message: str) -> dict[str, Any]:
    """A report in the name of a rank that could not write one; its step is as far as its peers came."""
    steps = [end.step for end in left.values()] + ([int(told["step"])] if told else [])
    host = left[rank].host if rank in left else ""
    return {
        "rank": rank,
        "host": host,
        "step": max(steps, default=0),
        "error": error,
        "message": message,
        "exit_code": EXIT_FAILURE,
        "traceback": [],
    }


def _each(left: dict[int, End], outcome: Outcome) -> dict[str, str]:
    """A line on every rank that is known of, by rank."""
    told = {}
    for rank in sorted({*left, *outcome.exits}):
        code = outcome.exits.get(rank)
        if rank in left:
            end = left[rank]
            doing = f" at {end.doing}" if end.doing else ""
            reason = f" ({end.reason})" if end.reason else ""
            told[str(rank)] = f"{end.how} on {end.host} at step {end.step}{doing}; exit code {end.exit_code}{reason}"
        elif code is not None and code < 0:
            told[str(rank)] = f"died of {signal_name(-code)}, without a word"
        else:
            told[str(rank)] = f"ended with exit code {code}, without a word"
    return told


def _quiet_code(codes: set[int], stopped: bool) -> int:
    """The exit code where no rank reported a failure; ``codes`` are those of the ranks."""
    for code in (EXIT_USAGE, EXIT_DATA):  # of ranks that never began
        if code in codes:
            return code
    if stopped and codes and codes <= _AS_ASKED:
        return EXIT_STOPPED
    if not codes or not codes <= {EXIT_DONE, EXIT_STOPPED}:
        return EXIT_FAILURE
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_DONE


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None
