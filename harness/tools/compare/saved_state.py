"""Bitwise comparison of the best weights of two runs, and of their checkpoints of the same steps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.runs import checkpoint

_FIRST = ("model", "optimizer", "amp", "ema", "state", "ranks")  # the order in which differences are reported
_IGNORED = ("log_offset", "log_sha256")  # of the log, in which the times vary
ABSENT = "(absent)"
_PER_WORLD_SIZE = ("ranks", "world_size")  # always differ between two world sizes


@dataclass(frozen=True)
class StateDifference:
    """The first part that differs: a tensor, by at most ``by`` (None: in its shape), or two plain values."""

    name: str
    by: float | None
    values: tuple[Any, Any] | None


def weights(one: Path, other: Path) -> StateDifference | None:
    """Return the first difference between two files of weights; None if they cannot be read, or only their steps
    differ."""
    try:
        with safe_open(one, "pt") as mine, safe_open(other, "pt") as theirs:
            for name in sorted({*mine.keys(), *theirs.keys()}):
                pair = [file.get_tensor(name) if name in file.keys() else ABSENT for file in (mine, theirs)]  # noqa: SIM118
                if first := next(differing(name, *pair), None):
                    return first
    except (SafetensorError, OSError):
        pass
    return None


def between(one: Path, other: Path, trust: bool = False) -> Iterator[StateDifference]:
    """Every difference between two checkpoint folders, weights first; times do not count. Raises CheckpointError."""
    mine, theirs = (checkpoint.read(path, mapped=True, trust=trust) for path in (one, other))
    same_world = mine.get("world_size") == theirs.get("world_size")
    names = [name for name in dict.fromkeys((*_FIRST, *sorted({*mine, *theirs}))) if name not in _IGNORED]
    for name in names:
        if same_world or name not in _PER_WORLD_SIZE:
            pair = [without_clocks(name, content.get(name, ABSENT), same_world) for content in (mine, theirs)]
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


def differing(name: str, one: Any, other: Any) -> Iterator[StateDifference]:
    """Every place under ``name`` where nested plain data and tensors differ in a bit, in order. NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if not _same_bits(one, other):
            yield StateDifference(name, _max_difference(one, other), None)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from differing(f"{name}.{key}", one.get(key, ABSENT), other.get(key, ABSENT))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(f"{name}[{index}]", *pair)
    elif not _same_value(one, other):
        yield StateDifference(name, None, (_short(one), _short(other)))


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()  # 0.0 == -0.0, and NaN != NaN
    return type(one) is type(other) and one == other


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)] if one.numel() else []
    return not bits or torch.equal(*bits)


def _max_difference(one: Tensor, other: Tensor) -> float | None:
    if one.shape != other.shape:
        return None
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max()) if one.numel() else 0.0


def _short(value: Any) -> Any:
    """``value`` if it is text or a number, otherwise its type and size."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return value if value is None or isinstance(value, str | int | float) else f"{type(value).__name__} of {len(value)}"
