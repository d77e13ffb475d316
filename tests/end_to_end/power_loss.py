"""What a disk may hold after a power cut, at every moment of a recorded run.

The rules are those of POSIX, which promises less than most file systems keep: the content of a file is safe once the
file was synced, the entries of a folder once the folder was synced. Everything else may be lost or half written, each
entry and each file by itself. Only a rename is all or nothing.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.end_to_end.processes import drive_in_terminal

_OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")
Entries = dict[str, int]  # of a folder: {name: inode}


@dataclass
class Moment:
    """The disk before one operation. ``folders`` and ``files`` are by inode."""

    folders: dict[int, Entries]
    files: dict[int, bytes]
    synced: int | None = None
    """The inode that was synced at this moment, if that is what happened."""
    path: str = ""
    claims: dict[str, Any] = field(default_factory=dict)
    """What the harness claims to be safe from now on: {"checkpoint": step, "best": step, "done": True}."""


class Recorder:
    """Takes a look at the whole folder ``root`` before every operation of this process on files."""

    def __init__(self, root: Path) -> None:
        self.root, self.moments, self._inside = root, [], False
        self._held: dict[int, int] = {}  # an open file keeps the system from using its inode number again
        self._contents: dict[bytes, bytes] = {}  # equal contents are stored once
        self._sync = os.fsync

    def install(self) -> None:
        os.fsync = self._fsync
        sys.addaudithook(self._audit)
        self.look()

    def look(self, **facts: Any) -> None:
        self._inside = True
        folders: dict[int, Entries] = {}
        files: dict[int, bytes] = {}
        self._walk(self.root, folders, files)
        self.moments.append(Moment(folders, files, **facts))
        self._inside = False

    def save(self, path: Path) -> None:
        self.look()
        root = self.root.stat().st_ino
        path.write_bytes(pickle.dumps((root, self.moments)))

    def _walk(self, folder: Path, folders: dict[int, Entries], files: dict[int, bytes]) -> None:
        entries = folders.setdefault(self._hold(folder), {})
        for path in sorted(folder.iterdir()):
            entries[path.name] = inode = self._hold(path)
            if path.is_dir():
                self._walk(path, folders, files)
            else:
                content = path.read_bytes()
                files[inode] = self._contents.setdefault(hashlib.sha256(content).digest(), content)

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _fsync(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        self._sync(number)
        self.look(synced=os.fstat(number).st_ino, path=os.readlink(f"/proc/self/fd/{number}"))

    def _audit(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not self._inside and (writes or event in _OPERATIONS) and str(self.root) in str(arguments[0]):
            self.look(path=str(arguments[0]))


@dataclass
class _Folder:
    durable: Entries
    pending: list[dict[str, int | None]] = field(default_factory=list)  # {name: inode, None if removed}, in order


@dataclass
class _File:
    durable: bytes | None  # None: never synced
    current: bytes


class Disk:
    """Replays a recording. ``forget(path)`` true: as if the code had not synced that path."""

    def __init__(self, recording: Path, forget: Callable[[str], bool] = lambda path: False) -> None:
        self.root, self.moments = pickle.loads(recording.read_bytes())
        self._forget = forget
        first: Moment = self.moments[0]
        self.folders = {inode: _Folder(dict(entries)) for inode, entries in first.folders.items()}
        self.files = {inode: _File(content, content) for inode, content in first.files.items()}
        self.claims: dict[str, Any] = {}

    def replay(self) -> Iterator[Moment]:
        """Go through the moments; after each one, ``after_crash`` describes a crash at that moment."""
        for moment in self.moments:
            self._update(moment)
            if moment.synced is not None and not self._forget(moment.path):
                if folder := self.folders.get(moment.synced):
                    folder.durable, folder.pending = dict(moment.folders.get(moment.synced, {})), []
                if file := self.files.get(moment.synced):
                    file.durable = file.current
            self.claims |= moment.claims
            yield moment

    def _update(self, moment: Moment) -> None:
        for inode, content in moment.files.items():
            self.files.setdefault(inode, _File(None, content)).current = content
        for inode, entries in moment.folders.items():
            folder = self.folders.setdefault(inode, _Folder({}))
            before = dict(folder.durable)
            for change in folder.pending:
                before = _applied(before, change)
            names = [name for name in before.keys() | entries.keys() if before.get(name) != entries.get(name)]
            gone = {before[name] for name in names if name in before}
            moved = [name for name in names if entries.get(name) in gone]
            # A rename is one change; what else happened between two looks are changes of their own.
            renamed = {old: entries.get(old) for new in moved for old in names if before.get(old) == entries[new]}
            together = {name: entries[name] for name in moved} | renamed
            changes = [together] if together else []
            folder.pending += changes + [{name: entries.get(name)} for name in names if name not in together]

    def after_crash(self, how: str, dice: random.Random) -> dict[str, bytes]:
        """{path: content} that may be left; an empty folder is a path that ends with a slash.

        how: "nothing" that was not synced is there; all "entries" but only synced contents; the same with "zeros" in
        place of what is missing; with contents "torn" in the middle; "any" of these for each file, with any entries
        """
        return dict(self._below(self.root, "", how, dice))

    def _below(self, inode: int, prefix: str, how: str, dice: random.Random) -> Iterator[tuple[str, bytes]]:
        folder = self.folders[inode]
        entries = dict(folder.durable)
        for change in folder.pending:
            if how != "nothing" and (how != "any" or dice.random() < 0.5):
                entries = _applied(entries, change)
        if not entries and prefix:
            yield prefix, b""
        for name, child in entries.items():
            if child in self.folders:
                yield from self._below(child, f"{prefix}{name}/", how, dice)
            else:
                yield prefix + name, _content(self.files[child], how, dice)


def _applied(entries: Entries, change: dict[str, int | None]) -> Entries:
    changed = {**entries, **change}
    return {name: inode for name, inode in changed.items() if inode is not None}


def _content(file: _File, how: str, dice: random.Random) -> bytes:
    durable = file.durable if file.durable is not None else b""
    if file.durable == file.current:
        return durable
    if how == "any":
        how = dice.choice(["nothing", "zeros", "torn", "whole"])
    common = len(os.path.commonprefix([durable, file.current]))  # what is appended later leaves it alone
    if how == "zeros":  # the new length without the new data
        return file.current[:common] + bytes(len(file.current) - common)
    if how == "torn":
        return file.current[: (common + len(file.current)) // 2]
    return file.current if how == "whole" else durable


def write(content: dict[str, bytes], folder: Path) -> None:
    """Write what ``Disk.after_crash`` returned."""
    folder.mkdir()
    for name, data in content.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(data)


def record(arguments: list[str], terminal: str, root: str, recording: str) -> None:
    """Be driver.py with a recorder on the folder ``root``; for ``tests.ranks.start``."""
    from harness.runs.checkpoints import Checkpoints

    recorder = Recorder(Path(root))

    def claimed(name: str, claim: str) -> None:
        function = getattr(Checkpoints, name)

        def call(self: Any, step: int, *rest: Any) -> Any:
            found = function(self, step, *rest)
            recorder.look(claims={claim: step})
            return found

        setattr(Checkpoints, name, call)

    claimed("write", "checkpoint")
    claimed("mark_best", "best")
    recorder.install()
    try:
        drive_in_terminal(arguments, terminal)
    except SystemExit as end:
        recorder.look(claims={"done": end.code == 0})
        recorder.save(Path(recording))
        raise
