"""Two finished run folders compared bit for bit: checkpoints, best weights, log, summary and predictions. Needs torch.

One must repeat the other exactly, so anything missing is a difference, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import seals
from harness.errors import CheckpointError, first_line, require_regular_file
from harness.runs import checkpoint, layout
from harness.runs.files import parse_json
from harness.tools.compare import saved_state
from harness.tools.compare.saved_state import ABSENT, StateDifference, differing
from harness.trackers.metrics_log import TIMES

_FILES = (layout.WEIGHTS, layout.PREDICTIONS, layout.CONFUSION, layout.TASK)
_POINTERS = (layout.LATEST, layout.BEST)


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ.

    file: inside the run folder, such as checkpoints/step-10
    what: the part of it: an entry of a checkpoint, a field of the log
    step: of the checkpoint or log line; None where a file belongs to no step
    """

    file: str
    what: StateDifference
    step: int | None = None

    def __str__(self) -> str:
        part = self.what
        if part.values is not None:
            return f"{self.file}: {part.name}: {part.values[0]} and {part.values[1]}"
        return f"{self.file}: {part.name} differs " + (
            f"by up to {part.by:.3g}" if part.by is not None else "in its shape"
        )


def differences(one: Path, other: Path, *, trust: bool = False) -> list[Difference]:
    """Every difference between two run folders; empty if one repeats the other bit for bit.

    Times and the names of the runs do not count, nor do checkpoints that only one folder has kept, unless it is the
    newest or the best one.
    Reads all checkpoints that both have. Folders without a log or checkpoint are different, even if both lack it.
    ``trust``: import the checkpoint format that a run of someone else names.
    """
    return [*_logs(one, other), *_checkpoints(one, other, trust), *_summaries(one, other), *_files(one, other)]


def _logs(one: Path, other: Path) -> Iterator[Difference]:
    mine, theirs = _lines(one), _lines(other)
    if not mine and not theirs:
        yield _plain(layout.METRICS, "lines", (ABSENT, ABSENT))
    for number, (line, partner) in enumerate(zip(mine, theirs, strict=False), 1):
        name = f"{line.get('split')} entry of step {line.get('step')}"
        for what in differing(name, line, partner):
            yield Difference(f"{layout.METRICS}:{number}", what, line.get("step"))
    if len(mine) != len(theirs):
        yield _plain(layout.METRICS, "number of lines", (len(mine), len(theirs)))


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log without their times; a damaged line is an entry of its own."""
    try:
        require_regular_file(folder / layout.METRICS)
        lines = (folder / layout.METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [_without_times(_parsed(line)) for line in lines]


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = seals.unsealed(parse_json(text))
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {"damaged line": text}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES}
    return value


def _checkpoints(one: Path, other: Path, trust: bool) -> Iterator[Difference]:
    folders = one / layout.CHECKPOINTS, other / layout.CHECKPOINTS
    for pointer in _POINTERS:
        names = [_text(folder / pointer) for folder in folders]
        if names[0] != names[1] or (pointer == layout.LATEST and names[0] == ABSENT):
            yield _plain(layout.CHECKPOINTS, pointer, names)
    mine, theirs = map(checkpoint.steps, folders)
    for step in sorted(mine.keys() & theirs.keys()):
        file = f"{layout.CHECKPOINTS}/{layout.step_name(step)}"
        problems = [checkpoint.damage(path) for path in (mine[step], theirs[step])]
        if any(problems):
            yield _plain(file, "state", [problem or "intact" for problem in problems], step)
            continue
        try:
            yield from (Difference(file, what, step) for what in saved_state.between(mine[step], theirs[step], trust))
        except (CheckpointError, AttributeError, KeyError, TypeError) as error:
            yield _plain(file, "state", ("cannot be compared", first_line(error)), step)


def _summaries(one: Path, other: Path) -> Iterator[Difference]:
    pair = [_text(folder / layout.SUMMARY) for folder in (one, other)]
    contents = [ABSENT if text == ABSENT else {**_without_times(_parsed(text)), "name": ""} for text in pair]
    yield from (Difference(layout.SUMMARY, what) for what in differing("summary", *contents))


def _files(one: Path, other: Path) -> Iterator[Difference]:
    for name in _FILES:
        pair = [_content(folder / name) for folder in (one, other)]
        if pair[0] == pair[1]:
            continue
        tensor = saved_state.weights(one / name, other / name) if name == layout.WEIGHTS else None
        yield Difference(name, tensor) if tensor else _plain(name, "first difference", _first_lines(*pair))


def _first_lines(one: bytes | None, other: bytes | None) -> tuple[str, str]:
    """Return the first line that differs in two texts; the first byte in other files."""
    if one is None or other is None:
        return ("present", ABSENT) if other is None else (ABSENT, "present")
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = one.rfind(b"\n", 0, place) + 1
    try:
        texts = [(content[start:].splitlines() or [b""])[0].decode()[:100] for content in (one, other)]
    except UnicodeDecodeError:
        return f"{len(one)} bytes", f"{len(other)} bytes, first difference at byte {place}"
    return texts[0], texts[1]


def _content(path: Path) -> bytes | None:
    try:
        require_regular_file(path)
        return path.read_bytes()
    except OSError:
        return None


def _text(path: Path) -> str:
    content = _content(path)
    return ABSENT if content is None else content.decode(errors="replace").strip()


def _plain(file: str, name: str, values: Sequence[Any], step: int | None = None) -> Difference:
    return Difference(file, StateDifference(name, None, (values[0], values[1])), step)
