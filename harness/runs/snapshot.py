"""The run folder as it is at one moment, kept until it has been brought away: hard links to its files.

A file that is replaced or deleted afterwards lives on in its link; one that is appended to is taken up to the size it
had. So training goes on while the parcel is under way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """What changes when a file does."""

    inode: int
    changed_ns: int
    size: int


def identify(path: Path) -> Identity:
    stat = path.stat()
    return Identity(stat.st_ino, stat.st_mtime_ns, stat.st_size)


@dataclass(frozen=True)
class Parcel:
    folder: Path
    files: dict[str, tuple[Identity, Path]]
    """{name in the run folder: (what it is, the link)}, of files that are not known to have arrived."""
    pointers: dict[str, str]
    """What ``latest`` and ``best`` say, where they are."""


class Outbox:
    """``folder`` is on the disk of the run folder, and of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier start, which was killed

    def pack(self, run: Path, names: Iterable[str], arrived: dict[str, Identity], pointers: dict[str, str]) -> Parcel:
        """The files ``names`` of ``run`` as they are now, without those that have arrived as they are."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        files = {}
        for number, name in enumerate(names):
            source, link = run / name, folder / str(number)
            with suppress(FileNotFoundError):  # a tracker's thread has taken it away since it was seen
                identity = identify(source)
                if arrived.get(name) != identity:
                    try:
                        os.link(source, link)
                    except OSError:  # a file system without hard links
                        shutil.copy2(source, link)
                    files[name] = (identity, link)
        return Parcel(folder, files, pointers)

    def whole(self, identity: Identity, link: Path) -> Path:
        """The file with exactly the bytes it had: the link, or a copy of its beginning where it was appended to."""
        if link.stat().st_size == identity.size:
            return link
        start = link.with_name(f"{link.name}.start")
        shutil.copyfile(link, start)
        os.truncate(start, identity.size)
        return start

    @staticmethod
    def drop(parcel: Parcel) -> None:
        shutil.rmtree(parcel.folder, ignore_errors=True)
