"""Bitwise comparison of what two runs saved: best weights, and the checkpoints of the same steps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.errors import CheckpointError, first_line
from harness.runs import checkpoint, layout

_FIRST = ("model", "optimizer", "amp", "ema", "state", "ranks")  # the order in which a difference is looked for
_NOT_THE_STATE = ("format", "log_offset")  # the latter counts bytes, and times have more or fewer digits
_OF_THE_GANG = ("ranks", "world_size")  # what differs between numbers of ranks in any case


@dataclass(frozen=True)
class Parting:
    """The first thing that differs: a tensor, by at most ``by`` (None: in its shape), or plain values."""

    name: str
    by: float | None
    values: tuple[Any, Any] | None


@dataclass(frozen=True)
class Weights:
    """``weights.safetensors``; ``steps``: which evaluation's they are. ``same`` is None where they cannot be compared,
    for the reason ``why``."""

    same: bool | None
    steps: tuple[int | None, int | None] = (None, None)
    first: Parting | None = None
    why: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """The whole checkpoints that both runs have, from the first to the newest or to the first that differs."""

    same: bool | None
    steps: list[int]  # of which both have a checkpoint
    equal: list[int]
    differs: int | None = None
    first: Parting | None = None
    newest: tuple[int | None, int | None] = (None, None)
    refused: tuple[str, ...] = ()


def weights(one: Path, other: Path) -> Weights:
    """Compare the best weights of two run folders."""
    missing = [label for label, folder in (("A", one), ("B", other)) if not _weights(folder).is_file()]
    if missing:
        has = "has no weights yet: it was" if len(missing) == 1 else "have no weights yet: they were"
        return Weights(None, why=f"{' and '.join(missing)} {has} not evaluated so far")
    try:
        with safe_open(_weights(one), "pt") as mine, safe_open(_weights(other), "pt") as theirs:
            steps = _step(mine), _step(theirs)
            if steps[0] != steps[1]:
                return Weights(None, steps, why=f"they are of step {steps[0]} in A and of step {steps[1]} in B")
            names = sorted({*mine.keys(), *theirs.keys()})
            for name in names:
                pair = [file.get_tensor(name) if name in file.keys() else None for file in (mine, theirs)]  # noqa: SIM118
                first = next(differing(name, *pair), None)
                if first:
                    return Weights(False, steps, first)
    except (SafetensorError, OSError) as error:
        return Weights(None, why=f"weights.safetensors cannot be read: {first_line(error)}")
    return Weights(True, steps)


def checkpoints(one: Path, other: Path) -> Checkpoints:
    """Compare the checkpoints of the same steps of two run folders, up to the first that differs."""
    mine, theirs = checkpoint.steps(one / layout.CHECKPOINTS), checkpoint.steps(other / layout.CHECKPOINTS)
    newest = max(mine, default=None), max(theirs, default=None)
    common = sorted(mine.keys() & theirs.keys())
    equal: list[int] = []
    refused: list[str] = []
    for step in common:
        problems = [
            f"{label}, step {step}: {problem}"
            for label, path in (("A", mine[step]), ("B", theirs[step]))
            if (problem := checkpoint.damage(path))
        ]
        try:
            found = [] if problems else list(_parting(mine[step], theirs[step]))
        except CheckpointError as error:
            problems.append(f"step {step}: {error.message}")
        except (AttributeError, KeyError, TypeError):
            problems.append(f"step {step}: what is in it is not what this harness writes")
        if problems:
            refused += problems
        elif found:
            return Checkpoints(False, common, equal, step, found[0], newest, tuple(refused))
        else:
            equal.append(step)
    return Checkpoints(True if equal else None, common, equal, None, None, newest, tuple(refused))


def _parting(one: Path, other: Path) -> list[Parting]:
    """The first difference of two checkpoints, if there is one."""
    mine, theirs = (checkpoint.read(path, mapped=True) for path in (one, other))
    same_gang = mine.get("world_size") == theirs.get("world_size")
    names = [name for name in dict.fromkeys((*_FIRST, *sorted({*mine, *theirs}))) if name not in _NOT_THE_STATE]
    for name in names:
        if same_gang or name not in _OF_THE_GANG:
            pair = [without_clocks(name, content.get(name), same_gang) for content in (mine, theirs)]
            for found in differing(name, *pair):
                return [found]
    return []


def without_clocks(name: str, part: Any, same_gang: bool = True) -> Any:
    """A part of a checkpoint without seconds, and without who did which part of the epoch where gangs differ."""
    if name == "state":
        timeless = _without_seconds(part)
        return timeless if same_gang else {key: value for key, value in timeless.items() if key != "segments"}
    if name == "ranks":
        return [{**rank, "meter": _without_seconds(rank["meter"])} for rank in part]
    return part


def _without_seconds(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if not key.endswith("_s")}


def differing(name: str, one: Any, other: Any) -> Iterator[Parting]:
    """Every place under ``name`` where nested plain data and tensors differ in a bit, in order."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if not _same_bits(one, other):
            yield Parting(name, _apart(one, other), None)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from differing(f"{name}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(f"{name}[{index}]", *pair)
    elif type(one) is not type(other) or (one != other and not (one != one and other != other)):  # NaN is NaN
        yield Parting(name, None, (_short(one), _short(other)))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)] if one.numel() else []
    return not bits or torch.equal(*bits)


def _apart(one: Tensor, other: Tensor) -> float | None:
    if one.shape != other.shape:
        return None
    return float((one.double() - other.double()).abs().max())


def _short(value: Any) -> Any:
    """``value``, if it is a word or a number; else what kind of thing it is."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return value if value is None or isinstance(value, str | int | float) else f"{type(value).__name__} of {len(value)}"


def _weights(folder: Path) -> Path:
    return folder / layout.WEIGHTS


def _step(file: Any) -> int | None:
    step = (file.metadata() or {}).get("step", "")
    return int(step) if step.isdigit() else None
