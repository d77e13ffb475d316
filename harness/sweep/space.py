"""From a space to trials, as plain data: the combinations of a grid, and how a setting is typed on a command line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.sweep.spec import Choices, Range, Sweep

Settings = dict[str, Any]  # {dotted key: value} of what differs between trials


def grid(sweep: Sweep) -> list[Settings]:
    """Every trial of a grid or a list, the first setting changing slowest, seeds fastest."""
    trials = list(sweep.space) if isinstance(sweep.space, list) else _product(sweep.space)  # type: ignore[arg-type]
    if not sweep.seeds:
        return [dict(trial) for trial in trials]
    return [{**trial, "seed": seed} for trial in trials for seed in sweep.seeds]


def _product(space: dict[str, list[Any]]) -> list[Settings]:
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def corners(sweep: Sweep) -> list[Settings]:
    """Where a search can get to, one setting at a time: each end and each choice, the others at their first."""
    assert isinstance(sweep.space, dict)
    ends = {key: _ends(axis) for key, axis in sweep.space.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def _ends(axis: list[Any] | Range | Choices) -> list[Any]:
    if isinstance(axis, Range):
        return [axis.low, axis.high]
    return axis if isinstance(axis, list) else axis.choices


def identity(settings: Any) -> str:
    """The same text for the same settings, in whatever order they are written; 1 and 1.0 differ, as in a YAML."""
    return json.dumps(settings, sort_keys=True, default=str)


def typed(settings: Settings) -> list[str]:
    """The settings as ``key=value`` words that a command line reads as just these values."""
    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def spelled(value: Any) -> str:
    """``value`` as it is typed after ``key=``."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _reads_as(text, value) else json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={text}"]))["a"]  # type: ignore[call-overload,index]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        return False
    return type(read) is type(value) and bool(read == value) and text == text.strip()


_SHORT = {"launch.nproc": "world", "batch.global": "batch"}


def columns(trials: Iterable[Settings]) -> dict[str, str]:
    """{setting: heading}: as short as tells them apart."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial))
    short = [key.rsplit(".", 1)[-1] for key in keys]
    return {
        key: _SHORT.get(key) or (name if short.count(name) == 1 else key) for key, name in zip(keys, short, strict=True)
    }
