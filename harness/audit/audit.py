"""``harness verify-resume -- COMMAND``: the starts of a command in order, and the verdict about its resume."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.audit import diagnosis, forgotten, records, saved_files
from harness.audit.chance import find_causes
from harness.audit.folders import Session
from harness.audit.kills import MIDDLE, ChosenKill, RunShape, choose, untested, why_none
from harness.audit.plan import AuditPlan, HowKilled
from harness.audit.records import StartRecord
from harness.audit.starts import LATEST, CommandStarts
from harness.audit.verdict import NOT_EXACT, UNDECIDED, Finding, Verdict, conclude
from harness.errors import ConfigError, plural
from harness.runs.console import in_words

UNDISTURBED, AGAIN, KILLED, RESUMED = "undisturbed", "again", "killed", "resumed"
_TAIL_LINES = 15  # of output
_TIMES_LONGER = 10  # a start may take, on top of the timeout, than the undisturbed one


@dataclass(frozen=True)
class AuditRequest:
    """The arguments of ``harness verify-resume``."""

    command: Sequence[str]
    resume: str = ""
    """What a resumed start adds to ``command``, with ``{latest}`` for the newest checkpoint."""
    checkpoints: str = ""
    """A glob pattern of the checkpoints, instead of what the records show."""
    kills: str = MIDDLE
    """"middle", "all" or a number."""
    seed: int = 0
    steps: int | None = None
    signal: HowKilled = "KILL"
    timeout_s: float = 600.0
    folder: Path | None = None
    """Where everything is kept; None: a temporary folder, removed at the end unless the resume is not exact."""
    source: Path = field(default_factory=Path.cwd)
    copies: bool = True
    """False if the command writes only to ``{out}``, so that the working folder need not be copied."""
    variants: Sequence[Sequence[str]] = ((),)
    """Words for the end of the command, others for each start in turn, such as another number of ranks."""
    ranks: int = 1
    """How many ranks each start has at least."""
    alone: float = 0.0
    """The share of random kills that hit only one rank."""
    results: Callable[[Path, Path], list[str]] | None = None
    """Compares what two starts left in ``{out}``, and returns the places that differ."""


def audit(request: AuditRequest, say: Callable[[str], None]) -> Verdict:
    """Start the command as often as needed, and return the verdict; ``say`` prints which start begins.

    Raises ConfigError if the command cannot be started, or if its working folder cannot be copied.
    """
    if any(LATEST in word for word in request.command):
        raise ConfigError(
            f"{LATEST} stands in the command itself", where="command",
            hint=f"only a resumed start has a checkpoint: write --resume '--my_option {LATEST}' before the --",
        )  # fmt: skip
    with _folder(request.folder) as (folder, keep):
        running = _Audit(request, Session(request.source, folder, request.copies), say)
        try:
            verdict = running.run()
            if verdict.kind == NOT_EXACT and request.folder is None:
                keep()
                kept = f"all starts are kept in {folder} ({_size(folder) / 1e6:,.1f} MB; remove it: rm -r {folder})"
                verdict = replace(verdict, kept=kept)
            return verdict
        except KeyboardInterrupt:
            if running.has_fault:
                keep()
            for line in running.so_far():
                say(line)
            is_kept = running.has_fault or request.folder is not None
            say(f"its files: {folder if is_kept else 'removed (--folder FOLDER keeps them)'}")
            raise


def _size(folder: Path) -> int:
    """Return the bytes of the files in ``folder``, without those that vanish."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size


@contextmanager
def _folder(wanted: Path | None) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Give a folder, and a function that keeps it if it is a temporary one."""
    if wanted is None:
        folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
        with ExitStack() as at_end:
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)
            yield folder, at_end.pop_all
        return
    if wanted.exists() and any(wanted.iterdir()):
        raise ConfigError("the folder is not empty", where=str(wanted), hint="choose a new one with --folder")
    wanted.mkdir(parents=True, exist_ok=True)
    yield wanted, lambda: None


def _symptom(finding: Finding) -> str:
    """Return what differs, without where."""
    return re.sub(r"\bstep \d+", "step", finding.text)


class _CannotTellError(Exception):
    """No verdict is possible, for the reason in ``finding``."""

    def __init__(self, code: str, text: str, evidence: Sequence[str] = (), remedy: str = "") -> None:
        super().__init__(text)
        self.finding = Finding(code, text, tuple(evidence), remedy=remedy)


class _Audit:
    """The starts of one audit, and what they have shown so far, also when it is interrupted."""

    def __init__(self, request: AuditRequest, session: Session, say: Callable[[str], None]) -> None:
        self._request, self._session, self._say = request, session, say
        self._starts = CommandStarts(session, request.command, request.resume, os.environ, request.timeout_s)
        self._roots = session.folders
        self._plan = AuditPlan("", steps=request.steps, signal=request.signal, roots=tuple(map(str, self._roots)))
        self._records: dict[str, StartRecord] = {}
        self._running = ""
        self._are_equal: bool | None = None  # the two undisturbed starts; None: not compared
        self._chosen: list[ChosenKill] = []
        self._judged: dict[ChosenKill, Sequence[Finding]] = {}  # what differs, also before a second look confirms it
        self._notes = session.copy.describe() if session.copy else []
        if request.results is not None:
            self._notes.append("compared at the end as well: checkpoints, log, summary, weights and predictions")

    def run(self) -> Verdict:
        """Make all starts, and return the verdict. Raises ConfigError if the command cannot be started."""
        try:
            self._start_undisturbed()
        except _CannotTellError as reached:
            findings = [reached.finding]
        else:
            for number, kill in enumerate(self._chosen, 1):
                self._judge(number, kill)
            findings = self._merged([finding for found in self._judged.values() for finding in found])
        if self._session.copy and (changed := self._session.copy.changed_links()):
            text = f"the command changed {changed[0]}, which is linked and not copied, since it looked like data"
            findings = [Finding("outside", text)]
        return conclude(findings, diagnosis.summaries(list(self._records.values())), self._notes)

    def _words(self, place: int) -> Sequence[str]:
        """Return the words at the end of the command for a start. The undisturbed ones are at place 0."""
        return self._request.variants[place % len(self._request.variants)]

    @property
    def _varies(self) -> bool:
        return len({*map(tuple, self._request.variants)}) > 1

    @property
    def has_fault(self) -> bool:
        return any(each.code not in UNDECIDED for found in self._judged.values() for each in found)

    def so_far(self) -> Iterator[str]:
        """Yield what an audit that is interrupted has found."""
        ended = [
            f"{name} ({plural(len(each.steps), 'step')}, {in_words(each.wall_s)})"
            for name, each in self._records.items()
        ]
        yield f"no verdict: interrupted in '{self._running}'; ended before: {', '.join(ended) or 'no start'}"
        equal = {None: "have not been compared", True: "are equal", False: "differ"}
        yield f"the two undisturbed starts {equal[self._are_equal]}"
        for number, (kill, found) in enumerate(self._judged.items(), 1):
            verdict = conclude(found)
            titles = "".join(f"; {each.code}: {each.title}" for each in verdict.findings)
            yield f"kill {number} of {len(self._chosen)}, {kill.text}: {verdict.kind}{titles}"
        if left := len(self._chosen) - len(self._judged):
            yield f"{plural(left, 'kill')} of {len(self._chosen)} not judged"

    def _estimate(self, first: StartRecord) -> str:
        """Return how long the other starts will take. A killed one and its resume share the steps, and not the rest."""
        count, took_s = len(self._chosen), first.wall_s
        least, most = (in_words(number * took_s) for number in (1 + count, 1 + 2 * count))
        return (
            f"the first start took {in_words(took_s)} for {plural(len(first.steps), 'step')}; {1 + 2 * count} more of "
            f"about that length or less: {least} to {most}, and longer if a resume differs"
        )

    def _merged(self, findings: list[Finding]) -> list[Finding]:
        """Return a finding for each code, and one of a start that fails. What one kill shows counts, even if another
        kill cannot tell. An unknown fault that shows as one with a name does is that one."""
        alike: dict[tuple[str, bool], list[Finding]] = {}
        names = {_symptom(each): each.code for each in findings if each.code == "unsaved-state"}
        for finding in sorted(findings, key=lambda each: each.code == "other" and _symptom(each) in names):
            code = names.get(_symptom(finding), "other") if finding.code == "other" else finding.code
            alike.setdefault((code, code == "other" and not finding.steps), []).append(finding)
        faults = {key: found for key, found in alike.items() if key[0] not in UNDECIDED}
        if ("unsaved-state", False) in faults:  # starts are observed for one kill
            why = "the unsaved state may explain it: save that first, and run this again"
            unknown = faults.get(("other", False), [])
            unknown[:] = [replace(each, evidence=(*each.evidence, why)) for each in unknown]
        if faults:
            self._notes += [f"another kill tells nothing: {each.text}" for each in findings if each.code in UNDECIDED]
        return [
            replace(one, evidence=(*one.evidence, f"the same fault after {plural(len(others), 'more kill')}"))
            if others
            else one
            for one, *others in (faults or alike).values()
        ]

    def _start_undisturbed(self) -> None:
        """Start the command twice without a kill, and choose the kills to test."""
        first = self._observe(UNDISTURBED, self._plan)
        self._require_success(first)
        if not first.steps:
            raise self._no_steps(first)
        self._starts.limit_s = _TIMES_LONGER * first.wall_s + self._request.timeout_s
        events = saved_files.events_by_rank(self._session.records(UNDISTURBED))[0]
        if path := saved_files.outside_file(events, self._roots):
            raise _CannotTellError("outside", f"written to {path}, outside the working folder and {{out}}")
        shape = RunShape(events, self._roots)
        if why := why_none(shape):
            raise _CannotTellError("no-checkpoint", why)
        request = self._request
        shape = shape.on_any_ranks() if self._varies else shape
        self._chosen = choose(shape, request.kills, request.seed, request.ranks, request.alone)
        self._notes += filter(None, [untested(shape, self._chosen)])
        self._say(self._estimate(first))
        self._say("steps: calls of optimizer.step(), without those that Apex's amp skips after an overflow")
        again = self._observe(AGAIN, self._plan)
        self._require_success(again)
        differences = diagnosis.deterministic(first, again)
        self._are_equal = not differences
        if differences:
            until = replace(self._plan, steps=max(differences[0].steps, default=1) + 1)  # whose weights differ
            causes = find_causes(self._session, self._observe, until)
            evidence = (*causes.lines, *differences[0].evidence)
            raise _CannotTellError(differences[0].code, differences[0].text, evidence, causes.remedy)

    def _judge(self, number: int, chosen: ChosenKill) -> None:
        """Kill a start, resume it, and note what differs from the undisturbed one. A fault must show in a second resume
        as well."""
        suffix = "" if number == 1 else f"-{number}"
        try:
            self._judged[chosen] = self._killed_and_resumed(number, chosen, suffix)
            if any(finding.code not in UNDECIDED for finding in self._judged[chosen]):
                self._judged[chosen] = self._second_look(number, chosen, suffix)
        except _CannotTellError as reached:
            self._judged[chosen] = [reached.finding]

    def _killed_and_resumed(self, number: int, chosen: ChosenKill, suffix: str) -> list[Finding]:
        self._session.fresh()
        plan = replace(self._plan, kill=chosen.kill)
        killed = self._start(f"{KILLED}{suffix}", plan, f"to kill it {chosen.text}", self._words(2 * number - 1))
        if killed.late and killed.killed is not None:
            lines = tuple(killed.last_lines(_TAIL_LINES))
            return [Finding("hang", f"after the kill {chosen.text}, {killed.late}", lines)]
        if killed.killed is None:
            self._require_success(killed)
            raise _CannotTellError("not-killed", f"the start ended before it could be killed {chosen.text}")
        return self._resumed(f"{RESUMED}{suffix}", killed, chosen, self._words(2 * number))

    def _second_look(self, number: int, chosen: ChosenKill, suffix: str) -> list[Finding]:
        """Repeat a resume that differs, and return its findings with the lines and attributes that explain them."""
        again, killed = f"{RESUMED}-again{suffix}", self._records[f"{KILLED}{suffix}"]
        self._resumed(again, killed, chosen, self._words(2 * number), draws=True)
        if chance := diagnosis.deterministic(self._records[f"{RESUMED}{suffix}"], self._records[again]):
            text = f"two starts after the kill {chosen.text} differ"
            raise _CannotTellError("resumes-differ", text, (chance[0].text, *chance[0].evidence))
        draws = records.draws(self._session.records(again), self._session.work)
        found = [finding.with_draws(draws) for finding in self._judged[chosen]]
        return self._explained(found, killed, self._records[again])

    def _explained(self, found: list[Finding], killed: StartRecord, resumed: StartRecord) -> list[Finding]:
        """Start the command twice up to where the resumed start began, and add which attributes that has not got."""
        step = diagnosis.offset(self._records[UNDISTURBED], killed, resumed) + 1
        if step == 1 or "observed" in self._records or not resumed.steps:
            return found
        plan = replace(self._plan, steps=step + 1, attributes=(1, step, step + 1))
        text = f"to see what changes until step {step}"
        observed, again = (self._observe(name, plan, text) for name in ("observed", "observed-again"))
        return forgotten.explained(found, observed, again, resumed)

    def _resumed(
        self, name: str, killed: StartRecord, chosen: ChosenKill, words: Sequence[str], draws: bool = False
    ) -> list[Finding]:
        """Resume the start ``killed``, and return what differs. ``draws``: also record what explains a difference."""
        self._session.restore(killed.name)
        checkpoint = self._latest(killed.name, chosen)
        first, again = self._records[UNDISTURBED], self._records[AGAIN]
        until = first.steps[-1].weights if self._request.steps else None
        text = f"from {checkpoint.relative_to(self._session.folder)}" if checkpoint else ""
        plan = replace(self._plan, until=until, draws=draws, attributes=(1, 2) if draws else ())
        resumed = self._start(name, plan, text, words, checkpoint, resumed=True)
        if resumed.late:
            raise self._failed(resumed)
        if self._varies:
            found = diagnosis.failure(first, killed, resumed)
        else:
            found = diagnosis.compare(first, again, killed, resumed)
        if not found and self._request.results is not None:
            places = self._request.results(*(self._session.kept(other) / "out" for other in (UNDISTURBED, name)))
            if places:
                found = [Finding("files", places[0], tuple(places[1:]))]
        return found

    def _latest(self, killed: str, chosen: ChosenKill) -> Path | None:
        """Return the checkpoint for ``{latest}``; None if the resume does not ask for one."""
        if LATEST not in self._request.resume:
            return None
        if pattern := self._request.checkpoints:
            found = saved_files.newest_match(pattern, *self._roots)
            missing = f"nothing matches --checkpoints {pattern}"
        else:
            before, first = (saved_files.events_by_rank(self._session.records(name)) for name in (killed, UNDISTURBED))
            found = saved_files.newest(before, first, self._roots, torn=chosen.kill.place == "write")
            missing = "no complete checkpoint is there; --checkpoints GLOB names them"
        if found is None:
            raise _CannotTellError("no-checkpoint", f"after the kill {chosen.text}, {missing}")
        return found

    def _observe(self, name: str, plan: AuditPlan, reason: str = "", hashes: bool = True) -> StartRecord:
        """Make a start that is not killed, in fresh folders."""
        self._session.fresh()
        return self._start(name, plan, reason, self._words(0), hashes=hashes)

    def _start(
        self,
        name: str,
        plan: AuditPlan,
        reason: str,
        words: Sequence[str],
        checkpoint: Path | None = None,
        resumed: bool = False,
        hashes: bool = True,
    ) -> StartRecord:
        """Start the command in the folders as they are, and return its record when it has ended."""
        plan = replace(plan, records=str(self._session.records(name)))
        self._running = name
        self._say(f"starting '{name}'" + (f", {reason}" if reason else ""))
        self._starts.start(name, plan, checkpoint, resumed, words, hashes)
        self._records[name] = records.read(self._session.records(name))
        return self._records[name]

    def _require_success(self, start: StartRecord) -> None:
        if start.late or start.code:
            raise self._failed(start)

    def _failed(self, start: StartRecord) -> _CannotTellError:
        what = f"was ended: {start.late}" if start.late else f"fails with exit code {start.code}"
        text = f"the start '{start.name}' {what}; the end of its output:"
        return _CannotTellError("fails", text, start.last_lines(_TAIL_LINES))

    def _no_steps(self, first: StartRecord) -> _CannotTellError:
        """Return why the undisturbed start has no step."""
        if not first.processes and not first.others:
            text = "the command never imported torch in a Python that reads PYTHONPATH (without -I, -E and -S)"
        elif first.loaded:
            text = f"it loaded {first.loaded[-1]} and took no optimizer step: remove old checkpoints from the folder"
        else:
            text = "the command took no optimizer step"
        return _CannotTellError("no-steps", text, first.last_lines(5))
