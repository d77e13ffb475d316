"""The results of a run that is kept at a URL, as a folder of this machine, for whoever reads runs.

A copy in the cache: only what has changed since the last time is fetched. Nothing is written to the URL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import filelock

from harness.errors import ConfigError
from harness.runs.files import is_url, write_atomically
from harness.runs.storage import UrlFolder, working_folder

_LOCK_S = 600.0  # for another process to fetch the same
_LOG = "logs/rank-0.log"


def at_hand(place: str, checkpoint: bool = False) -> Path:
    """The folder ``place``, or a copy of the results at the URL ``place``, with the newest ``checkpoint`` if that is
    asked for. Raises ConfigError where the URL cannot be read or holds no run."""
    if not is_url(place):
        return Path(place)
    url = UrlFolder(place)
    there = url.sizes()
    if "config.yaml" not in there:
        raise ConfigError(
            "this is not a run: it has no config.yaml", where=place, hint="name one: s3://BUCKET/runs/NAME"
        )
    names = [name for name in there if name == _LOG or not name.startswith(("checkpoints/", "logs/"))]
    if checkpoint and (newest := (url.read("checkpoints/latest") or "").strip()):
        names += [name for name in there if name.startswith(f"checkpoints/{newest}/")] + ["checkpoints/latest"]
    folder = working_folder(url.url, None, "read")
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.parent / "lock", timeout=_LOCK_S):
        _fetch(url, names, folder)
    return folder


def check_out(place: str, out: Path | None, example: str) -> None:
    """Raises ConfigError where something is to be written into a run folder that is a URL."""
    if out is None and is_url(place):
        raise ConfigError("nothing is written into a run at a URL", where=place, hint=f"--out {example}")


def _fetch(url: UrlFolder, names: Iterable[str], folder: Path) -> None:
    """The files ``names`` in ``folder``, and no others; those that are as they were stay."""
    marks = folder.parent / "marks.json"
    try:
        before = json.loads(marks.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    now = {name: url.mark(name) for name in names}
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in now:
            path.unlink()
    for name, mark in now.items():
        if before.get(name) != mark or not (folder / name).is_file():
            url.get(name, folder / name)
    write_atomically(marks, json.dumps(now) + "\n")
