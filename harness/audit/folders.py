"""The folders of an audit: every start of a command finds the same files at the same absolute paths."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ConfigError, reason, remedy

DATA_BYTES = 100e6  # a folder or file of more is linked if it holds neither code nor checkpoints
MOST_BYTES = 2e9  # of all that is copied
_COPIES = 8  # of the working folder: its snapshot, the starts, and the one that runs
_SKIPPED, _TOOLS = {"__pycache__"}, {".git", "node_modules"}
_MARK = ".verify-resume"  # in the folder of an audit, which another audit does not copy
_CODE = (".py", ".ipynb", ".sh")
_RESULTS = re.compile(r"out(put)?s?|runs?|results?|wandb|mlruns|.*(log|checkpoint|ckpt|save|experiment|model)s?", re.I)
_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|safetensors|distcp)\b|^(pytorch_model|model|optimizer|adapter)\S*\.bin$")


@dataclass
class _Content:
    """What a folder holds, with the folders below it."""

    size: int = 0
    is_data: bool = True
    files: dict[Path, int] = field(default_factory=dict)
    """Large files directly in it."""
    folders: dict[Path, _Content] = field(default_factory=dict)


class WorkCopy:
    """Which parts of a working folder are copied, and which are linked since they are large and only read.

    Linked are ``.git``, virtual environments and node_modules; folders of more than 100 MB without code and
    checkpoints; and files of more than 100 MB that are not checkpoints. Folders whose names are for results, such as
    ``outputs``, are always copied, since a start writes there. Raises ConfigError if more than 2 GB remain.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self._target = source, target
        self._times: dict[Path, tuple[int, int] | None] = {}
        self.links: dict[Path, int] = {}
        """{what is linked: bytes, 0 if they were not counted}"""
        content = self._examine(source)
        self.size = self._link_data(content)
        if self.size > MOST_BYTES:
            largest = sorted(self._copied_sizes(source, content), reverse=True)[:3]
            raise ConfigError(
                f"the working folder holds {_gigabytes(self.size)} to copy, mostly in "
                + ", ".join(f"{path.relative_to(source)} ({_gigabytes(size)})" for size, path in largest),
                where=str(source),
                hint="move old checkpoints and results elsewhere, or start the command in a smaller folder, "
                "which holds the script",
            )

    def _examine(self, folder: Path, has_results: bool = False) -> _Content:
        found = _Content(is_data=not has_results)
        for entry in _entries(folder):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if entry.name in _TOOLS or (path / "pyvenv.cfg").exists():
                    self.links[path] = 0
                elif entry.name not in _SKIPPED and not (path / _MARK).exists():
                    is_for_results = has_results or _RESULTS.fullmatch(entry.name) is not None
                    below = found.folders[path] = self._examine(path, is_for_results)
                    found.size += below.size
                    found.is_data &= below.is_data
            elif entry.is_file(follow_symlinks=False):
                size = entry.stat(follow_symlinks=False).st_size
                found.size += size
                is_checkpoint = _CHECKPOINT.search(entry.name) is not None
                found.is_data &= not is_checkpoint and not entry.name.endswith(_CODE)
                if size > DATA_BYTES and not is_checkpoint and not has_results:
                    found.files[path] = size
        return found

    def _link_data(self, content: _Content) -> int:
        """Link what is data; return the bytes that remain."""
        left = content.size
        for path, size in content.files.items():
            self.links[path] = size
            left -= size
        for path, below in content.folders.items():
            if below.size > DATA_BYTES and below.is_data:
                self.links = {other: size for other, size in self.links.items() if path not in other.parents}
                self.links[path] = below.size
                left -= below.size
            else:
                left -= below.size - self._link_data(below)
        return left

    def _copied_sizes(self, folder: Path, content: _Content) -> Iterator[tuple[int, Path]]:
        for path, below in content.folders.items():
            if path not in self.links:
                yield below.size, path
        yield content.size - sum(below.size for below in content.folders.values()), folder

    def describe(self) -> list[str]:
        """Return a line for each thing that is linked."""
        return [
            f"linked instead of copied: {path.relative_to(self.source)}" + (f" ({_gigabytes(size)})" if size else "")
            for path, size in sorted(self.links.items())
        ]

    def moved(self, path: str | Path) -> Path:
        """Return the absolute path of what ``path``, absolute or in the working folder, is to a start: in its copy, or
        elsewhere as before."""
        absolute = Path(os.path.normpath(self.source / path))
        return self._target / absolute.relative_to(self.source) if absolute.is_relative_to(self.source) else absolute

    def create(self, folder: Path) -> None:
        """Copy the working folder to ``folder``. It works as if it was the target."""
        self._copy(self.source, folder)

    def _copy(self, folder: Path, target: Path) -> None:
        target.mkdir()
        for entry in _entries(folder):
            path, copy = Path(entry.path), target / entry.name
            if path in self.links:
                copy.symlink_to(path)
            elif entry.is_symlink():
                copy.symlink_to(self.moved(path.parent / os.readlink(path)))
            elif entry.is_dir():
                if entry.name not in _SKIPPED and not (path / _MARK).exists():
                    self._copy(path, copy)
            elif entry.is_file():  # neither a pipe nor a socket
                shutil.copy2(path, copy)
        shutil.copystat(folder, target)

    def changed_links(self) -> list[Path]:
        """Return what is linked and was changed after the copy was made, as far as the time of its folder shows."""
        return [path for path, before in self._times.items() if _time(path) != before]

    def remember(self) -> None:
        """Note the times of what is linked, with which ``changed_links`` compares."""
        self._times = {path: _time(path) for path, size in self.links.items() if size}


class Session:
    """The folder S of an audit.

    ``work``, a copy of the working folder, and ``out``, for ``{out}``, are where every start finds them.
    ``kept/NAME`` has what the start NAME left of both, and its output; ``records/NAME`` what the recorder wrote.
    """

    def __init__(self, source: Path, folder: Path, copies: bool = True) -> None:
        """``copies``: False for a command that writes only to ``{out}``: ``work`` is the working folder itself."""
        self.folder = folder.resolve()
        self.out, self._snapshot = self.folder / "out", self.folder / "source"
        self.work = self.folder / "work" if copies else source.resolve()
        self.folders = (self.work, self.out) if copies else (self.out,)
        """Those that each start finds as they should be, and whose content is kept."""
        with _copying(source, self.folder):
            (self.folder / _MARK).touch()
            self.copy = WorkCopy(source.resolve(), self.work) if copies else None
        if self.copy is None:
            return
        if (free := shutil.disk_usage(self.folder).free) < _COPIES * self.copy.size:
            raise ConfigError(
                f"{_COPIES} copies of the working folder need {_gigabytes(_COPIES * self.copy.size)}, but only "
                f"{_gigabytes(free)} are free",
                where=str(self.folder),
                hint="choose a folder on another disk with --folder",
            )
        with _copying(source, self.folder):
            self.copy.create(self._snapshot)
        self.copy.remember()

    def records(self, name: str) -> Path:
        return self.folder / "records" / name

    def kept(self, name: str) -> Path:
        return self.folder / "kept" / name

    def fresh(self) -> None:
        """Give the next start the working folder as it was, and an empty ``{out}``."""
        self._clear()
        if self.copy is not None:
            _duplicate(self._snapshot, self.work)
        self.out.mkdir()

    def restore(self, name: str) -> None:
        """Give the next start what the start ``name`` left."""
        self._clear()
        for folder in self.folders:
            _duplicate(self.kept(name) / folder.name, folder)

    def keep(self, name: str) -> None:
        """Move what a start left to ``kept(name)``."""
        self.kept(name).mkdir(parents=True, exist_ok=True)
        for folder in self.folders:
            if folder.exists():  # a script may even remove it
                folder.rename(self.kept(name) / folder.name)
            else:
                (self.kept(name) / folder.name).mkdir()

    def moved(self, path: str | Path) -> Path:
        """Return where a start finds ``path``."""
        return Path(path) if self.copy is None else self.copy.moved(path)

    def _clear(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _copying(source: Path, target: Path) -> Iterator[None]:
    """Context in which an error of the system becomes a ConfigError about the copy of ``source``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be copied to {target}: {reason(error)}",
            where=str(error.filename or source),
            hint=remedy(error, "or choose another folder with --folder"),
        ) from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _duplicate(source: Path, target: Path) -> None:
    """Copy a folder with its links and times; without its data where the file system can share it (reflink)."""
    if sys.platform == "linux":
        done = subprocess.run(
            ["cp", "-a", "--reflink=auto", str(source), str(target)], stdin=subprocess.DEVNULL, capture_output=True,
            check=False,
        )  # fmt: skip
        if not done.returncode:
            return
        shutil.rmtree(target, ignore_errors=True)  # another cp, such as busybox's
    with _copying(source, target):
        shutil.copytree(source, target, symlinks=True)


def _time(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
