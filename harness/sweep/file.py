"""Reading a sweep file, with what the command line adds to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config import loader
from harness.config.schema import flatten
from harness.errors import ConfigError
from harness.sweep.conflicts import conflicts
from harness.sweep.spec import Sweep, axes


@dataclass(frozen=True)
class SweepFile:
    """A sweep as it was read."""

    sweep: Sweep
    path: str
    """The file, as typed."""
    base: str
    """The experiment's YAML, from the working folder."""
    fixed: dict[str, Any]
    """Settings of every trial by dotted key: those of ``set`` and, over them, those of the command line."""
    origins: dict[str, str]
    """Where settings are written, for messages: {dotted key: "file:line"}."""


def load(path: str, overrides: Sequence[str] = ()) -> SweepFile:
    """Read a sweep file. An override of a key of the file (trials=30) changes the file's; any other (train.epochs=3) is
    a setting of every trial. Raises ConfigError with all that is wrong in the file."""
    own = [word for word in overrides if word.partition("=")[0] in _KEYS or "=" not in word]
    sweep, origins = loader.load_as(Sweep, path, own, conflicts)
    settings = [word for word in overrides if word not in own]
    typed = flatten(OmegaConf.to_container(OmegaConf.from_dotlist(settings)))  # type: ignore[arg-type]
    varied = [key for key in axes(sweep) if key in typed]
    if varied:
        raise ConfigError(
            f"{varied[0]} is varied by the space of {path}, and cannot be one value too",
            where=loader.COMMAND_LINE,
            hint="leave it out, or edit the space",
        )
    written = {key.partition(".")[2]: where for key, where in origins.items() if key.split(".")[0] in ("set", "space")}
    return SweepFile(
        sweep=sweep,
        path=path,
        base=os.path.normpath(Path(path).parent / sweep.base),
        fixed={**flatten(sweep.set_), **typed},
        origins=written | dict.fromkeys(typed, loader.COMMAND_LINE),
    )


_KEYS = {field.alias or name for name, field in Sweep.model_fields.items()} - {"set", "space"}
