"""Compares what the two implementations computed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.oracle.side import path_of


def difference(name: str, original: Path, ours: Path) -> str:
    """What differs between the results of the cell ``name`` in two folders; empty if nothing does."""
    pair = [_load(path_of(folder, name)) for folder in (original, ours)]
    errors = [str(result.get("error", "")) for result in pair]
    if any(errors):
        return "; ".join(f"{who}: {error or 'works'}" for who, error in zip(("original", "here"), errors, strict=True))
    if void := _void(pair[1]):
        return f"nothing to compare: {void}"
    found = list(_differences("", *pair))
    return "; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else "")


def _load(file: Path) -> dict[str, Any]:
    missing = {"error": "did not run"}
    result: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False) if file.exists() else missing
    return result


def _void(result: dict[str, Any]) -> str:
    """Why a result shows nothing: weights that are all NaN would be equal whatever was computed."""
    bad = [tensor for tensor in _tensors(result.get("weights", [])) if not bool(tensor.isfinite().all())]
    return "the weights are not finite" if bad else ""


def _differences(label: str, original: Any, ours: Any) -> Iterator[str]:
    """One line per top-level label, with the largest difference below it."""
    if isinstance(original, dict) and isinstance(ours, dict) and (not label or label.startswith("rank")):
        for key in {**original, **ours}:
            if key not in original or key not in ours:
                yield f"{key}: only {'here' if key in ours else 'in the original'}: {_short((original | ours)[key])}"
            else:
                yield from _differences(f"{label} {key}".strip(), original[key], ours[key])
        return
    pairs = [pair for pair in _pairs(original, ours) if not _equal(*pair)]
    if not pairs:
        return
    for one, other in pairs:
        if words := _kind(one, other):
            yield f"{label}: {words}"
            return
    largest = max(_distance(one.double(), other.double()) for one, other in pairs)
    scale = max(float(one.double().nan_to_num(0, 0, 0).abs().max()) for one in _tensors(original))
    yield f"{label}: differ by {largest / max(scale, 1e-30):.1e} of the largest value"


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two elements, infinite where only one of them is finite."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().nan_to_num(inf).masked_fill(same, 0.0).max())


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (one for one, _ in _pairs(value, value) if isinstance(one, Tensor))


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two nested values; where their shapes differ, the values themselves."""
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        for key in one:
            yield from _pairs(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for pair in zip(one, other, strict=True):
            yield from _pairs(*pair)
    else:
        yield one, other


def _equal(one: Any, other: Any) -> bool:
    """NaNs in the same places are equal: their bits are not defined."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _same_bits(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return one == other or (one != one and other != other)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    nans = one.isnan()
    signs = one.signbit() == other.signbit()
    return torch.equal(nans, other.isnan()) and bool((nans | ((one == other) & signs)).all())


def _kind(one: Any, other: Any) -> str:
    """How two values differ that are no tensors of one shape and dtype; empty for such tensors."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
        return f"{_short(one)} in the original, {_short(other)} here"
    if one.dtype != other.dtype:
        return f"{one.dtype} in the original, {other.dtype} here".replace("torch.", "")
    return ""


def _short(value: Any) -> str:
    text = (
        f"a {value.dtype} tensor".replace("torch.", "") if isinstance(value, Tensor) else " ".join(str(value).split())
    )
    return text if len(text) < 160 else text[:157] + "..."
