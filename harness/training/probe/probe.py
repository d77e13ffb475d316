"""The part of ``harness verify-resume`` inside a rank: kills it at a planned place, with SIGKILL.

It replaces functions of the training loop by others that count, so that a run without a plan has no overhead.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import safetensors.torch
import torch

from harness.distributed.launch_env import detect
from harness.distributed.threads import thread
from harness.errors import HarnessError
from harness.runs import checkpoint, probe_plan, weights_file
from harness.runs.probe_plan import Kill
from harness.runs.url_store import UrlStore
from harness.training import loop
from harness.training.evaluation import evaluate, predictions
from harness.training.evaluation.evaluate import HasTask
from harness.training.probe import observations
from harness.training.progress import Used
from harness.training.run import Run

_POLL_S = 0.005
_replace = os.replace  # the real one


def arm(path: str, environ: Mapping[str, str], local_rank: int | None, began: float) -> None:
    """Carry out the plan in the file ``path`` from now on. ``began``: time.monotonic() when the process was started."""
    plan = probe_plan.read(path)
    rank = 0
    with suppress(HarnessError):  # which the rank itself reports in a moment
        rank = detect(environ, local_rank).rank
    if plan.kill is not None:
        _arm_kill(_Death(plan.kill, plan.mark, rank), rank, began)
    if plan.observe:
        observations.arm(plan.observe, rank, plan.steps)


class _Death:
    """Ends this process, once, and writes the mark that records where."""

    def __init__(self, kill: Kill, mark: str, rank: int) -> None:
        self.kill, self.mark, self.rank = kill, mark, rank
        self.passed = 0

    def die(self, step: int | None, detail: str) -> None:
        content = {"where": self.kill.where, "step": step, "rank": self.rank, "detail": detail}
        with open(self.mark + ".tmp", "w", encoding="utf-8") as file:
            json.dump(content, file)
        _replace(self.mark + ".tmp", self.mark)
        os.kill(os.getpid(), signal.SIGKILL)

    def passing(self, step: int, detail: str) -> None:
        """Count a batch or a file; end at the planned one."""
        if step >= self.kill.step:
            self.passed += 1
            if self.passed >= self.kill.number:
                self.die(step, f"{detail} {self.passed}")

    def follow(self) -> None:
        """End as soon as another rank has been killed."""
        while not os.path.exists(self.mark):
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at(self, when: float) -> None:
        time.sleep(max(0.0, when - time.monotonic()))
        self.die(None, f"{self.kill.after_s:.1f} s after the start")


def _arm_kill(death: _Death, rank: int, began: float) -> None:
    kill = death.kill
    if rank != kill.rank:
        if kill.everyone:
            thread(death.follow, "harness-probe").start()
        return
    if kill.where == "start":
        thread(lambda: death.die_at(began + kill.after_s), "harness-probe").start()
        _after_steps(death)  # at the latest
    elif kill.where == "step":
        _after_steps(death)
    elif kill.where in ("checkpoint", "best weights"):
        name = "write" if kill.where == "checkpoint" else "mark_best"
        setattr(checkpoint.Checkpoints, name, _cut(getattr(checkpoint.Checkpoints, name), death))
    elif kill.where == "upload":
        _between_uploads(death)
    else:
        _in_batches(death, evaluate if kill.where == "evaluation" else predictions)


def _after_steps(death: _Death) -> None:
    original = loop.count

    def count(run: Run, used: Used, skip: bool) -> None:
        original(run, used, skip)
        if run.state.step >= death.kill.step:
            death.die(run.state.step, "after the update")

    loop.count = count


def _in_batches(death: _Death, module: ModuleType) -> None:
    """In the forward passes of an evaluation or of the predictions."""
    original = module.prepare

    def prepare(run: HasTask, inputs: torch.Tensor) -> torch.Tensor:
        state = getattr(run, "state", None)  # the predictions are at the last step
        death.passing(state.step if state is not None else death.kill.step, "before batch")
        prepared: torch.Tensor = original(run, inputs)
        return prepared

    setattr(module, "prepare", prepare)  # noqa: B010  mypy knows no attributes of a module


def _between_uploads(death: _Death) -> None:
    original = UrlStore.put

    def put(store: UrlStore, source: Any, name: str, *rest: Any) -> Any:
        death.passed += 1
        if death.passed >= death.kill.number:
            death.die(None, f"before {name} was uploaded")
        return original(store, source, name, *rest)

    UrlStore.put = put  # type: ignore[assignment,method-assign]


# Inside the write of a checkpoint


def _cut(write: Any, death: _Death) -> Any:
    """``write`` of a checkpoint or of the best weights, which ends in the middle."""

    def cut(checkpoints: Any, step: int, *rest: Any) -> None:
        if step < death.kill.step:
            write(checkpoints, step, *rest)
            return
        with _replaced(_cut_files(death, step)):
            write(checkpoints, step, *rest)
            death.die(step, "after its last rename")

    return cut


def _cut_files(death: _Death, step: int) -> dict[tuple[Any, str], Any]:
    """Functions that end the process in the middle of the data, or before the planned sync or rename."""
    fsync, save, save_file = os.fsync, torch.save, safetensors.torch.save_file
    left = death.kill.number

    def due(what: str) -> None:
        nonlocal left
        if left == 1:
            death.die(step, f"before {what}")
        left -= 1

    def counted_sync(descriptor: int) -> None:
        due("a sync")
        fsync(descriptor)

    def counted_replace(source: Any, target: Any, **options: Any) -> None:
        due(f"{os.path.basename(source)} was renamed to {os.path.basename(target)}")
        _replace(source, target, **options)

    def cut_save(content: Any, file: Any, **options: Any) -> None:
        broken: Any = _CutFile(file, death, step, _num_bytes(content))
        save(content, broken, **options)

    def cut_save_file(tensors: Any, path: Any, *rest: Any) -> None:
        save_file(tensors, path, *rest)
        size = os.path.getsize(path)
        os.truncate(path, int(size * death.kill.fraction))
        death.die(step, f"with {int(size * death.kill.fraction)} of {size} bytes of {os.path.basename(path)}")

    if death.kill.number == 0:
        return {(torch, "save"): cut_save, (weights_file, "save_file"): cut_save_file}
    return {(os, "fsync"): counted_sync, (os, "replace"): counted_replace}


@contextmanager
def _replaced(functions: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of modules for the block."""
    originals = {place: getattr(*place) for place in functions}
    for (module, name), function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)


class _CutFile:
    """A file that ends the process before it is complete."""

    def __init__(self, file: Any, death: _Death, step: int, num_bytes: int) -> None:
        self._file, self._death, self._step = file, death, step
        self._left, self._total = max(1, int(num_bytes * death.kill.fraction)), num_bytes

    def write(self, content: Any) -> int:
        data = memoryview(content).cast("B")
        written: int = self._file.write(data[: self._left])
        self._left -= written
        if self._left <= 0:
            self._file.flush()
            self._death.die(self._step, f"with {self._file.tell()} of more than {self._total} bytes of state.pt")
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _num_bytes(content: Any) -> int:
    """Bytes of the tensors in nested plain data."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, dict):
        return sum(map(_num_bytes, content.values()))
    return sum(map(_num_bytes, content)) if isinstance(content, list | tuple) else 0
