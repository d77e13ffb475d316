"""Stores of files, and the order in which a run is copied between two of them.

A store reads and writes files by name, such as "checkpoints/step-8/state.pt"; a file is there completely or not at all.
This module has the store for a local folder; ``harness.runs.url_store`` has the one for fsspec URLs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from harness.runs import layout
from harness.runs.files import cache_folder, replacing, write_atomically


class Store(Protocol):
    where: str
    """Path or URL, for messages."""

    def files(self) -> dict[str, str]:
        """Return {name: a mark that changes with the content} of all files."""

    def read(self, name: str) -> str:
        """Return the text of a small file; empty if there is none."""

    def write(self, name: str, text: str) -> None:
        """Replace a small file."""

    def get(self, name: str, target: Path) -> None:
        """Copy a file to the local path ``target``. Raises FileNotFoundError if it does not exist."""

    def put(self, source: Path, name: str) -> None:
        """Copy the local file ``source`` into the store. Raises FileNotFoundError if it does not exist."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order; those that do not exist are skipped."""


def copy_run(
    source: Store,
    target: Store,
    files: Mapping[str, str],
    pointers: Mapping[str, str] | None = None,
    copied: dict[str, str] | None = None,
    problem: Callable[[str], str | None] = lambda step: None,
) -> None:
    """Copy ``files`` ({name: mark}) such that ``target`` can be resumed from, wherever the copy is interrupted.

    Small files go first: the log must be at least as long as a checkpoint expects. Then each checkpoint, with its
    manifest last, which makes it valid. Last come the ``pointers`` ({"latest": "step-8"}), unless ``problem``
    finds something wrong with the copy of the checkpoint they name.

    ``copied`` remembers the marks of what arrived: unchanged files are not copied again. One store must be local.
    """
    copied = {} if copied is None else copied
    for name in sorted(files, key=_order):
        if copied.get(name) == files[name]:
            continue
        with suppress(FileNotFoundError):  # removed since it was listed
            if isinstance(source, LocalStore):
                target.put(source.folder / name, name)
            else:
                assert isinstance(target, LocalStore)
                source.get(name, target.folder / name)
            copied[name] = files[name]
    for pointer, step in (pointers or {}).items():
        name = layout.pointer(pointer)
        if copied.get(name) != step and not problem(step):
            target.write(name, step + "\n")
            copied[name] = step


def _order(name: str) -> tuple[bool, str, bool, str]:
    top, _, rest = name.partition("/")
    step, _, file = rest.partition("/")
    return (True, step, file == layout.MANIFEST, name) if top == layout.CHECKPOINTS else (False, "", False, name)


class LocalStore:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def files(self) -> dict[str, str]:
        marks = {}
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                name = path.relative_to(self.folder).as_posix()
                with suppress(FileNotFoundError):
                    if not path.is_symlink() and ".tmp" not in {part[-4:] for part in name.split("/")}:
                        stat = path.stat()
                        marks[name] = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        return marks

    def read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, text)

    def get(self, name: str, target: Path) -> None:
        LocalStore(target.parent).put(self.folder / name, target.name)

    def put(self, source: Path, name: str) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as file, replacing(target) as temporary, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def working_folder(url: str, cache_dir: str | None, purpose: str = "") -> Path:
    """Return the local folder for the run or checkpoint at ``url``; its parent belongs to it alone. ``cache_dir`` is
    the setting of that name; ``purpose`` separates copies that are only read."""
    name, key = url.rstrip("/").rpartition("/")[2], hashlib.sha256(url.encode()).hexdigest()[:16]
    cache = cache_folder(cache_dir)
    return cache / "runs" / purpose / f"{name}-{key}" / name
