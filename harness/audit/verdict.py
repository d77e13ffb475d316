"""The verdict about a script's resume, and the findings that it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

Kind = Literal["exact", "not exact", "could not tell"]
EXACT: Final = "exact"
NOT_EXACT: Final = "not exact"
COULD_NOT_TELL: Final = "could not tell"
_LINES = 5  # of further evidence
_STREAMS = {
    "torch": "torch.get_rng_state", "cuda": "torch.cuda.get_rng_state_all", "numpy": "numpy.random.get_state",
    "random": "random.getstate",
}  # fmt: skip
EXIT_CODES = {EXACT: 0, NOT_EXACT: 1, COULD_NOT_TELL: 3}
FAULTS = {
    "rows": ("rows are repeated or skipped", "save the position in the epoch, and skip the rows before it"),
    "row-order": ("the order of rows is another", "set the sampler's epoch and seed, or the state of its generator, "
                  "before the first batch is read"),
    "inputs": ("the right rows are changed in another way", "seed what changes a row with the epoch and its index (in "
               "a task of the harness, row_seed: docs/add_a_task.md), or save the generator's state and restore it"),
    "random-streams": ("a random stream is not restored", "save the state of the stream on every rank, and restore it "
                       "last, after the model and the loader are made"),
    "optimizer-state": ("the optimizer's state is not restored", "save and load optimizer.state_dict()"),
    "learning-rate": ("the schedule is off", "save and load scheduler.state_dict(), after the optimizer's"),
    "loss-scale": ("the loss scale is not restored", "save and load scaler.state_dict()"),
    "buffers": ("buffers or averaged weights are not restored", "save them: EMA copies, running statistics, queues"),
    "weights": ("some parameters are not restored", "save every network, and load with strict=True"),
    "precision": ("the checkpoint loses precision", "save the weights that the optimizer updates, in their own type"),
    "counter": ("a counter of the script is off", "save the counter, and continue from it"),
    "saved-state": ("state beside the model is not restored", "let load_state_dict restore all that state_dict "
                    "returns, and before_training keep it"),
    "unsaved-state": ("state that training changes is in no checkpoint", "save it and restore it; give a hook "
                      "state_dict and load_state_dict (docs/hooks.md)"),
    "torn-checkpoint": ("a torn checkpoint breaks the resume", "write to a temporary name and rename it when it is "
                        "complete; take the newest checkpoint that loads"),
    "from-scratch": ("the resumed start begins from scratch", "check that it finds the checkpoint, and fail if not"),
    "length": ("the resumed run has another length", "count steps and epochs from those of the checkpoint"),
    "exit-code": ("the exit code does not tell the outcome", "let the error end the process"),
    "hang": ("the other ranks wait for one that was killed", "give the process group a timeout"),
    "files": ("what the run leaves differs, though its training is equal", ""),
    "other": ("the runs part for an unknown reason", ""),
}  # fmt: skip
"""Codes of faults: what is wrong, and what usually helps."""
IN_CHECKPOINT = ("buffers", "counter", "learning-rate", "loss-scale", "optimizer-state", "precision", "random-streams",
                 "rows", "weights")  # fmt: skip
"""Codes of what a checkpoint lacks or a resume does not take from it."""
UNDECIDED = {
    "not-deterministic": ("two equal starts differ", "seed every random stream, and call "
                          "torch.use_deterministic_algorithms(True)"),
    "resumes-differ": ("two starts from the same checkpoint differ", "seed every random stream after the resume"),
    "no-steps": ("no optimizer step was seen", ""),
    "no-checkpoint": ("no checkpoint was seen", "train longer, or save more often"),
    "outside": ("the checkpoints are outside of the copied folders", "write them below {out} or the working folder"),
    "fails": ("the undisturbed start fails", "let it run without the auditor first"),
    "recorder": ("the recorder failed", "report it, with the output of the start"),
    "not-killed": ("the start ended before the kill", "train longer"),
}  # fmt: skip
"""Codes of reasons why no verdict is possible: what happened, and what usually helps."""


@dataclass(frozen=True)
class Draw:
    """A line of the script that draws from a global random stream, or is a source of chance. ``worker``: in a loader
    process."""

    stream: str
    function: str
    place: str
    worker: bool = False

    @property
    def described(self) -> str:
        return f"{self.place} calls {self.function}{' in a loader process' * self.worker}"


@dataclass(frozen=True)
class Finding:
    """``text``: a sentence with the evidence in a nutshell; ``evidence``: further lines. ``steps`` are numbers of steps
    of the undisturbed start, ``names`` those of tensors, streams, counters or files, ``place`` is a file:line."""

    code: str
    text: str
    evidence: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    place: str = ""
    remedy: str = ""
    """What helps, where more is known than what usually helps."""
    surplus: int = 0
    """Steps by which its rows make the run longer; negative: shorter."""

    def with_draws(self, draws: Sequence[Draw]) -> Finding:
        """Return it with the lines that draw from the streams in question: those of ``names`` or, where rows or what is
        made of them differ, those of loader processes, whose streams no checkpoint holds."""
        if self.code == "random-streams":
            lines = [draw for draw in draws if draw.stream in self.names]
        else:
            lines = [draw for draw in draws if draw.worker and self.code in ("row-order", "inputs")]
        return self.with_lines([draw.described for draw in lines])

    def with_lines(self, lines: Sequence[str]) -> Finding:
        """Return it with more evidence: the first lines, and how many more there are."""
        more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        return replace(self, evidence=(*self.evidence, *lines[:_LINES], *more))

    @property
    def title(self) -> str:
        return (FAULTS.get(self.code) or UNDECIDED[self.code])[0]

    @property
    def advice(self) -> str:
        """What to do; for global random streams, with the functions to call."""
        calls = [_STREAMS[name.partition(":")[0]] for name in self.names if name.partition(":")[0] in _STREAMS]
        if self.code == "random-streams" and calls and not self.remedy:
            saved = ", ".join(
                f"{get}() and restore it with {get.replace('get', 'set')}()" for get in dict.fromkeys(calls)
            )
            return f"save on every rank {saved}, last, after the model and the loader are made"
        return self.remedy or (FAULTS.get(self.code) or UNDECIDED[self.code])[1]


@dataclass(frozen=True)
class StartSummary:
    """One start in the numbers of the page. ``offset``: steps that the undisturbed start had done when this one began,
    None if unknown; ``differs``: the first step that differs, in the undisturbed start's count."""

    name: str
    command: Sequence[str] = ()
    steps: int = 0
    ranks: int = 0
    checkpoints: Sequence[int] = ()
    epochs: Sequence[int] = ()
    offset: int | None = 0
    killed: dict[str, Any] | None = None
    loaded: Sequence[str] = ()
    stopped: bool = False
    differs: int | None = None
    code: int | None = None
    wall_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """``notes``: what the reader must know to judge the verdict, such as folders that were linked, not copied.
    ``kept``: where the starts are, and how to remove them."""

    kind: Kind
    findings: Sequence[Finding] = ()
    starts: Sequence[StartSummary] = ()
    notes: Sequence[str] = ()
    kept: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.kind]

    def as_json(self) -> dict[str, Any]:
        """Return ``{"format": 1, "verdict", "exit_code", "findings": [{"code", "title", "text", "evidence", "advice",
        "steps", "names", "ranks", "place"}], "starts": [the fields of StartSummary], "notes"}``."""
        findings = [{"title": finding.title, "advice": finding.advice, **asdict(finding)} for finding in self.findings]
        for finding in findings:
            del finding["remedy"], finding["surplus"]  # the remedy is the advice
        return {
            "format": 1,
            "verdict": self.kind,
            "exit_code": self.exit_code,
            "findings": findings,
            "starts": [asdict(start) for start in self.starts],
            "notes": [*self.notes, *filter(None, [self.kept])],
        }


def conclude(findings: Iterable[Finding], starts: Sequence[StartSummary] = (), notes: Sequence[str] = ()) -> Verdict:
    """Return "exact" without findings, "could not tell" if one of them says so, or else "not exact"."""
    found = tuple(findings)
    if any(finding.code in UNDECIDED for finding in found):
        kind: Kind = COULD_NOT_TELL
        found = tuple(finding for finding in found if finding.code in UNDECIDED)
    else:
        kind = NOT_EXACT if found else EXACT
    return Verdict(kind, found, starts, notes)
