"""Errors and hints about a path that is no run: which one may be meant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from harness.errors import ConfigError, did_you_mean, similar
from harness.runs import layout

_NAMED = 5  # runs in a hint


def require_folders(paths: Iterable[Path]) -> None:
    """Raise ConfigError if one of ``paths`` is no folder."""
    for path in paths:
        if not path.is_dir():
            raise no_run(path)


def no_run(path: Path) -> ConfigError:
    """Return the error for ``path``, which is neither a run nor a sweep, nor a folder of these."""
    what = "it contains neither a run nor a sweep" if os.path.isdir(path) else "there is no such folder"
    if not os.access(path, os.R_OK | os.X_OK) and os.path.isdir(path):
        what = "this user may not read it"
    return ConfigError(what, where=str(path), hint=run_hint(path, "a run folder or a sweep folder"))


def run_hint(path: Path, wanted: str = "a run folder") -> str:
    """Return the hint for ``path``, which is not ``wanted``: a run with a similar name, or else the newest runs below
    ``runs`` and ``path``, those with weights first."""
    runs: list[tuple[bool, float, Path]] = []
    found = [*path.glob(f"*/{layout.CONFIG}"), *Path().glob(f"runs/*/{layout.CONFIG}")]
    for config in {config.resolve(): config for config in found}.values():
        results = [file for name in (layout.METRICS, layout.WEIGHTS) if (file := config.with_name(name)).is_file()]
        if results:
            newest_change = max(file.stat().st_mtime for file in results)
            runs.append((config.with_name(layout.WEIGHTS) in results, newest_change, config.parent))
    named = {run.name: run for *_, run in sorted(runs)}
    near = named.get(path.name) or named.get(similar(path.name, named) or "")
    if near:
        return f"did you mean {shlex.quote(str(near))}?"
    newest = [shlex.quote(str(run)) for *_, run in sorted(runs, reverse=True)[:_NAMED]]
    return did_you_mean(path, os.path.isdir) or f"give {wanted}{', such as ' if newest else ''}{', '.join(newest)}"
