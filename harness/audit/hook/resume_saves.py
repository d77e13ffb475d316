"""Notices checkpoints: the files that a training script writes, renames and loads."""

from __future__ import annotations

import builtins
import functools
import io
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import resume_digest as digest
import torch
from resume_draws import users_place

_BUFFERS_KEPT, _OPENED_KEPT = 8, 64
_OPERATIONS = {
    "os.rename": "rename", "os.remove": "remove", "os.mkdir": "make", "os.rmdir": "remove", "os.chmod": "change",
    "os.truncate": "truncate",
}  # fmt: skip
_OF_THOROUGH = {"os.chmod", "os.truncate"}
_HAVE_FOLDER = {"os.remove", "os.mkdir", "os.rmdir"}  # whose last argument is a descriptor of the folder, or -1


class Saves:
    """Watches torch.save, torch.load, pickle.dump, safetensors and torch.distributed.checkpoint, and Python's own
    events for opened and renamed files."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._folders = tuple(os.path.realpath(root) + os.sep for root in recorder.plan["roots"])
        self._records = os.path.abspath(recorder.plan["records"]) + os.sep
        self._count = self._begun = self._operations = 0
        self._thorough = recorder.plan.get("thorough", False)
        self._lock = threading.RLock()  # a checkpoint may be written by a thread
        self._busy = False
        self._paths: set[str] = set()
        # A checkpoint may be made in memory and written by other code: a file that is opened next, of the same size.
        self._buffers: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=_BUFFERS_KEPT)
        self._opened: deque[str] = deque(maxlen=_OPENED_KEPT)

    def install(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        torch.save = self._saver("torch.save", torch.save, 0, 1, "f")
        torch.load = self._loader("torch.load", torch.load)
        pickle.dump = self._saver("pickle.dump", pickle.dump, 0, 1, "file")
        actions["safetensors.torch"] = self._of_safetensors
        actions["torch.distributed.checkpoint"] = self._of_distributed
        for name in ("safetensors.torch", "torch.distributed.checkpoint"):
            if name in sys.modules:
                actions.pop(name)(sys.modules[name])
        if self._thorough:
            self._count_parts()
        sys.addaudithook(self._event)

    def _of_safetensors(self, module: Any) -> None:
        module.save_file = self._saver("safetensors", module.save_file, 0, 1, "filename")
        module.load_file = self._loader("safetensors", module.load_file)

    def _of_distributed(self, module: Any) -> None:
        how = "torch.distributed.checkpoint"
        for name in ("save", "async_save"):
            if hasattr(module, name):
                setattr(module, name, self._saver(how, getattr(module, name), 0, None, "checkpoint_id"))
        module.load = self._loader(how, module.load, "checkpoint_id")

    def _saver(
        self, how: str, save: Callable[..., Any], what: int, place: int | None, keyword: str
    ) -> Callable[..., Any]:
        @functools.wraps(save)
        def saved(*args: Any, **kwargs: Any) -> Any:
            target = kwargs.get(keyword)
            if target is None and place is not None and len(args) > place:
                target = args[place]
            if self._busy or not self._recorder.mine():
                return save(*args, **kwargs)
            value = args[what] if len(args) > what else next(iter(kwargs.values()), None)
            path = _path(target)
            if path is None:
                result = save(*args, **kwargs)
                if isinstance(target, io.BytesIO):
                    size = target.getbuffer().nbytes
                    self._buffers.append((size, self._recorder.steps, digest.resolve(self._content(value))))
                return result
            if how == "pickle.dump" and not _holds_tensors(value):
                return save(*args, **kwargs)
            is_inside = self._inside(path)
            self._begun += is_inside
            self._recorder.write("write", path=path, how=how)
            content = self._content(value)
            self._busy = True
            try:
                if is_inside and self._recorder.is_due("write", self._begun):
                    self._tear(save, args, kwargs, target, path)
                result = save(*args, **kwargs)
            finally:
                self._busy = False
            self._written(path, how, self._recorder.steps, content, _line(sys._getframe(1)))
            return result

        return saved

    def _written(self, path: str, how: str, after: int, content: dict[str, Any], line: str = "") -> None:
        self._paths.add(path)
        size = os.path.getsize(path) if os.path.isfile(path) else None
        self._recorder.write(
            "written", path=path, how=how, after=after, bytes=size, content=content, line=line,
            evaluations=self._recorder.evaluations,
        )  # fmt: skip
        self._recorder.looked_at.clear()
        if self._inside(path):
            self._count += 1
            self._recorder.reach("checkpoint", self._count, path)

    def _inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(self._folders)

    def _content(self, value: Any) -> dict[str, Any]:
        return {} if self._recorder.only_places else digest.content(value)

    def _tear(self, save: Callable[..., Any], args: Any, kwargs: Any, target: Any, path: str) -> None:
        """Write a part of the file, and be killed."""
        fraction = self._recorder.kill.get("fraction", 0.5)
        if hasattr(target, "write"):
            first = target.tell()
            save(*args, **kwargs)
            target.flush()
            os.truncate(path, first + int((os.path.getsize(path) - first) * fraction))
        else:
            save(*args, **kwargs)
            if os.path.isfile(path):
                os.truncate(path, int(os.path.getsize(path) * fraction))
        self._recorder.reach("write", self._begun, path)

    def _loader(self, how: str, load: Callable[..., Any], keyword: str = "f") -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            path = _path(kwargs.get(keyword, args[0] if args else None))
            if path is not None and self._recorder.mine() and not self._busy:
                self._recorder.write("loaded", path=path, how=how, line=_line(sys._getframe(1)))
            return load(*args, **kwargs)

        return loaded

    def _event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that Python opens to write, changes or renames."""
        if not _OPERATIONS:  # None: the interpreter ends, and has cleared this module
            return
        if name == "open":
            path, mode, flags = arguments
            if (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._operation("write", path)
            if self._buffers and isinstance(mode, str) and mode[:1] in "wx" and isinstance(path, (str, bytes)):
                self._opened.append(os.path.abspath(os.fsdecode(path)))
        elif name in _OPERATIONS and (self._thorough or name not in _OF_THOROUGH):
            place = arguments[0]
            if name in _HAVE_FOLDER and arguments[-1] != -1 and isinstance(place, str):
                place = os.path.join(_opened(arguments[-1]), place)
            self._operation(_OPERATIONS[name], place)
            if name == "os.rename" and (self._paths or self._opened):
                self._renamed(arguments[0], arguments[1])

    def _operation(self, name: str, place: Any) -> None:
        """Count what is about to be done to a file, and be killed before it."""
        path = _path(place)
        if path is not None and self._counts(path):
            with self._lock:
                self._count_operation(name, path)
                self._recorder.reach("operation", self._operations, path)

    def _counts(self, path: str) -> bool:
        if path.startswith(self._records) or not (self._thorough or self._recorder.has_optimizer):
            return False
        return self._inside(path) and self._recorder.mine()

    def _count_operation(self, name: str, path: str) -> None:
        self._operations += 1
        self._recorder.write("operation", number=self._operations, name=name, path=path)

    def _count_parts(self) -> None:
        """Make each fsync, and each part that is written to a file, an operation. A kill comes after half of a part."""
        saves, sync, real = self, os.fsync, io.open

        class Counted(io.FileIO):
            def write(self, data: Any, /) -> int:
                path = os.path.abspath(os.fsdecode(self.name))  # type: ignore[arg-type]
                if not saves._counts(path):
                    return super().write(data)
                data, done = memoryview(data).cast("B"), 0
                with saves._lock:
                    saves._count_operation("fill", path)
                    if saves._recorder.is_due("operation", saves._operations):
                        done = super().write(data[: len(data) // 2])
                        saves._recorder.reach("operation", saves._operations, path)
                return done + super().write(data[done:])

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = _path(file)
            if mode.strip("bt") not in ("w", "a", "x") or path is None or args[:1] not in ((), (-1,)):
                return real(file, mode, *args, **options)
            if options.get("buffering", -1) != -1 or options.get("opener") or not saves._counts(path):
                return real(file, mode, *args, **options)
            binary = io.BufferedWriter(Counted(os.fspath(file), mode.strip("bt")))
            if "b" in mode:
                return binary
            return io.TextIOWrapper(binary, options.get("encoding"), options.get("errors"), options.get("newline"))

        def synced(file: Any) -> None:
            sync(file)
            self._operation("sync", _opened(file if isinstance(file, int) else file.fileno()))

        builtins.open = io.open = opened  # type: ignore[assignment]
        os.fsync = synced  # type: ignore[assignment]

    def _renamed(self, source: Any, target: Any) -> None:
        if not isinstance(source, (str, bytes, os.PathLike)) or not self._recorder.mine():
            return
        old, new = (os.path.abspath(os.fsdecode(each)) for each in (source, target))
        if old in self._opened:  # the temporary name of a checkpoint that was made in memory
            self._opened[self._opened.index(old)] = new
        moved = {path for path in self._paths if path == old or path.startswith(old + os.sep)}
        if moved:
            self._paths = (self._paths - moved) | {new + path[len(old) :] for path in moved}
            self._recorder.write("renamed", source=old, target=new)

    def settle(self) -> None:
        """Find the files of checkpoints that were made in memory."""
        for entry in list(self._buffers):
            size, after, content = entry
            path = next((each for each in reversed(self._opened.copy()) if _size(each) == size), None)
            if path is not None:
                self._buffers.remove(entry)
                self._opened.remove(path)
                self._begun += self._inside(path)
                self._written(path, "torch.save", after, content)


def _opened(descriptor: int) -> str:
    """Return the path of an open file or folder, where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _path(target: Any) -> str | None:
    if hasattr(target, "write") or hasattr(target, "read"):
        target = getattr(target, "name", None)
    if isinstance(target, (str, bytes, os.PathLike)):
        return os.path.abspath(os.fsdecode(target))
    return None


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for _, item in digest.flatten(value))


def _line(frame: FrameType) -> str:
    """Return the line of the script that makes a call, as file:line; empty if there is none."""
    place = users_place(frame)
    return f"{os.path.basename(place[0])}:{place[1]}" if place else ""
