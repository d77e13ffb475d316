"""``harness verify-resume -- COMMAND``: the starts of a command in order, and the verdict about its resume."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.audit import diagnosis, kills, latest, records
from harness.audit.folders import Session
from harness.audit.kills import ChosenKill, RunShape
from harness.audit.plan import AuditPlan, Detail, HowKilled
from harness.audit.records import StartRecord
from harness.audit.starts import LATEST, CommandStart, CommandStarts
from harness.audit.verdict import UNDECIDED, Finding, Verdict, conclude
from harness.errors import ConfigError, plural, reason, remedy

UNDISTURBED, AGAIN, KILLED, RESUMED = "undisturbed", "again", "killed", "resumed"
_TIMES_LONGER = 10  # a start may take, on top of the timeout, than the undisturbed one


@dataclass(frozen=True)
class AuditRequest:
    """The arguments of the command.

    resume: what a resumed start adds to ``command``, with ``{latest}`` for the newest checkpoint
    checkpoints: glob of the checkpoints, instead of what the records show
    kills: "middle", "all" or a number
    folder: where everything is kept; None: a temporary folder, removed at the end
    """

    command: Sequence[str]
    resume: str = ""
    checkpoints: str = ""
    kills: str = kills.MIDDLE
    seed: int = 0
    steps: int | None = None
    signal: HowKilled = "KILL"
    timeout_s: float = 600.0
    folder: Path | None = None
    detail: Detail = "tensors"
    source: Path = field(default_factory=Path.cwd)


def audit(request: AuditRequest, say: Callable[[str], None]) -> Verdict:
    """Start the command as often as needed, and return the verdict; ``say`` prints which start begins.

    Raises ConfigError if the command cannot be started, or if its working folder cannot be copied.
    """
    if any(LATEST in word for word in request.command):
        raise ConfigError(
            f"{LATEST} stands in the command itself", where="command",
            hint=f"only a resumed start has a checkpoint: write --resume '--my_option {LATEST}' before the --",
        )  # fmt: skip
    with _folder(request.folder) as folder:
        try:
            return _Audit(request, Session(request.source, folder), say).run()
        except OSError as error:
            raise ConfigError(
                f"the working folder cannot be copied to {folder}: {reason(error)}",
                where=str(error.filename or request.source),
                hint=remedy(error, "or choose another folder with --folder"),
            ) from error


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    if wanted.exists() and any(wanted.iterdir()):
        raise ConfigError("the folder is not empty", where=str(wanted), hint="choose a new one with --folder")
    wanted.mkdir(parents=True, exist_ok=True)
    yield wanted


class _CannotTellError(Exception):
    """No verdict is possible, for the reason in ``finding``."""

    def __init__(self, code: str, text: str, evidence: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.finding = Finding(code, text, tuple(evidence))


@contextmanager
def _adding_reason(findings: list[Finding]) -> Iterator[None]:
    try:
        yield
    except _CannotTellError as reached:
        findings.append(reached.finding)


class _Audit:
    def __init__(self, request: AuditRequest, session: Session, say: Callable[[str], None]) -> None:
        self._request, self._session, self._say = request, session, say
        self._starts = CommandStarts(session, request.command, request.resume, os.environ, request.timeout_s)
        self._roots = (session.work, session.out)
        self._plan = AuditPlan(
            "", steps=request.steps, signal=request.signal, detail=request.detail, roots=tuple(map(str, self._roots))
        )
        self._records: dict[str, StartRecord] = {}
        self._notes = session.copy.described()

    def run(self) -> Verdict:
        findings: list[Finding] = []
        chosen: list[ChosenKill] = []
        with _adding_reason(findings):
            chosen = self._undisturbed()
        for number, kill in enumerate(chosen, 1):
            with _adding_reason(findings):
                findings += self._killed(kill, "" if number == 1 else f"-{number}")
        findings = self._merged(findings)
        if changed := self._session.copy.changed_links():
            text = f"the command changed {changed[0]}, which is linked and not copied, since it looked like data"
            findings = [Finding("outside", text)]
        return conclude(findings, diagnosis.summaries(list(self._records.values())), self._notes)

    def _merged(self, findings: list[Finding]) -> list[Finding]:
        """Return one finding for each code. What one kill shows counts, even if another one cannot tell."""
        by_code: dict[str, list[Finding]] = {}
        for finding in findings:
            by_code.setdefault(finding.code, []).append(finding)
        faults = {code: found for code, found in by_code.items() if code not in UNDECIDED}
        if faults:
            self._notes += [f"another kill tells nothing: {each.text}" for each in findings if each.code in UNDECIDED]
        return [
            replace(one, evidence=(*one.evidence, f"the same fault after {plural(len(others), 'more kill')}"))
            if others
            else one
            for one, *others in (faults or by_code).values()
        ]

    def _undisturbed(self) -> list[ChosenKill]:
        """Start the command twice without a kill, and return the kills to test."""
        self._session.fresh()
        done = self._start(UNDISTURBED, self._plan)
        self._require_success(done)
        first = self._records[UNDISTURBED]
        if not first.steps:
            raise self._no_steps(first)
        self._starts.limit_s = _TIMES_LONGER * done.wall_s + self._request.timeout_s
        events = latest.events(self._session.records(UNDISTURBED))[0]
        if path := latest.outside(events, self._roots):
            raise _CannotTellError("outside", f"written to {path}, outside the working folder and {{out}}")
        shape = RunShape(events, self._roots)
        if why := kills.why_none(shape):
            raise _CannotTellError("no-checkpoint", why)
        chosen = kills.choose(shape, self._request.kills, self._request.seed)
        self._session.fresh()
        self._require_success(self._start(AGAIN, self._plan))
        if differences := diagnosis.deterministic(first, self._records[AGAIN]):
            raise _CannotTellError(differences[0].code, differences[0].text, differences[0].evidence)
        return chosen

    def _killed(self, chosen: ChosenKill, suffix: str) -> list[Finding]:
        """Kill a start, resume it, and return what differs from the undisturbed one."""
        killed, resumed, again = f"{KILLED}{suffix}", f"{RESUMED}{suffix}", f"{RESUMED}-again{suffix}"
        self._session.fresh()
        done = self._start(killed, replace(self._plan, kill=chosen.kill), f"to kill it {chosen.text}")
        if done.killed is None:
            self._require_success(done)
            raise _CannotTellError("not-killed", f"the start ended before it could be killed {chosen.text}")
        differences = self._resumed(resumed, killed, chosen)
        if any(finding.code not in UNDECIDED for finding in differences):
            self._resumed(again, killed, chosen, draws=True)
            if diagnosis.deterministic(self._records[resumed], self._records[again]):
                raise _CannotTellError("resumes-differ", f"two starts after the kill {chosen.text} differ")
            draws = records.draws(self._session.records(again), self._session.work)
            differences = [finding.with_draws(draws) for finding in differences]
        return differences

    def _resumed(self, name: str, killed: str, chosen: ChosenKill, draws: bool = False) -> list[Finding]:
        self._session.restore(killed)
        checkpoint = self._latest(killed, chosen)
        until = self._records[UNDISTURBED].steps[-1].weights if self._request.steps else None
        text = f"from {checkpoint.relative_to(self._session.folder)}" if checkpoint else ""
        done = self._start(name, replace(self._plan, until=until, draws=draws), text, checkpoint, resumed=True)
        if done.late:
            raise self._failed(done)
        first, again, before = (self._records[other] for other in (UNDISTURBED, AGAIN, killed))
        return diagnosis.compare(first, again, before, self._records[name])

    def _latest(self, killed: str, chosen: ChosenKill) -> Path | None:
        """Return the checkpoint for ``{latest}``; None if the resume does not ask for one."""
        if LATEST not in self._request.resume:
            return None
        if pattern := self._request.checkpoints:
            found = latest.newest_match(pattern, *self._roots)
            missing = f"nothing matches --checkpoints {pattern}"
        else:
            before, first = (latest.events(self._session.records(name)) for name in (killed, UNDISTURBED))
            found = latest.latest(before, first, self._roots, torn=chosen.kill.place == "write")
            missing = "no complete checkpoint is there; --checkpoints GLOB names them"
        if found is None:
            raise _CannotTellError("no-checkpoint", f"after the kill {chosen.text}, {missing}")
        return found

    def _start(
        self, name: str, plan: AuditPlan, text: str = "", checkpoint: Path | None = None, resumed: bool = False
    ) -> CommandStart:
        plan = replace(plan, records=str(self._session.records(name)))
        self._say(f"starting '{name}'" + (f", {text}" if text else ""))
        done = self._starts.start(name, plan, checkpoint, resumed)
        self._records[name] = records.read(self._session.records(name))
        return done

    def _require_success(self, done: CommandStart) -> None:
        if done.late or done.code:
            raise self._failed(done)

    def _failed(self, done: CommandStart) -> _CannotTellError:
        what = f"was ended: {done.late}" if done.late else f"fails with exit code {done.code}"
        return _CannotTellError("fails", f"the start '{done.name}' {what}; the end of its output:", done.tail())

    def _no_steps(self, first: StartRecord) -> _CannotTellError:
        """Return why the undisturbed start has no step."""
        if not first.processes and not first.others:
            text = "the command never imported torch in a Python that reads PYTHONPATH (without -I, -E and -S)"
        elif first.loaded:
            text = f"it loaded {first.loaded[-1]} and took no optimizer step: remove old checkpoints from the folder"
        else:
            text = "the command took no optimizer step"
        return _CannotTellError("no-steps", text, first.last_lines(5))
