"""Local copies of the results of runs at URLs, for commands that read runs. Nothing is written to the URL."""

from __future__ import annotations

import json
from pathlib import Path

from harness.config.places import is_url
from harness.errors import ConfigError
from harness.runs import layout
from harness.runs.fetch import made_once
from harness.runs.files import write_atomically
from harness.runs.storage import LocalStore, copy_run, working_folder
from harness.runs.url_store import UrlStore

_ATTEMPTS = 3  # to find a moment at which no other start takes the run over
_LATEST = layout.pointer(layout.LATEST)


def local_copy(path_or_url: str, checkpoint: bool = False) -> Path:
    """Return ``path_or_url`` itself if it is a folder; for a URL, a copy of its results, with the newest ``checkpoint``
    on request.

    Downloads only what has changed since the last call. Raises ConfigError if the URL cannot be read or holds no run.
    """
    if not is_url(path_or_url):
        return Path(path_or_url)
    store = UrlStore(path_or_url)
    # Two commands may read at the same time: one that needs no checkpoint must not remove that of the other.
    folder = working_folder(store.where, None, "read-checkpoint" if checkpoint else "read")
    with made_once(folder):
        for _ in range(_ATTEMPTS):
            start, newest = store.read(layout.START), store.read(_LATEST).strip() if checkpoint else ""
            _fetch(store, folder, newest)
            # Another start may have moved the run aside, and training may have removed the checkpoint, meanwhile.
            copy = folder / layout.CHECKPOINTS / newest
            removed = newest and not _is_complete(copy) and store.read(_LATEST).strip() != newest
            if store.read(layout.START) == start and not removed:
                return folder
    raise ConfigError(
        "the run changed while it was being downloaded",
        where=path_or_url,
        hint="run the same command again, or wait until the run has ended",
    )


def _is_complete(checkpoint: Path) -> bool:
    from harness.runs.checkpoint import damage  # late: it imports torch

    return damage(checkpoint) is None


def _fetch(store: UrlStore, folder: Path, newest: str) -> None:
    """Copy what has changed in ``store`` since the last call, and remove other files from ``folder``."""
    files = store.files()  # after ``newest`` was read: the checkpoint that it names is complete
    if layout.CONFIG not in files:
        raise ConfigError(
            "this is not a run: it has no config.yaml",
            where=store.where,
            hint="give a run, such as s3://BUCKET/runs/NAME",
        )
    chosen = {
        name: mark for name, mark in files.items()
        if name == f"{layout.LOGS}/{layout.rank_exit(0)}"
        or (newest and name.startswith(f"{layout.CHECKPOINTS}/{newest}/"))
        or not name.startswith((f"{layout.CHECKPOINTS}/", f"{layout.LOGS}/"))
    }  # fmt: skip
    marks, local = folder.parent / "marks.json", LocalStore(folder)
    try:
        copied = json.loads(marks.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        copied = {}
    present = set(local.files())
    local.remove(present - set(chosen))
    copied = {name: mark for name, mark in copied.items() if name in present and name in chosen}
    copy_run(store, local, chosen, {layout.LATEST: newest} if newest else {}, copied)
    write_atomically(marks, json.dumps(copied) + "\n")


def require_out(run: str, out: Path | None, example: str) -> None:
    """Raise ConfigError if a command would write its result into a run at a URL."""
    if out is None and is_url(run):
        raise ConfigError("results cannot be written to a run at a URL", where=run, hint=f"add --out {example}")
