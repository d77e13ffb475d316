"""The records that ``harness verify-resume`` makes inside a rank to find why two runs differ.

    draws-RANK-PID.jsonl        a line for each place in the user's code that draws numbers that no checkpoint holds
    changes-RANK-PID.jsonl      attributes of a dataset that changed in a loader process while it loaded a batch
    attributes-RANK-STEP.json   attributes of model, task, optimizer and hooks that no state_dict holds, after a step

Python calls a profile function at every call of a C function, so it detects a draw under any imported name.
It makes a run a few times slower, so only a short run is observed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from harness.data import loader
from harness.data.loader import BatchRequest
from harness.training import loop
from harness.training.probe import attributes
from harness.training.progress import Used
from harness.training.run import Run

Fetch = Callable[[loader._Fetch, BatchRequest], object]  # loads a batch

_HARNESS = str(Path(__file__).resolve().parents[2]) + os.sep
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"})
_NUMPY_SEEDS = ("seed", "set_state")
_NUMPY_DRAWS = {*dir(np.random.RandomState), "ranf", "sample"} & {name for name in dir(np.random) if name[0] != "_"}
_WORKER_BATCHES = 6  # of a loader process, whose dataset is searched for changes before and after each


class _Observer:
    """The observations of one process. A loader process inherits its rank's by fork and writes files of its own."""

    def __init__(self, folder: str, rank: int, steps: tuple[int, ...]) -> None:
        self.folder, self.rank, self.steps = Path(folder), rank, frozenset(steps)
        self._seen: set[tuple[str, str, int]] = set()
        self._seeded: set[str] = set()  # the global streams that the dataset has seeded for this batch
        self._torch_draws = _torch_draws()
        self._torch_seed = 0
        self._torch_state: torch.Tensor | None = None  # before an operation that may draw
        self._loading = False
        self._batches = 0

    def write(self, kind: str, content: dict[str, Any]) -> None:
        with open(self.folder / f"{kind}-{self.rank}-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def draw(self, kind: str, function: str, frame: FrameType | None) -> None:
        """Record the place in the user's code that led to a call, once."""
        place = _users_place(frame)
        if place is None or (kind, *place) in self._seen:
            return
        self._seen.add((kind, *place))
        self.write("draws", {"kind": kind, "function": function, "file": place[0], "line": place[1]})

    def profile(self, frame: FrameType, event: str, called: object) -> None:
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if event == "c_return" and self._torch_state is not None and name in self._torch_draws:
            before, self._torch_state = self._torch_state, None
            if not torch.equal(before, torch.get_rng_state()):  # not of a generator of its own
                self.draw("worker", f"torch {name}", frame)
        if event != "c_call":
            return
        if isinstance(owner, random.Random):
            self._random(owner, name, frame)
        elif name == "urandom" or (name == "seed" and isinstance(owner, torch.Generator)):
            self.draw("entropy", name, frame)
        elif name in _CLOCKS and getattr(owner, "__name__", "") == "time":
            self.draw("clock", f"time.{name}", frame)
        elif name in self._torch_draws and self._in_worker() and torch.initial_seed() == self._torch_seed:
            self._torch_state = torch.get_rng_state()

    def _random(self, stream: random.Random, name: str, frame: FrameType) -> None:
        is_global = stream is random._inst  # type: ignore[attr-defined]
        if name == "seed":
            if frame.f_code.co_name == "seed" and frame.f_locals.get("a", frame.f_locals.get("x")) is None:
                self.draw("entropy", "an unseeded random.Random", frame)
            elif is_global:
                self._seeded.add("random")
        elif is_global and self._in_worker() and "random" not in self._seeded:
            caller: FrameType | None = frame
            while caller is not None and caller.f_code.co_filename == random.__file__:
                name, caller = caller.f_code.co_name, caller.f_back
            self.draw("worker", f"random.{name}", caller)

    def numpy(self, name: str, arguments: tuple[object, ...]) -> None:
        """A call of a function of numpy.random, which ``profile`` does not report as a C function."""
        if name in _NUMPY_SEEDS:
            self._seeded.add("numpy")
            if name == "seed" and (not arguments or arguments[0] is None):
                self.draw("entropy", "numpy.random.seed()", sys._getframe(2))
        elif self._in_worker() and "numpy" not in self._seeded:
            self.draw("worker", f"numpy.random.{name}", sys._getframe(2))

    def _in_worker(self) -> bool:
        return self._loading and torch.utils.data.get_worker_info() is not None

    def load(self, fetch: Fetch, fetcher: loader._Fetch, request: BatchRequest) -> object:
        """``fetch`` a batch of a dataset."""
        in_worker = torch.utils.data.get_worker_info() is not None
        searched = in_worker and self._batches < _WORKER_BATCHES
        before = attributes.digest({"dataset": fetcher.dataset}) if searched else {}
        self._batches += 1
        self._loading, self._torch_seed = True, torch.initial_seed()
        self._seeded.clear()
        if in_worker:
            sys.setprofile(self.profile)
        try:
            batch = fetch(fetcher, request)
        finally:
            self._loading = False
        after = attributes.digest({"dataset": fetcher.dataset}) if searched else {}
        for name in sorted(before.keys() & after.keys()):
            if before[name] != after[name]:
                self.write("changes", {"name": name, "values": [before[name], after[name]]})
        return batch

    def counted(self, run: Run) -> None:
        """Write the attributes after one of the planned steps."""
        if run.state.step not in self.steps:
            return
        roots = {"model": run.module, "task": run.task, "optimizer": run.optimizer}
        roots |= {f"hook {hook.name.rpartition('.')[2]}": hook.object for hook in run.hooks.all}
        modules = {type(root).__module__ for root in (*roots.values(), run.task.train, run.task.eval)}
        roots |= {
            name: vars(sys.modules[name]) for name in sorted(modules) if _is_users(sys.modules[name].__file__ or "<")
        }
        found = attributes.digest(roots)
        path = self.folder / f"attributes-{self.rank}-{run.state.step}.json"
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def warned(self, message: Warning | str) -> None:
        """A warning of torch's about an operation that is not deterministic."""
        text = str(message)
        if "does not have a deterministic implementation" in text:
            name = text.partition(" does not have")[0]
            frame = sys._getframe(2)
            if _users_place(frame) is None:
                self.write("draws", {"kind": "op", "function": f"{name}, in the backward pass", "file": "", "line": 0})
            else:
                self.draw("op", name, frame)


def arm(folder: str, rank: int, steps: tuple[int, ...]) -> None:
    """Observe this process, and the loader processes that it starts, from now on."""
    os.makedirs(folder, exist_ok=True)
    observer = _Observer(folder, rank, steps)
    count, fetch, train = loop.count, loader._Fetch.__getitem__, loop.train

    def counted(run: Run, used: Used, skip: bool) -> None:
        count(run, used, skip)
        observer.counted(run)

    def train_observed(run: Run) -> bool:
        if run.config.train.deterministic is not True:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_warn_always(True)
        return train(run)

    def shown(message: Warning | str, *rest: object, **options: object) -> None:
        observer.warned(message)

    loop.count, loop.train = counted, train_observed
    loader._Fetch.__getitem__ = lambda self, request: observer.load(fetch, self, request)  # type: ignore[method-assign]
    warnings.showwarning = shown
    for name in _NUMPY_DRAWS - {"get_state"}:
        setattr(np.random, name, _watched(observer, name, getattr(np.random, name)))
    sys.setprofile(observer.profile)


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


def _watched(observer: _Observer, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*arguments: Any, **options: Any) -> Any:
        observer.numpy(name, (*arguments, *options.values()))
        return function(*arguments, **options)

    return watched


def _users_place(frame: FrameType | None) -> tuple[str, int] | None:
    """Return (file, line) of the innermost call in the user's code; None if no user code was involved."""
    while frame is not None and not (file := os.path.realpath(frame.f_code.co_filename)).startswith(_HARNESS):
        if _is_users(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


@functools.cache
def _is_users(file: str) -> bool:
    """True for a file that belongs neither to Python nor to an installed package."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return os.path.isfile(file) and not installed and not file.startswith(_STDLIB)
