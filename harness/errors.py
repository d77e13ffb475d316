"""Errors that users see: the place, what was found, and what to type instead.

Each class has the exit code of the process: 2 for configuration or usage, 65 for bad data, 70 for other failures. Any
other exception is a fault of the user's own code (1), if that is in its traceback, or else of the harness (70).
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

EXIT_DONE = 0
EXIT_OWN_CODE = 1  # as Python's own: code that the configuration names raised an error
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_FAILURE = 70
EXIT_STOPPED = 75  # stopped early with a checkpoint; the same command resumes the run
EXITS_BY_SIGNAL = (130, 143, 129)  # stopped without one, by SIGINT, SIGTERM or SIGHUP: 128 + number, as in shells
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_PAGES = "docs/" if Path(__file__).parents[1].joinpath("docs").is_dir() else "the repository's docs/"  # not in a wheel
OVERRIDES = "overrides"  # the place of what is wrong in this argument of the Python API
REINSTALL_TORCH = "python -m pip install --force-reinstall torch torchvision  # together: their versions must match"


class HarnessError(Exception):
    """An error for the user, printed as ``where: message`` and ``hint`` on a line of its own."""

    exit_code = EXIT_FAILURE
    origin_rank: int | None = None  # the rank that failed, when all ranks raise its error
    unmet = False  # the rank that raised it could not reach the first one, and may be the only one to report it

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.where, self.hint = message, where, hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return re.sub(r"(?<![\w/])docs/(?=\w+\.md)", _PAGES, f"{text}\n  -> {self.hint}" if self.hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled between processes (loader workers, ranks), which loses keyword arguments by default.
        return _rebuild, (type(self), self.message, self.where, self.hint)


def readable(error: BaseException) -> BaseException:
    """Return ``error``, or another of the same cause if its text cannot be read."""
    try:
        str(error)
        return error
    except Exception as problem:
        replacement = RuntimeError(f"{type(error).__name__}, whose text cannot be read: {type(problem).__name__}")
        replacement.__cause__ = error
        return replacement.with_traceback(error.__traceback__)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of ``error``; ``otherwise``, or the name of its class, if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__ if otherwise is None else otherwise)


def users_line(error: BaseException) -> str:
    """Return "FILE:LINE" of the innermost call in the user's own code that led to ``error``; empty if there is none. A
    script that calls the harness did not lead to an error that the harness made by itself."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{os.path.relpath(error.filename)}:{error.lineno}"
    line, trace, in_harness = "", error.__traceback__, False
    while trace is not None:
        if is_users(file := trace.tb_frame.f_code.co_filename):
            line = f"{os.path.relpath(file)}:{trace.tb_lineno}"
        elif file.startswith(_PACKAGE) and not in_harness:
            line, in_harness = "", True
        trace = trace.tb_next
    return line or getattr(error.__cause__, "users_line", "")  # of an error that comes from another process


def without_harness(trace: Iterable[str]) -> list[str]:
    """Return the parts of a formatted traceback that are not calls within the harness, or those of an import."""
    left_out = f'  File "{_PACKAGE}', '  File "<frozen importlib.'
    return [part for part in trace if not part.startswith(left_out)]


def place_of(kind: Any, method: str = "") -> str:
    """Return "FILE:LINE" of ``method`` of ``kind``, or else of ``kind``, a class or a function. Empty if neither has a
    source file outside of the harness."""
    import inspect  # late: the command line imports this module

    parts: list[Any] = [getattr(kind, method, None), kind]
    for part in parts:
        with suppress(OSError, TypeError):  # of one without a source file
            file = inspect.getsourcefile(inspect.unwrap(part))
            if file and not file.startswith(_PACKAGE):
                return f"{os.path.relpath(file)}:{inspect.getsourcelines(part)[1]}"
    return ""


def is_users(file: str) -> bool:
    """Return True for a source file that is neither of the harness nor of an installed package."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return not installed and not file.startswith((_PACKAGE, "<", *_INSTALLED))


def _installed(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of Python, and those of ``folders`` that pip has installed packages in, also by --target; but
    not the working folder, which has the user's own files, too."""
    targets = (Path(each) for each in folders if os.path.isdir(each) and not os.path.samefile(each, "."))
    found = (str(each) for each in targets if any(each.glob("*.dist-info")))
    of_python = (path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "scripts"))
    return tuple(f"{folder}{os.sep}" for folder in (*of_python, *found))  # not all of /usr, which has /usr/src/app


_INSTALLED = _installed(sys.path)  # now, as a disk may not answer when an error is reported


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, HarnessError):
        return error.exit_code
    return EXIT_OWN_CODE if users_line(error) else EXIT_FAILURE


def plural(amount: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "2 processes" or "2 batches"."""
    return f"{amount:,} {noun}{'' if amount == 1 else 'es' if noun.endswith(('s', 'tch')) else 's'}"


def either(names: Sequence[str]) -> str:
    """Return "a", "a or b" or "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def first_few(names: Sequence[str], limit: int) -> str:
    """Return "a, b and 3 more"."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def listed(names: Sequence[str], limit: int = 20) -> str:
    """Return "'a', 'b'"; of more than ``limit``, the first and the number of the others."""
    more = f", and {len(names) - limit:,} others" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


_REMEDIES = {
    errno.ENOSPC: "free some space there (df -h shows the disk, df -i the number of files)",
    errno.EDQUOT: "your disk quota is used up (quota -s shows it): remove some files there, or ask for a larger quota",
    errno.EROFS: "the disk is mounted read-only, which Linux also does after a disk error (see dmesg): remount it",
    errno.EFBIG: "the file is larger than the limit of this process (ulimit -f) or of the disk: raise the limit",
    errno.EIO: "the disk, or the connection to it, failed (see dmesg): use another disk",
    errno.ESTALE: "the server of this network file system lost the file or was restarted: remount the file system",
    errno.ENAMETOOLONG: "use shorter names for files and folders (name=NAME sets the name of a run)",
    errno.EACCES: "you have no permission there (ls -ld shows the owner): change the permissions",
    errno.EPERM: "the system forbids it there (ls -ld shows the owner, lsattr the attributes): change the permissions",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n), or lower data.num_workers",
    errno.ENFILE: "this machine has too many open files: end other programs, or raise fs.file-max",
    errno.ENOTDIR: "a part of this path is a file, not a folder: correct the path",
    errno.ELOOP: "symbolic links in this path form a loop: remove them",
}
_OF_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}
_MAX_NAMES = 10_000  # of a folder, compared with a missing one
_ERRNO = re.compile(r"(?:os error|errno) (\d+)", re.IGNORECASE)


def system_error(error: BaseException) -> OSError | None:
    """Return the failed system call behind ``error``, with its errno; None if there is none.

    Libraries wrap it: torch reports a full disk as "unexpected pos 704 vs 598", safetensors as "(os error 28)".
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return cause
        if match := _ERRNO.search(str(cause)):
            return OSError(int(match[1]), os.strerror(int(match[1])))
        cause = cause.__cause__ or cause.__context__
    return None


def reason(error: BaseException) -> str:
    """Return the system's message behind ``error``, such as "No space left on device", or else its own first line."""
    cause = system_error(error)
    return (cause.strerror if cause else None) or first_line(error)


def remedy(error: BaseException, then: str = "") -> str:
    """Return a hint that fits the failed system call behind ``error``, if it is a known one, and ``then``."""
    cause = system_error(error)
    text = _REMEDIES.get(cause.errno or 0) if cause else None
    if text is None:
        return then.removeprefix("or ")
    return f"{text}; {then}" if then else text


def is_of_machine(error: BaseException) -> bool:
    """Return True for a failed system call that no other path would mend: the disk, or a limit of this machine."""
    return isinstance(error, OSError) and error.errno in _OF_MACHINE


def has_remedy(error: BaseException) -> bool:
    """Return True if ``error`` is itself a failed system call that ``remedy`` has a hint for."""
    return isinstance(error, OSError) and error.errno in _REMEDIES


def require_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError, with a reason for the user, unless ``path`` is a regular file.

    Call it before opening a file that the user names: opening a named pipe or reading a device may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            target = os.readlink(path)
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {target}, which does not exist", path) from None
        raise
    except ValueError as error:  # a NUL character
        raise OSError(errno.EINVAL, str(error), path) from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file", path)


def similar(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of ``names``, ignoring case; None if there is none.

    Names with other numbers are left out: img_0001.png and img_0002.png are two files, not two spellings of one.
    """
    spelling = name.lower().strip()
    spellings = {
        candidate.lower().strip(): candidate
        for candidate in names
        if candidate != name and (not (_numbers(candidate) and _numbers(name)) or _numbers(candidate) == _numbers(name))
    }
    matches = difflib.get_close_matches(spelling, spellings, n=1)
    return spellings[matches[0]] if matches else None


def similar_path(path: str | os.PathLike[str], wanted: Callable[[Path], bool] = os.path.exists) -> Path | None:
    """Return the existing path that is most similar to ``path``, of which any part may be misspelled. ``wanted``
    chooses among the names of its last part, for example only folders."""
    path = Path(path)
    missing = [part for part in (path, *path.parents) if not os.path.exists(part)]
    if not missing:
        return None
    wrong = missing[-1]
    keep = wanted if wrong == path else os.path.isdir
    try:
        with os.scandir(wrong.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_NAMES) if keep(Path(entry.path))]
    except OSError:
        return None
    nearest = similar(wrong.name, names)
    if nearest is None or (Path(nearest).suffix == wrong.suffix and not similar(wrong.stem, [Path(nearest).stem])):
        return None  # wrong.csv and train.csv are alike only in their ends
    corrected = wrong.with_name(nearest) / path.relative_to(wrong)
    return corrected if os.path.exists(corrected) else similar_path(corrected, wanted)


def did_you_mean(path: str | os.PathLike[str], wanted: Callable[[Path], bool] = os.path.exists) -> str:
    """Return a hint with ``similar_path``, quoted for a shell; empty if there is none."""
    nearest = similar_path(path, wanted)
    return f"did you mean {shlex.quote(str(nearest))}?" if nearest else ""


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _rebuild(cls: type[HarnessError], message: str, where: str, hint: str) -> HarnessError:
    return cls(message, where=where, hint=hint)


def require_posix() -> None:
    """Raise ConfigError on Windows, which lacks the signals and the process control that runs are built on."""
    if sys.platform == "win32":
        raise ConfigError(
            "training runs on Linux, not on Windows itself",
            hint="use WSL2 (wsl --install), and install and start the harness there",
        )


def portable(error: Exception) -> Exception:
    """Return ``error`` if another process can unpickle it, else its text as the nearest class that survives
    pickling."""
    import pickle  # late: the command line imports this module

    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # of a class that is local, or whose __init__ takes other arguments
        pass
    if not isinstance(error, HarnessError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    public_class = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return public_class(error.message, where=error.where, hint=error.hint)


def as_harness_error(error: BaseException, doing: str) -> HarnessError:
    """Return ``error`` as a HarnessError that can be pickled, with what was ``doing`` if it is none."""
    if isinstance(error, HarnessError) and isinstance(portable_error := portable(error), HarnessError):
        return portable_error
    text, where = f"{doing}: {type(error).__name__}: {readable(error)}", users_line(error)
    return OwnCodeError(text, where=where) if where and not is_of_machine(error) else HarnessError(text)


class ConfigError(HarnessError):
    """The YAML, an override, or a combination of settings is wrong."""

    exit_code = EXIT_USAGE


class LaunchError(HarnessError):
    """The launch environment is incomplete or contradictory, or an engine cannot start the run."""

    exit_code = EXIT_USAGE


class DataError(HarnessError):
    """An annotation file or an image cannot be used."""

    exit_code = EXIT_DATA


class DoubtError(DataError):
    """Data can be used but may be wrong: it is reported as a warning, and never raised."""


class CheckpointError(HarnessError):
    """A checkpoint or another file of a run cannot be written or read."""


class TrainingError(HarnessError):
    """Training failed: the loss is not finite, or another rank died."""


class OwnCodeError(TrainingError):
    """Code of the user's own, such as a model, a task, a schedule or a hook, failed; ``where`` is its line."""

    exit_code = EXIT_OWN_CODE


def of_part(message: str, error: BaseException, where: str, hint: str, making: bool = False) -> HarnessError:
    """Return the error for ``error`` of what the setting ``where`` names: of the user's own code, if that raised it.
    While ``making`` a part of them, some errors refuse the arguments, which are settings."""
    line, refuses = users_line(error), making and isinstance(error, TypeError | ValueError | AssertionError)
    return (OwnCodeError if line and not refuses else ConfigError)(message, where=line or where, hint=hint)


def argument_at_fault(error: BaseException, args: Iterable[str], where: str) -> str:
    """Return the key below ``where`` of the one of ``args`` that ``error`` quotes; empty if it quotes none."""
    return next((f"{where}.{name}" for name in args if f"'{name}'" in str(error)), "")


class WorkerKilled(TrainingError):
    """A loader worker was killed, usually by a lack of memory."""
