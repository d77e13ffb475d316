"""``harness verify-resume -- COMMAND``: the starts of a command in order, and the verdict about its resume."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

from harness.audit import diagnosis, kills, latest, records
from harness.audit.folders import Session
from harness.audit.kills import ChosenKill, RunShape
from harness.audit.plan import AuditPlan, HowKilled
from harness.audit.records import StartRecord
from harness.audit.starts import LATEST, CommandStart, CommandStarts
from harness.audit.verdict import NOT_EXACT, UNDECIDED, Draw, Finding, Verdict, conclude
from harness.errors import ConfigError, plural
from harness.runs.console import in_words

UNDISTURBED, AGAIN, KILLED, RESUMED = "undisturbed", "again", "killed", "resumed"
_TIMES_LONGER = 10  # a start may take, on top of the timeout, than the undisturbed one


@dataclass(frozen=True)
class AuditRequest:
    """The arguments of the command.

    resume: what a resumed start adds to ``command``, with ``{latest}`` for the newest checkpoint
    checkpoints: glob of the checkpoints, instead of what the records show
    kills: "middle", "all" or a number
    folder: where everything is kept; None: a temporary folder, removed at the end unless the resume is not exact
    copies: False if the command writes only to ``{out}``, so that the working folder need not be copied
    variants: words for the end of the command, others for each start in turn: with another number of ranks
    ranks, alone: how many ranks there are at least, and the share of random kills that hit only one of them
    results: compares what two starts left in ``{out}``, and returns the places that differ
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
    source: Path = field(default_factory=Path.cwd)
    copies: bool = True
    variants: Sequence[Sequence[str]] = ((),)
    ranks: int = 1
    alone: float = 0.0
    results: Callable[[Path, Path], list[str]] | None = None


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
                verdict = replace(verdict, notes=[*verdict.notes, f"all starts are kept in {folder}"])
            return verdict
        except KeyboardInterrupt:
            if running.has_fault:
                keep()
            for line in running.so_far():
                say(line)
            is_kept = running.has_fault or request.folder is not None
            say(f"its files: {folder if is_kept else 'removed (--folder FOLDER keeps them)'}")
            raise


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


_SEEDS = "give it a seed: manual_seed(0) of a torch.Generator, numpy.random.default_rng(0), random.Random(0)"


class _CannotTellError(Exception):
    """No verdict is possible, for the reason in ``finding``."""

    def __init__(self, code: str, text: str, evidence: Sequence[str] = (), remedy: str = "") -> None:
        super().__init__(text)
        self.finding = Finding(code, text, tuple(evidence), remedy=remedy)


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
        self._roots = session.folders
        self._variants = cycle(request.variants)
        self._variant = next(self._variants)
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
        findings: list[Finding] = []
        with _adding_reason(findings):
            self._undisturbed()
        for number, kill in enumerate(self._chosen if self._are_equal else (), 1):
            found: list[Finding] = []
            with _adding_reason(found):
                found += self._killed(kill, "" if number == 1 else f"-{number}")
            self._judged[kill] = found
            findings += found
        findings = self._merged(findings)
        if self._session.copy and (changed := self._session.copy.changed_links()):
            text = f"the command changed {changed[0]}, which is linked and not copied, since it looked like data"
            findings = [Finding("outside", text)]
        return conclude(findings, diagnosis.summaries(list(self._records.values())), self._notes)

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
        kills, took_s = len(self._chosen), first.wall_s
        least, most = (in_words(number * took_s) for number in (1 + kills, 1 + 2 * kills))
        return (
            f"the first start took {in_words(took_s)} for {plural(len(first.steps), 'step')}; {1 + 2 * kills} more of "
            f"about that length or less: {least} to {most}, and longer if a resume differs"
        )

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

    def _undisturbed(self) -> None:
        """Start the command twice without a kill, and choose the kills to test."""
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
        of = self._request
        shape = shape.on_any_ranks() if self._varies else shape
        self._chosen = kills.choose(shape, of.kills, of.seed, of.ranks, of.alone)
        self._say(self._estimate(first))
        self._say("steps: calls of optimizer.step(), without those that Apex's amp skips after an overflow")
        self._session.fresh()
        self._require_success(self._start(AGAIN, self._plan))
        differences = diagnosis.deterministic(first, self._records[AGAIN])
        self._are_equal = not differences
        if differences:
            found, remedy = self._chance(max(differences[0].steps, default=1))
            raise _CannotTellError(differences[0].code, differences[0].text, (*found, *differences[0].evidence), remedy)

    def _chance(self, step: int) -> tuple[list[str], str]:
        """Start the command until ``step``, where two undisturbed starts differ, and return what can be the cause, and
        what helps if that is more than the usual."""
        plan = replace(self._plan, steps=step)
        self._observe("observed", replace(plan, chance=True), "to find the lines that chance comes from")
        draws = records.draws(self._session.records("observed"), self._session.work)
        if found := [draw for draw in draws if draw.stream in ("entropy", "operation")]:
            seeded = all(draw.stream == "operation" for draw in found)
            return [self._of_chance(draw) for draw in found], "" if seeded else _SEEDS
        for name in ("hashes", "hashes-again"):
            self._observe(name, plan, "with the order of sets fixed", hashes=False)
        if not diagnosis.deterministic(self._records["hashes"], self._records["hashes-again"]):
            what = (
                "the order of a set or the hash of a string is the cause: with PYTHONHASHSEED=0, two starts are equal"
            )
            return [what], "sort the set, or start the script with PYTHONHASHSEED=0"
        return [self._of_chance(draw) for draw in draws if draw.stream == "clock"], ""

    @staticmethod
    def _of_chance(draw: Draw) -> str:
        if draw.stream == "operation":
            place = "" if draw.place.endswith(":0") else f"{draw.place} calls "
            return f"{place}{draw.function}, which is not deterministic"
        return draw.described + (
            ", which reads a clock" if draw.stream == "clock" else ": a generator without a fixed seed"
        )

    def _observe(self, name: str, plan: AuditPlan, text: str, hashes: bool = True) -> None:
        self._session.fresh()
        self._start(name, plan, text, hashes=hashes)

    def _killed(self, chosen: ChosenKill, suffix: str) -> list[Finding]:
        """Kill a start, resume it, and return what differs from the undisturbed one."""
        killed, resumed, again = f"{KILLED}{suffix}", f"{RESUMED}{suffix}", f"{RESUMED}-again{suffix}"
        self._session.fresh()
        self._variant = next(self._variants)
        done = self._start(killed, replace(self._plan, kill=chosen.kill), f"to kill it {chosen.text}")
        if done.late and done.killed is not None:
            return [Finding("hang", f"after the kill {chosen.text}, {done.late}", tuple(done.tail()))]
        if done.killed is None:
            self._require_success(done)
            raise _CannotTellError("not-killed", f"the start ended before it could be killed {chosen.text}")
        self._variant = next(self._variants)  # also of the second resume, which must repeat the first
        differences = self._judged[chosen] = self._resumed(resumed, killed, chosen)
        if any(finding.code not in UNDECIDED for finding in differences):
            self._resumed(again, killed, chosen, draws=True)
            if chance := diagnosis.deterministic(self._records[resumed], self._records[again]):
                text = f"two starts after the kill {chosen.text} differ"
                raise _CannotTellError("resumes-differ", text, (chance[0].text, *chance[0].evidence))
            draws = records.draws(self._session.records(again), self._session.work)
            differences = [finding.with_draws(draws) for finding in differences]
            differences[0] = self._with_forgotten(differences[0], killed, again)
        return differences

    def _with_forgotten(self, finding: Finding, killed: str, resumed: str) -> Finding:
        """Start the command twice up to where the resumed start began, and add which attributes it has not got."""
        names = UNDISTURBED, AGAIN, killed, resumed
        step = diagnosis.offset(*(self._records[name] for name in names)) + 1
        if step == 1 or "observed" in self._records or not self._records[resumed].steps:
            return finding
        for name in ("observed", "observed-again"):
            plan = replace(self._plan, steps=step + 1, attributes=(1, step, step + 1))
            self._observe(name, plan, f"to see what changes until step {step}")
        return diagnosis.with_forgotten(
            finding, *(self._records[name] for name in ("observed", "observed-again", resumed))
        )

    def _resumed(self, name: str, killed: str, chosen: ChosenKill, draws: bool = False) -> list[Finding]:
        self._session.restore(killed)
        checkpoint = self._latest(killed, chosen)
        until = self._records[UNDISTURBED].steps[-1].weights if self._request.steps else None
        text = f"from {checkpoint.relative_to(self._session.folder)}" if checkpoint else ""
        plan = replace(self._plan, until=until, draws=draws, attributes=(1, 2) if draws else ())
        done = self._start(name, plan, text, checkpoint, resumed=True)
        if done.late:
            raise self._failed(done)
        first, again, before, after = (self._records[other] for other in (UNDISTURBED, AGAIN, killed, name))
        if self._varies:
            found = diagnosis.failure(first, before, after)
        else:
            found = diagnosis.compare(first, again, before, after)
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
        self,
        name: str,
        plan: AuditPlan,
        text: str = "",
        checkpoint: Path | None = None,
        resumed: bool = False,
        hashes: bool = True,
    ) -> CommandStart:
        plan = replace(plan, records=str(self._session.records(name)))
        self._running = name
        self._say(f"starting '{name}'" + (f", {text}" if text else ""))
        done = self._starts.start(name, plan, checkpoint, resumed, self._variant, hashes)
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
