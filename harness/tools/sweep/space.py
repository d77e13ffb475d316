"""Expands a space into trials as plain data, and writes settings as a command line reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.tools.sweep.spec import Choices, Range, SweepSpec

Settings = dict[str, Any]  # {dotted key: value} of the settings that differ between trials


def grid(spec: SweepSpec) -> list[Settings]:
    """Every trial of a grid or a list. The first setting changes slowest, the seed fastest."""
    if isinstance(spec.space, list):
        trials = [dict(trial) for trial in spec.space]
    else:
        values = [values_of(axis) for axis in spec.space.values()]
        trials = [dict(zip(spec.space, chosen, strict=True)) for chosen in itertools.product(*values)]
    return [{**trial, "seed": seed} for trial in trials for seed in spec.seeds] if spec.seeds else trials


def corners(spec: SweepSpec) -> list[Settings]:
    """Extremes of a search's space: each end and each choice of one setting, the other settings at their first."""
    assert isinstance(spec.space, dict)
    ends = {
        key: [axis.low, axis.high] if isinstance(axis, Range) else values_of(axis) for key, axis in spec.space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def values_of(axis: Any) -> list[Any]:
    """The values of a list or of choices."""
    return axis.choices if isinstance(axis, Choices) else axis


def identity(settings: Any) -> str:
    """A text that is equal for equal settings in any order. 1 and 1.0 differ, as in YAML."""
    return json.dumps(settings, sort_keys=True, default=str)


def typed(settings: Settings) -> list[str]:
    """The settings as ``key=value`` words, which a command line reads as exactly these values."""
    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def spelled(value: Any) -> str:
    """``value`` as it is typed after ``key=``, without quotes where none are needed."""
    quoted = json.dumps(value, ensure_ascii=False)
    for text in (value, quoted) if isinstance(value, str) else (quoted,):
        if _reads_as(text, value):
            return text
    return json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={text}"]))["a"]  # type: ignore[call-overload,index]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        return False
    return type(read) is type(value) and bool(read == value) and text == text.strip()


_SHORT = {"launch.nproc": "world", "batch.global": "batch"}


def columns(trials: Iterable[Settings]) -> dict[str, str]:
    """{setting: heading}, as short as is unambiguous."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial))
    short = [key.rsplit(".", 1)[-1] for key in keys]
    return {
        key: _SHORT.get(key) or (name if short.count(name) == 1 else key) for key, name in zip(keys, short, strict=True)
    }
