"""Presets: the settings that decide speed and exactness, as files that ``extends: preset:NAME`` starts from."""

from __future__ import annotations

from pathlib import Path

_FILES = Path(__file__).with_name("preset_files")
PREFIX = "preset:"


def path(name: str) -> Path:
    """Return the file of the preset ``name``, whether or not it exists."""
    return _FILES / f"{name}.yaml"


def names() -> list[str]:
    return sorted(file.stem for file in _FILES.glob("*.yaml"))
