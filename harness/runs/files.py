"""Local files: atomic writes, JSON-safe numbers, and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from harness.config import seals
from harness.errors import ConfigError, HarnessError, did_you_mean, reason, remedy, require_regular_file
from harness.runs import layout

log = logging.getLogger("harness")

_reported: set[str] = set()  # why the cache is a temporary folder


def temporary_for(path: Path, mark: str = "") -> Path:
    """Return the name under which ``path`` is written until it is complete. Readers of a folder skip ``*.tmp``. A
    ``mark`` tells apart writers of the same file that no lock excludes."""
    return path.with_name(f"{path.name}{mark and '.'}{mark}.tmp")


def commit(temporary: Path, path: Path) -> None:
    """Move a complete file or folder to its final name, durably: the data first, then the rename.

    A reader finds either the old content or the new, even after a power cut. The files inside a folder must be synced
    already.
    """
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def replace_folder(temporary: Path, path: Path) -> None:
    """``commit`` of a folder, in the place of an earlier one, which is removed."""
    before = temporary_for(path, "before")
    shutil.rmtree(before, ignore_errors=True)
    if path.exists():
        os.replace(path, before)
    commit(temporary, path)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def replacing(path: Path, mark: str = "") -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block it replaces ``path``. An error removes it.

    The new file has the permissions that the umask gives, even if the writer is a library that creates private files.
    """
    temporary = temporary_for(path, mark)
    try:
        temporary.unlink(missing_ok=True)  # in the folder of someone else, it may be a link to a file of this user
        with open(temporary, "xb"):
            mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:
            temporary.chmod(mode & 0o777)
        commit(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write files into; at the end of the block it is renamed to ``path``, which does not
    exist. An error removes it. Its files get their permissions as those of ``replacing`` do."""
    temporary = temporary_for(path)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for file in temporary.iterdir():
            if file.is_file():
                file.chmod(mode)
            sync(file)
        commit(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, content: str | bytes, mark: str = "") -> None:
    """Replace ``path`` by a file with ``content`` (text as UTF-8)."""
    with replacing(path, mark) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sha256(path: Path) -> str:
    """Return the SHA-256 of the file ``path``, in hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def make_folder(path: Path) -> None:
    """Create ``path`` and the folders above it, durably: otherwise a power cut may remove a synced file's folder."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing or [path]:  # an existing one may be of a start that was killed just now
        with suppress(PermissionError):  # a folder may be open for writing, but not for reading
            sync(folder.parent)


def require_output(out: Path, inputs: Iterable[str | Path], also: str = "", folder: bool = False) -> None:
    """Raise ConfigError if a command cannot write ``out``, a file or a new ``folder``, and the file with ``also``
    appended to that name.

    That is if there is no such folder, or if they would replace a folder, a device, one of ``inputs`` (under any name),
    or a file that training wrote.
    """
    written = [out, *([out.with_name(out.name + also)] if also else [])]
    written += [temporary_for(path) for path in written]
    if folder and (out.exists() or out.is_symlink()):
        hint = "remove it, or choose another folder with --out FOLDER"
        raise ConfigError("cannot write the output: it exists already", where=str(out), hint=hint)
    if problem := _no_output(out, written, [name for name in map(str, inputs) if name]):
        make = _OTHER_OUTPUT if out.parent.exists() else f"mkdir -p {shlex.quote(str(out.parent))}"
        hint = did_you_mean(out.parent, os.path.isdir) or make
        raise ConfigError(f"cannot write the output: {problem}", where=str(out), hint=hint)


def output_error(out: Path, error: Exception) -> HarnessError:
    return HarnessError(
        f"cannot write the output: {reason(error)}", where=str(out), hint=remedy(error, f"or {_OTHER_OUTPUT}")
    )


_OTHER_OUTPUT = "choose another file with --out FILE"


def _no_output(out: Path, written: list[Path], inputs: list[str]) -> str:
    """Return the reason why the paths ``written`` must not be written; empty if there is none."""
    if not out.parent.is_dir():
        return f"there is no folder {out.parent}"
    if out.is_dir():
        return "it is a folder"
    if out.exists() and not out.is_file():
        return "it is a device or a pipe; the output must be a regular file"
    for path in written:
        if replaced := next((name for name in inputs if _is_same(path, name)), None):
            return f"it would replace {replaced}, which this command reads"
        for folder in path.resolve().parents:
            part = path.resolve().relative_to(folder).parts[0]
            of_run = part in layout.OF_TRAINING and (folder / layout.CHECKPOINTS).is_dir()
            if of_run or (part == layout.SWEEP and (folder / layout.TRIALS).is_dir()):
                return f"it would replace {part} of {folder}, which training wrote"
    return ""


def _is_same(path: Path, name: str) -> bool:
    try:
        return path.exists() and os.path.samefile(path, name)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path) -> bytes:
    """Return the content of ``path``. Raises OSError if it cannot be read or is not a regular file."""
    require_regular_file(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return ``read_bytes`` as text. Raises ValueError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def text_or_empty(path: Path) -> str:
    """Return the text of a small file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises OSError if it cannot be read, ValueError if it is not JSON."""
    return parse_json(read_text(path))


def write_sealed(path: Path, fields: dict[str, Any], mark: str = "") -> None:
    """Replace ``path`` by a JSON object with ``fields`` and a seal."""
    write_atomically(path, json.dumps(seals.sealed(fields), indent=1, ensure_ascii=False) + "\n", mark)


def read_sealed(path: Path) -> Any:
    """Return ``read_json`` without the seal. Raises ValueError as well if that does not match."""
    return seals.unsealed(read_json(path))


def read_or_empty(path: Path, kind: type, problems: list[str], read: Callable[[Path], Any] = read_sealed) -> Any:
    """Return ``read(path)``; an empty ``kind`` if there is no such file, or, with a line for ``problems``, if it cannot
    be read or is of another type."""
    try:
        content = read(path)
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {reason(error)}")
        return kind()
    if isinstance(content, kind):
        return content
    problems.append(f"{path.name} contains type {type(content).__name__} where {kind.__name__} was expected")
    return kind()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON like ``json.loads``, but raise ValueError for text that is nested too deeply, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sync(path: Path) -> None:
    """Make the content of a file or a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """Return ``value`` with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, to notice later that ``path`` was replaced; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of the cache: ``chosen`` (data.cache_dir) or ``default_cache_dir``. Raises
    ConfigError."""
    return expanded(chosen or default_cache_dir()).absolute()


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with the home folder in place of ``~``. Raises ConfigError if this user has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        problem = "the path starts with ~, but its home folder is unknown"
        raise ConfigError(problem, where=str(path), hint="type the whole path, or set HOME") from None


def default_cache_dir() -> Path:
    """Return $APEX_HARNESS_CACHE, else $XDG_CACHE_HOME/apex-harness, else ~/.cache/apex-harness; where that cannot be
    created, a folder for temporary files."""
    if chosen := os.environ.get("APEX_HARNESS_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "apex-harness")
    try:
        usual = Path.home() / ".cache" / "apex-harness"
    except RuntimeError:  # no HOME, and no entry of this user in the list of users
        return _temporary_cache("there is no home folder")
    existing = next(folder for folder in (usual, *usual.parents) if folder.exists())
    if existing == usual or os.access(existing, os.W_OK | os.X_OK):
        return usual
    return _temporary_cache(f"{existing} cannot be written")


def _temporary_cache(reason: str) -> Path:
    path = Path(tempfile.gettempdir(), f"apex-harness-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        # The cache has a list of trusted runs, and anyone who writes it can make this user run code.
        hint = "set APEX_HARNESS_CACHE to a folder that only you can write to"
        raise ConfigError(
            f"{reason}, and others can write to the folder for temporary files", where=str(path), hint=hint
        )
    if reason not in _reported:
        _reported.add(reason)
        log.warning("%s: the cache is in %s; set APEX_HARNESS_CACHE to keep it", reason, path)
    return path
