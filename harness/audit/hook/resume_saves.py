"""Notices checkpoints: the files that a training script writes, renames and loads."""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import resume_digest as digest
import torch

Saver = Callable[..., Any]
_BUFFERS_KEPT, _OPENED_KEPT = 8, 64


class Saves:
    """Watches torch.save, torch.load, pickle.dump, safetensors and torch.distributed.checkpoint, and Python's own
    events for opened and renamed files."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._folders = tuple(os.path.realpath(root) + os.sep for root in recorder.plan["roots"])
        self._count = self._begun = 0
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
                    self._buffers.append((size, self._recorder.steps, digest.resolve(digest.content(value))))
                return result
            if how == "pickle.dump" and not _holds_tensors(value):
                return save(*args, **kwargs)
            self._begun += self._inside(path)
            self._recorder.write("write", path=path, how=how)
            content = digest.content(value)
            self._busy = True
            try:
                if self._is_torn():
                    self._tear(save, args, kwargs, target, path)
                result = save(*args, **kwargs)
            finally:
                self._busy = False
            self._written(path, how, self._recorder.steps, content)
            return result

        return saved

    def _written(self, path: str, how: str, after: int, content: dict[str, Any]) -> None:
        self._paths.add(path)
        size = os.path.getsize(path) if os.path.isfile(path) else None
        self._recorder.write("written", path=path, how=how, after=after, bytes=size, content=content)
        self._recorder.looked_at.clear()
        if self._inside(path):
            self._count += 1
            self._recorder.reach("checkpoint", self._count, path)

    def _inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(self._folders)

    def _is_torn(self) -> bool:
        kill = self._recorder.kill
        return bool(kill and kill["place"] == "write" and kill["number"] == self._begun and self._recorder.rank() == 0)

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
                self._recorder.write("loaded", path=path, how=how)
            return load(*args, **kwargs)

        return loaded

    def _event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """A file that Python opens to write, or renames."""
        if name == "open":
            path, mode = arguments[:2]
            if self._buffers and isinstance(mode, str) and mode[:1] in "wx" and isinstance(path, (str, bytes)):
                self._opened.append(os.path.abspath(os.fsdecode(path)))
        elif name == "os.rename" and (self._paths or self._opened):
            self._renamed(arguments[0], arguments[1])

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
            path = next((each for each in reversed(self._opened) if _size(each) == size), None)
            if path is not None:
                self._buffers.remove(entry)
                self._opened.remove(path)
                self._begun += self._inside(path)
                self._written(path, "torch.save", after, content)


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
