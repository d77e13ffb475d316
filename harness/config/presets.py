"""Presets: the settings that decide speed and exactness, as files that ``extends: preset:NAME`` starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from harness.config.schema import Config, flatten

_FILES = Path(__file__).with_name("preset_files")
PREFIX = "preset:"
DEFAULT = "apex-2019"


def path(name: str) -> Path:
    """Return the file of the preset ``name``, whether or not it exists."""
    return _FILES / f"{name}.yaml"


def names() -> list[str]:
    return sorted(file.stem for file in _FILES.glob("*.yaml"))


def changes(config: Config, name: str) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in ``config``, value in the preset ``name``)} of the settings that differ."""
    preset = flatten(yaml.safe_load(path(name).read_text(encoding="utf-8")))
    own = flatten(config.model_dump(mode="json", by_alias=True))
    return {key: (own[key], value) for key, value in preset.items() if own[key] != value}


def nearest(config: Config) -> str:
    """Return the preset that ``config`` follows, with the settings in which it differs."""
    found = {name: changes(config, name) for name in names()}
    name = min(found, key=lambda name: (len(found[name]), name != DEFAULT))
    differing = [f"{key}={_shown(own)}" for key, (own, _) in found[name].items()]
    return f"{name}, except {', '.join(differing)}" if differing else name


def _shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))
