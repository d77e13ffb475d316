"""What one start of a script did, read from the records of its processes.

The hook (``harness/audit/hook``) writes a file per process, a JSON object a line; the runner adds ``ended.json``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from harness.audit.verdict import Draw

_COLORS, _WIDTH = re.compile(r"\x1b\[[0-9;]*m"), 240  # of lines of output

Digests = dict[str, str]


class OtherState(TypedDict):
    """Tensors of one name beside the trained model, or a random generator of the script's own."""

    kind: Literal["module", "unnamed", "generator"]
    digests: list[str]


@dataclass(frozen=True)
class ModuleCall:
    """A call of an outermost module in training mode; ``into`` and ``out`` are digests."""

    module: str
    into: str
    rows: int
    out: str


@dataclass(frozen=True)
class Step:
    """One step of one optimizer, as the hook saw it before the update. ``number`` starts at 1 in each process."""

    number: int
    optimizer: int
    skipped: bool
    calls: tuple[ModuleCall, ...]
    weights: Digests
    buffers: Digests
    state: Digests
    groups: tuple[dict[str, Any], ...]
    gradients: Digests
    scale: tuple[Any, ...]
    streams: Digests
    samples: dict[str, list[Any]]
    others: dict[str, OtherState] | None
    """None where they were not looked at."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Values that a checkpoint of the harness holds beside the model; empty for other scripts."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Of models, optimizers and the script's own objects, as text; only where the plan asks for them."""
    asked: tuple[str, ...] = ()
    """Digests of the indices of the last batches that loaders gave since the step before."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(call.into for call in self.calls)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(call.out for call in self.calls)

    @property
    def rows(self) -> int:
        return sum(call.rows for call in self.calls)

    @property
    def rates(self) -> tuple[Any, ...]:
        """The learning rate of each parameter group."""
        return tuple(group.get("lr") for group in self.groups)


@dataclass
class Checkpoint:
    """The files that a process completed between two steps: final path to content. ``renames``: how many it renamed
    before the next step."""

    after: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    renames: int = 0


@dataclass
class Process:
    """A process that trained. ``order`` tells apart the processes of a rank, by the time of their start."""

    rank: int
    pid: int
    order: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    """Steps done when a pass over the training data began."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Paths that the process began to write and did not complete."""
    loaded: list[str] = field(default_factory=list)
    saves_at: dict[str, str] = field(default_factory=dict)
    """By path, the line of the script that last wrote it, as file:line."""
    loads_at: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    fault: str = ""
    """The traceback of a fault of the recorder, after which it recorded nothing."""
    end: dict[str, Any] | None = None

    @property
    def exception(self) -> str | None:
        return self.end.get("exception") if self.end else None

    def at_end(self, part: str) -> Digests:
        """Return the weights, state, buffers or others at the exit; empty if it was killed."""
        return (self.end or {}).get(part) or {}


@dataclass
class StartRecord:
    """``processes``: those with a training step, or else those that wrote or loaded a checkpoint, by rank and order."""

    name: str
    command: list[str]
    code: int | None
    wall_s: float
    killed: dict[str, Any] | None
    output: Path | None
    processes: list[Process]
    others: int = 0
    """Processes without steps and checkpoints: launchers, loader workers and helpers."""
    late: str = ""
    """Why the auditor ended it before its time; empty if it did not."""

    @property
    def first(self) -> Process | None:
        """The process of the lowest rank."""
        return self.processes[0] if self.processes else None

    @property
    def steps(self) -> list[Step]:
        return self.first.steps if self.first else []

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those of all ranks, a moment each."""
        moments: dict[int, Checkpoint] = {}
        for process in self.processes:
            for checkpoint in process.checkpoints:
                moment = moments.setdefault(checkpoint.after, Checkpoint(checkpoint.after))
                moment.files.update(checkpoint.files)
                moment.renames += checkpoint.renames
        return [moments[after] for after in sorted(moments)]

    @property
    def loaded(self) -> list[str]:
        return [path for process in self.processes for path in process.loaded]

    @property
    def torn(self) -> list[str]:
        return [path for process in self.processes for path in process.torn]

    @property
    def fault(self) -> str:
        """The last line of a fault of the recorder; empty if it recorded everything."""
        return next((each.fault.strip().splitlines()[-1] for each in self.processes if each.fault), "")

    @property
    def stopped(self) -> bool:
        """True if the recorder ended it at a number of steps or at a state."""
        return any(process.stopped for process in self.processes)

    @property
    def of_harness(self) -> bool:
        """True if it is a run of the harness, which restores its own counters, and loads no torn checkpoint."""
        return any(step.beside for step in self.steps)

    def last_lines(self, count: int = 20) -> list[str]:
        """Return the end of what the start printed."""
        if self.output is None or not self.output.is_file():
            return []
        with open(self.output, "rb") as file:
            file.seek(max(0, self.output.stat().st_size - 20_000))
            text = file.read().decode("utf-8", "replace")
        lines = [_COLORS.sub("", line) for line in text.splitlines()]
        return [line[:_WIDTH] for line in lines if line.strip(" \t^~")][-count:]


def read(folder: Path) -> StartRecord:
    """Read the records of one start. Lines that a kill tore are left out, and what is missing is empty."""
    about: dict[str, Any] = {}
    if (folder / "ended.json").is_file():
        about = json.loads((folder / "ended.json").read_text(encoding="utf-8"))
    processes = [_process(path) for path in sorted(folder.glob("rank*-*.jsonl"))]
    chosen = [process for process in processes if process.steps]
    chosen = chosen or [process for process in processes if process.checkpoints or process.torn or process.loaded]
    chosen.sort(key=lambda process: (process.rank, process.about.get("time") or 0, process.pid))
    counts: dict[int, int] = defaultdict(int)
    for process in chosen:
        process.order = counts[process.rank]
        counts[process.rank] += 1
    _lend_checkpoints(chosen, processes)
    command = about.get("command") or []
    return StartRecord(
        name=about.get("name") or folder.name,
        command=command.split() if isinstance(command, str) else list(command),
        code=about.get("code"),
        wall_s=float(about.get("wall_s") or 0.0),
        killed=about.get("killed"),
        output=Path(about["output"]) if about.get("output") else None,
        processes=chosen,
        others=len(processes) - len(chosen),
        late=about.get("late") or "",
    )


def _lend_checkpoints(chosen: list[Process], processes: list[Process]) -> None:
    """Give the torn files of processes that only write, such as a helper of an asynchronous save, to the first one."""
    for process in processes:
        if chosen and process not in chosen:
            chosen[0].torn += process.torn
            chosen[0].loaded += process.loaded


def _process(path: Path) -> Process:
    rank, _, pid = path.stem.removeprefix("rank").partition("-")
    process = Process(int(rank) if rank.isdigit() else 0, int(pid) if pid.isdigit() else 0)
    for entry in entries(path):
        _add(process, entry)
    return process


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of the recorder, but for one that a kill tore."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if isinstance(entry, dict):
            yield entry


def _add(process: Process, entry: dict[str, Any]) -> None:
    match entry.get("event"):
        case "process":
            process.about = entry
            process.rank = entry.get("rank") or process.rank
        case "epoch":
            process.epochs.append(entry["after"])
        case "step":
            process.steps.append(_step(entry))
        case "write":
            if entry["path"] not in process.torn:
                process.torn.append(entry["path"])
        case "written":
            if entry["path"] in process.torn:
                process.torn.remove(entry["path"])
            if not process.checkpoints or process.checkpoints[-1].after != entry["after"]:
                process.checkpoints.append(Checkpoint(entry["after"]))
            process.checkpoints[-1].files[entry["path"]] = entry.get("content") or {}
            process.saves_at[entry["path"]] = entry.get("line") or process.saves_at.get(entry["path"], "")
        case "renamed":
            _rename(process, entry["source"], entry["target"])
        case "loaded":
            process.loaded.append(entry["path"])
            process.loads_at[entry["path"]] = entry.get("line") or process.loads_at.get(entry["path"], "")
        case "stopped":
            process.stopped = True
        case "fault":
            process.fault = str(entry.get("text") or "unknown")
        case "end":
            process.end = entry


def _rename(process: Process, source: str, target: str) -> None:
    """Follow a renamed file, or the files of a renamed folder, back to the checkpoint that wrote them last."""
    for checkpoint in reversed(process.checkpoints):
        moved = [path for path in checkpoint.files if path == source or path.startswith(f"{source}/")]
        if moved:
            checkpoint.renames += checkpoint.after == len(process.steps)
            now = {path: target + path[len(source) :] for path in moved}
            checkpoint.files = {now.get(path, path): content for path, content in checkpoint.files.items()}
            process.saves_at |= {now[path]: process.saves_at.get(path, "") for path in moved}
            return


def _step(entry: dict[str, Any]) -> Step:
    calls = tuple(
        ModuleCall(str(call.get("module", "")), str(call.get("in")), call.get("rows") or 0, str(call.get("out")))
        for call in entry.get("calls") or ()
    )
    return Step(
        number=entry["number"],
        optimizer=entry.get("optimizer") or 0,
        skipped=bool(entry.get("skipped")),
        calls=calls,
        weights=entry.get("weights") or {},
        buffers=entry.get("buffers") or {},
        state=entry.get("state") or {},
        groups=tuple(entry.get("groups") or ()),
        gradients=entry.get("gradients") or {},
        scale=tuple(entry.get("scale") or ()),
        streams=entry.get("streams") or {},
        samples=entry.get("samples") or {},
        others=entry.get("others"),
        beside=entry.get("beside") or {},
        attributes=entry.get("attributes") or {},
        asked=tuple(entry.get("rows") or ()),
    )


def draws(folder: Path, work: Path) -> list[Draw]:
    """Return the lines that drew random numbers in a start whose plan asked for them; those of files in ``work`` first,
    by their names there."""
    found: list[Draw] = []
    for path in sorted(folder.glob("draws-*.jsonl")):
        for entry in entries(path):
            file = Path(entry["file"])
            name = file.relative_to(work) if file.is_relative_to(work) else file
            draw = Draw(entry["stream"], entry["function"], f"{name}:{entry['line']}", entry["worker"])
            if draw not in found:
                found.append(draw)
    return sorted(found, key=lambda draw: Path(draw.place).is_absolute())
