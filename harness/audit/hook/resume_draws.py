"""Finds the lines of a training script that draw from the global random streams, also in its loader processes; and, to
explain why two equal starts differ, those that draw entropy or read a clock, and operations that are not deterministic.

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
import warnings
from types import FrameType
from typing import Any

import torch

_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
_HARNESS = os.path.dirname(os.path.dirname(os.path.dirname(_HERE))) + os.sep
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"})


def install(recorder: Any) -> None:
    observer = _Observer(recorder)
    if recorder.plan.get("chance"):
        _warn_of_operations(observer)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name in {*dir(numpy.random.RandomState)} & {each for each in dir(numpy.random) if each[0] != "_"}:
            if name == "seed" and observer.of_chance:
                numpy.random.seed = _seeds(observer, numpy.random.seed)
            elif name not in ("get_state", "set_state", "seed"):
                setattr(numpy.random, name, _watched(observer, name, getattr(numpy.random, name)))
    threading.setprofile(observer.profile)
    sys.setprofile(observer.profile)


def _seeds(observer: _Observer, seed: Any) -> Any:
    @functools.wraps(seed)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if (*args, *kwargs.values(), None)[0] is None:
            observer.draw("entropy", "numpy.random.seed()", sys._getframe(1))
        return seed(*args, **kwargs)

    return watched


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
        self.of_chance = bool(recorder.plan.get("chance"))
        self._seen: set[tuple[Any, ...]] = set()
        self._states: list[Any] = []

    def profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event not in ("c_call", "c_return"):
            return
        begins, owner, name = event == "c_call", getattr(called, "__self__", None), getattr(called, "__name__", "")
        if self.of_chance:
            if begins:
                self._chance(owner, name, frame)
        elif owner is random._inst:  # type: ignore[attr-defined]
            if begins and name != "getstate" and name != "setstate" and name != "seed":
                self.draw("random", f"random.{name}", frame)
        elif name in self._torch and not isinstance(owner, random.Random):  # such as the one that names temporary files
            before, self._states = self._states, _torch_states()
            if not begins and before != self._states:  # else it has a generator of its own, or draws nothing
                self.draw("torch", f"torch.{name}", frame)

    def _chance(self, owner: Any, name: str, frame: FrameType) -> None:
        if name == "urandom" or (name == "seed" and isinstance(owner, torch.Generator)):
            self.draw("entropy", "os.urandom" if name == "urandom" else "torch.Generator.seed", frame)
        elif name == "seed" and isinstance(owner, random.Random):
            values = frame.f_locals
            if frame.f_code.co_name == "seed" and values.get("a", values.get("x")) is None:
                self.draw("entropy", "an unseeded random.Random", frame)
        elif name in _CLOCKS and getattr(owner, "__name__", "") == "time":
            self.draw("clock", f"time.{name}", frame)

    def draw(self, stream: str, function: str, frame: FrameType | None) -> None:
        place = users_place(frame)
        worker = torch.utils.data.get_worker_info() is not None
        key = (stream, worker, os.getpid(), place or function)
        if key in self._seen:
            return
        self._seen.add(key)
        if place is None and stream != "operation":  # which may be in the backward pass
            return
        place = place or ("", 0)
        line = {"event": "draw", "stream": stream, "function": function, "file": place[0], "line": place[1]}
        with open(os.path.join(self._folder, f"draws-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "worker": worker}) + "\n")


def _warn_of_operations(observer: _Observer) -> None:
    """Have torch warn of each operation that is not deterministic, and write where."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_warn_always(True)
    show = warnings.showwarning

    def shown(message: Any, *rest: Any, **options: Any) -> None:
        name, found, _ = str(message).partition(" does not have a deterministic implementation")
        if found:
            observer.draw("operation", name, sys._getframe(1))
        else:
            show(message, *rest, **options)

    warnings.simplefilter("always")
    warnings.showwarning = shown


def _torch_states() -> list[Any]:
    """Return the states of torch's global streams. Those of GPUs cannot be read while a CUDA graph is captured."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states += torch.cuda.get_rng_state_all()
    return [each.tolist() for each in states]


def _torch_draws() -> frozenset[str]:
    """Return the names of torch's operations that may draw from a random stream, by their tags."""
    found = set()
    for operation in torch._C._dispatch_get_all_op_names():
        library, _, full = operation.partition("::")
        name, _, overload = full.partition(".")
        packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
        if packet is not None and torch.Tag.nondeterministic_seeded in getattr(packet, overload or "default").tags:
            found.add(name)
    return frozenset(found)


def is_users(file: str) -> bool:
    """Return True for a file that belongs neither to Python, nor to an installed package, nor to apex-harness."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return os.path.isfile(file) and not installed and not file.startswith((*_STDLIB, _HARNESS))


def users_place(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the innermost call in a file of the user's; None if apex-harness makes the call."""
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if is_users(file):
            return file, frame.f_lineno
        if file.startswith(_HARNESS) and not file.startswith(_HERE):
            return None
        frame = frame.f_back
    return None
