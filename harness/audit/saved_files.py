"""The checkpoints that a start wrote, according to its records, and the newest one that a resume can use."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.audit import records

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SavedFile:
    """A checkpoint file that was completed."""

    path: Path
    """Its name after all renames."""
    after: int
    """Optimizer steps before it."""
    number: int
    """Its place, from 1, among the files that this process completed."""
    write: int
    """Its place among those that it began."""
    size: int
    is_moved: bool = False
    """True if it was renamed before the next step, as a file that is written under a temporary name."""
    has_weights: bool = False
    """True if it holds a tensor that is a weight before some step, and no results of an evaluation alone."""

    def within(self, folders: Iterable[Path]) -> bool:
        return any(self.path.is_relative_to(folder) for folder in folders)


class SavedFiles:
    """The checkpoint files of one process, from its events."""

    def __init__(self, events: Events) -> None:
        self.all: list[SavedFile] = []
        """In the order in which they were completed, also those that were replaced later."""
        self.present: dict[Path, SavedFile] = {}
        """Those that were not replaced."""
        self.torn: dict[Path, int] = {}
        """{path: place among the files that were begun} of those that are not complete"""
        self._before_step = 0  # files that were completed before the newest step
        begun = 0
        weights = _saved_weights(events)
        for event in events:
            if event["event"] == "step":
                self._before_step = len(self.all)
            elif event["event"] == "write":
                begun += 1
                path = Path(event["path"])
                self.present.pop(path, None)
                self.torn[path] = begun
            elif event["event"] == "written":
                path = Path(event["path"])
                write = self.torn.pop(path, begun)
                content = event.get("content") or {}
                new = SavedFile(
                    path, int(event["after"]), len(self.all) + 1, write, int(event.get("bytes") or 0),
                    has_weights=any(isinstance(each, str) and each in weights for each in content.values()),
                )  # fmt: skip
                self.all.append(new)
                self.present[path] = new
            elif event["event"] == "renamed":
                self._rename(Path(event["source"]), Path(event["target"]))

    def _rename(self, source: Path, target: Path) -> None:
        """Follow the rename of a file, or of a folder with files."""
        moved = {path: file for path, file in self.present.items() if path.is_relative_to(source)}
        if moved:
            self.present = {
                path: file
                for path, file in self.present.items()
                if path not in moved and not path.is_relative_to(target)
            }
        for path, file in moved.items():
            is_moved = file.is_moved or file.number > self._before_step
            new = replace(file, path=target / path.relative_to(source), is_moved=is_moved)
            self.present[new.path] = self.all[file.number - 1] = new


def _saved_weights(events: Events) -> set[str]:
    """Return the digests that the content of a checkpoint has for the weights before all steps."""
    weights = {each for event in events if event["event"] == "step" for each in event.get("weights", {}).values()}
    return {hashlib.sha1(f"tensor|{each}".encode(), usedforsecurity=False).hexdigest()[:16] for each in weights}


def newest(
    killed: Mapping[int, Events], undisturbed: Mapping[int, Events], folders: Sequence[Path], torn: bool = False
) -> Path | None:
    """Return the newest checkpoint in ``folders`` that the killed start completed and that exists: a file, or a folder
    whose files were all written at one moment.

    ``killed`` and ``undisturbed``: events by rank. A moment is complete if rank 0 wrote as many files as in the
    undisturbed run, and gave them their final names. Files with weights come before others. ``torn``: if there is no
    complete one, return the newest that was begun.
    """
    files = SavedFiles(killed.get(0, ()))
    num_written = _moments(files)
    num_expected = _moments(SavedFiles(undisturbed.get(0, ())))
    complete = [
        file
        for file in files.present.values()
        if file.within(folders) and num_written[file.after] >= num_expected[file.after] and file.path.exists()
    ]
    if not complete:
        begun = [path for path in files.torn if torn and path.exists() and any(map(path.is_relative_to, folders))]
        return max(begun, key=files.torn.__getitem__, default=None)
    everything = [file for rank in (*killed.values(), *undisturbed.values()) for file in SavedFiles(rank).all]
    last = max(complete, key=lambda file: (file.has_weights, file.number))
    return _with_its_folder(last, everything, folders)


def _moments(files: SavedFiles) -> Counter[int]:
    """Return {after: files of a moment and their renames}."""
    return Counter(file.after for file in files.all) + Counter(file.after for file in files.all if file.is_moved)


def _with_its_folder(file: SavedFile, everything: Sequence[SavedFile], folders: Sequence[Path]) -> Path:
    """Return the folder of ``file`` if it holds more files of this moment, and none of another; or one above it that
    holds still more."""
    found, size = file.path, 1
    for parent in file.path.parents:
        inside = {each.path: each.after for each in everything if each.path.is_relative_to(parent)}
        if parent in folders or set(inside.values()) != {file.after}:
            break
        if len(inside) > size:
            found, size = parent, len(inside)
    return found


def newest_match(pattern: str, work: Path, out: Path) -> Path | None:
    """Return the match of a glob pattern, relative to ``work``, that was changed last; ``{out}`` stands for ``out``."""
    escaped = Path(glob.escape(str(work)), pattern.replace("{out}", glob.escape(str(out))))
    matches = filter(os.path.exists, glob.iglob(str(escaped), recursive=True))  # not a link to a missing file
    path = max(matches, key=lambda path: os.stat(path).st_mtime_ns, default=None)
    return None if path is None else Path(path)


def outside_file(events: Events, folders: Sequence[Path]) -> Path | None:
    """Return a checkpoint file that is in none of ``folders``, if all are outside."""
    files = SavedFiles(events).all
    return files[-1].path if files and not any(file.within(folders) for file in files) else None


def events_by_rank(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return {rank: events} of the records of one start; of several processes of a rank, those with the most steps."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("rank*-*.jsonl")):
        rank = int(path.stem.removeprefix("rank").partition("-")[0])
        found[rank] = max(found[rank], list(records.entries(path)), key=_weight)
    return found


def _weight(events: Events) -> tuple[int, int]:
    return sum(event["event"] == "step" for event in events), len(events)
