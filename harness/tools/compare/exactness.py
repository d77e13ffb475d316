"""Two finished run folders compared bit for bit: checkpoints, best weights, log, summary and predictions.
Needs torch.

One must repeat the other exactly, so anything missing is a difference, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config import seals
from harness.errors import CheckpointError, first_line, require_regular_file
from harness.runs import checkpoint, checkpoints, layout
from harness.runs.files import parse_json
from harness.runs.metrics_table import TIMES

_FILES = (layout.WEIGHTS, layout.PREDICTIONS, layout.CONFUSION, layout.TASK)
_POINTERS = (layout.LATEST, layout.BEST)
_FIRST = ("model", "optimizer", "amp", "ema", "state", "ranks")  # the order in which differences are reported
_OF_TIMES = ("log_offset", "log_sha256")  # of the log, in which the times vary
ABSENT = "(absent)"
_PER_WORLD_SIZE = ("ranks", "num_ranks")  # always differ between two world sizes


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs, by at most ``by``; None: in its shape."""

    name: str
    by: float | None


@dataclass(frozen=True)
class ValueDifference:
    """A plain value that differs."""

    name: str
    values: tuple[Any, Any]


StateDifference = TensorDifference | ValueDifference


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ."""

    file: str
    """Its place in the run folder, such as checkpoints/step-10."""
    what: StateDifference
    """The part of the file: an entry of a checkpoint, a field of the log."""
    step: int | None = None
    """That of the checkpoint or log line; None where a file belongs to no step."""

    def __str__(self) -> str:
        part = self.what
        if isinstance(part, ValueDifference):
            return f"{self.file}: {part.name}: {part.values[0]} and {part.values[1]}"
        return f"{self.file}: {part.name} differs " + (
            f"by up to {part.by:.3g}" if part.by is not None else "in its shape"
        )


def differences(folder_a: Path, folder_b: Path, *, trust: bool = False) -> list[Difference]:
    """Return every difference between two run folders; empty if one repeats the other bit for bit.

    Times and the names of the runs do not count, nor do checkpoints that only one folder has kept, unless it is the
    newest or the best one.
    Reads all checkpoints that both have. Folders without a log or checkpoint are different, even if both lack it.
    ``trust``: import the checkpoint format that a run of someone else names.
    """
    return [
        *_logs(folder_a, folder_b),
        *_checkpoints(folder_a, folder_b, trust),
        *_summaries(folder_a, folder_b),
        *_files(folder_a, folder_b),
    ]


def _logs(folder_a: Path, folder_b: Path) -> Iterator[Difference]:
    lines_a, lines_b = _lines(folder_a), _lines(folder_b)
    if not lines_a and not lines_b:
        yield _plain(layout.METRICS, "lines", (ABSENT, ABSENT))
    for number, (line, partner) in enumerate(zip(lines_a, lines_b, strict=False), 1):
        name = f"{line.get('split')} entry of step {line.get('step')}"
        for difference in differing(name, line, partner):
            yield Difference(f"{layout.METRICS}:{number}", difference, line.get("step"))
    if len(lines_a) != len(lines_b):
        yield _plain(layout.METRICS, "number of lines", (len(lines_a), len(lines_b)))


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


def _checkpoints(folder_a: Path, folder_b: Path, trust: bool) -> Iterator[Difference]:
    folders = folder_a / layout.CHECKPOINTS, folder_b / layout.CHECKPOINTS
    for pointer in _POINTERS:
        names = [_text(folder / pointer) for folder in folders]
        if names[0] != names[1] or (pointer == layout.LATEST and names[0] == ABSENT):
            yield _plain(layout.CHECKPOINTS, pointer, names)
    paths_a, paths_b = map(checkpoint.steps, folders)
    for step in sorted(paths_a.keys() & paths_b.keys()):
        file = f"{layout.CHECKPOINTS}/{layout.step_name(step)}"
        problems = [checkpoint.damage(path) for path in (paths_a[step], paths_b[step])]
        if any(problems):
            yield _plain(file, "state", [problem or "intact" for problem in problems], step)
            continue
        try:
            yield from (
                Difference(file, difference, step) for difference in _between(paths_a[step], paths_b[step], trust)
            )
        except (CheckpointError, AttributeError, KeyError, TypeError) as error:
            yield _plain(file, "state", ("cannot be compared", first_line(error)), step)


def _summaries(folder_a: Path, folder_b: Path) -> Iterator[Difference]:
    pair = [_text(folder / layout.SUMMARY) for folder in (folder_a, folder_b)]
    contents = [ABSENT if text == ABSENT else {**_without_times(_parsed(text)), "name": ""} for text in pair]
    yield from (Difference(layout.SUMMARY, difference) for difference in differing("summary", *contents))


def _files(folder_a: Path, folder_b: Path) -> Iterator[Difference]:
    arrays = {
        path.relative_to(folder)
        for folder in (folder_a, folder_b)
        for path in (folder / layout.PREDICTED).glob("*/*.*")
    }
    for name in (*_FILES, *map(str, sorted(arrays))):
        pair = [_content(folder / name) for folder in (folder_a, folder_b)]
        if pair[0] == pair[1]:
            continue
        tensor = _weights(folder_a / name, folder_b / name) if name == layout.WEIGHTS else None
        yield Difference(name, tensor) if tensor else _plain(name, "first difference", _first_lines(*pair))


def _first_lines(content_a: bytes | None, content_b: bytes | None) -> tuple[str, str]:
    """Return the first line that differs in two texts, a part of a long one; the first byte in other files."""
    if content_a is None or content_b is None:
        return ("present", ABSENT) if content_b is None else (ABSENT, "present")
    position = next(
        (i for i, (a, b) in enumerate(zip(content_a, content_b, strict=False)) if a != b),
        min(len(content_a), len(content_b)),
    )
    start = content_a.rfind(b"\n", 0, position) + 1
    try:
        texts = [(content[start:].splitlines() or [b""])[0].decode() for content in (content_a, content_b)]
    except UnicodeDecodeError:
        return f"{len(content_a)} bytes", f"{len(content_b)} bytes, first difference at byte {position}"
    first = max(0, len(os.path.commonprefix(texts)) - 50)
    line_a, line_b = ("..." * bool(first) + text[first : first + 100] for text in texts)
    return line_a, line_b


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
    return Difference(file, ValueDifference(name, (values[0], values[1])), step)


# Checkpoints and weights


def _weights(file_a: Path, file_b: Path) -> StateDifference | None:
    """Return the first difference between two files of weights; None if they cannot be read, or only their steps
    differ."""
    try:
        with safe_open(file_a, "pt") as tensors_a, safe_open(file_b, "pt") as tensors_b:
            for name in sorted({*tensors_a.keys(), *tensors_b.keys()}):
                pair = [file.get_tensor(name) if name in file.keys() else ABSENT for file in (tensors_a, tensors_b)]  # noqa: SIM118
                if first := next(differing(name, *pair), None):
                    return first
    except (SafetensorError, OSError):
        pass
    return None


def _between(path_a: Path, path_b: Path, trust: bool = False) -> Iterator[StateDifference]:
    """Yield every difference between two checkpoint folders, weights first. Times do not count, nor does what only a
    run with parallel.logical_ranks records. Raises CheckpointError."""
    content_a, content_b = (checkpoints.read(path, mapped=True, trust=trust) for path in (path_a, path_b))
    same_world = content_a.get("num_ranks") == content_b.get("num_ranks")
    ignored = {*_OF_TIMES, "kernels"} if {} in (content_a.get("kernels"), content_b.get("kernels")) else _OF_TIMES
    names = [name for name in dict.fromkeys((*_FIRST, *sorted({*content_a, *content_b}))) if name not in ignored]
    for name in names:
        if same_world or name not in _PER_WORLD_SIZE:
            pair = [without_clocks(name, content.get(name, ABSENT), same_world) for content in (content_a, content_b)]
            yield from differing(name, *pair)


def without_clocks(name: str, part: Any, same_world: bool = True) -> Any:
    """Return a part of a checkpoint without its times, and, if world sizes differ, without the ranks' shares of the
    epoch."""
    if name == "state":
        timeless = _without_seconds(part)
        return timeless if same_world else {key: value for key, value in timeless.items() if key != "segments"}
    if name == "ranks":
        return [{**rank, "meter": _without_seconds(rank["meter"])} for rank in part]
    return part


def _without_seconds(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if not key.endswith("_s")}


def differing(name: str, a: Any, b: Any) -> Iterator[StateDifference]:
    """Yield each place under ``name`` where nested plain data and tensors differ in a bit, in order. NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not _same_bits(a, b):
            yield TensorDifference(name, _max_difference(a, b))
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differing(f"{name}.{key}", a.get(key, ABSENT), b.get(key, ABSENT))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from differing(f"{name}[{index}]", *pair)
    elif not _same_value(a, b):
        yield ValueDifference(name, (_short(a), _short(b)))


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()  # 0.0 == -0.0, and NaN != NaN
    return type(a) is type(b) and a == b


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)] if a.numel() else []
    return not bits or torch.equal(*bits)


def _max_difference(a: Tensor, b: Tensor) -> float | None:
    if a.shape != b.shape:
        return None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max()) if a.numel() else 0.0


def _short(value: Any) -> Any:
    """Return ``value`` if it is text or a number, otherwise its type and size."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return value if value is None or isinstance(value, str | int | float) else f"{type(value).__name__} of {len(value)}"
