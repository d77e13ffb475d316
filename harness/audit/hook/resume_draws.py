"""Finds the lines of a training script that draw from the global random streams, also in its loader processes.

Python calls a profile function at every call of a C function, so it detects a draw under any imported name. That makes
a start a few times slower, so it is used only once a difference has been seen.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import sysconfig
import threading
from types import FrameType
from typing import Any

import torch

_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_HERE = os.path.dirname(os.path.abspath(__file__))


def install(recorder: Any) -> None:
    observer = _Observer(recorder)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name in {*dir(numpy.random.RandomState)} & {each for each in dir(numpy.random) if each[0] != "_"}:
            if name not in ("get_state", "set_state", "seed"):
                setattr(numpy.random, name, _watched(observer, name, getattr(numpy.random, name)))
    threading.setprofile(observer.profile)
    sys.setprofile(observer.profile)


def _watched(observer: _Observer, name: str, function: Any) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        observer.draw("numpy", f"numpy.random.{name}", sys._getframe(1))
        return function(*args, **kwargs)

    return watched


class _Observer:
    """Writes each place that draws once, for each process."""

    def __init__(self, recorder: Any) -> None:
        self._folder = recorder.plan["records"]
        self._torch = _torch_draws()
        self._seen: set[tuple[Any, ...]] = set()

    def profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if owner is random._inst:  # type: ignore[attr-defined]
            if name != "getstate" and name != "setstate" and name != "seed":
                self.draw("random", f"random.{name}", frame)
        elif name in self._torch:
            self.draw("torch", f"torch.{name}", frame)

    def draw(self, stream: str, function: str, frame: FrameType | None) -> None:
        place = _users_place(frame)
        worker = torch.utils.data.get_worker_info() is not None
        key = (stream, worker, os.getpid(), place or function)
        if key in self._seen:
            return
        self._seen.add(key)
        if place is None:
            return
        line = {"event": "draw", "stream": stream, "function": function, "file": place[0], "line": place[1]}
        with open(os.path.join(self._folder, f"draws-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "worker": worker}) + "\n")


def _torch_draws() -> frozenset[str]:
    """The names of torch's operations that may draw from a random stream, by their tags."""
    found = set()
    for operation in torch._C._dispatch_get_all_op_names():
        library, _, full = operation.partition("::")
        name, _, overload = full.partition(".")
        packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
        if packet is not None and torch.Tag.nondeterministic_seeded in getattr(packet, overload or "default").tags:
            found.add(name)
    return frozenset(found)


def _users_place(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost call in a file that belongs neither to Python nor to an installed package."""
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        installed = "/site-packages/" in file or "/dist-packages/" in file
        if os.path.isfile(file) and not installed and not file.startswith((*_STDLIB, _HERE)):
            return file, frame.f_lineno
        frame = frame.f_back
    return None
