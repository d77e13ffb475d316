"""Writes checkpoints: at once or behind the training, from rank 0 or as shards from every rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.distributed.launch_store import background
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError
from harness.runs import sharded
from harness.runs.checkpoint import Checkpoints
from harness.training import fsdp

_CLOSE_S = 10.0  # for the last checkpoint, when a run fails


@dataclass
class CheckpointWriter:
    """``shards``: every rank writes its own part of sharded tensors. ``behind``: ``write`` returns as soon as the
    content is copied, and a thread writes it; at most one checkpoint is on its way.

    The threads of all ranks communicate through a group of their own. Building it is collective.
    """

    runtime: Runtime
    checkpoints: Checkpoints
    shards: bool
    behind: bool
    publish: Callable[[], None]
    _side: Runtime | None = field(init=False, default=None)
    _busy: bool = field(init=False, default=False)  # the same on all ranks
    _future: Future[None] | None = field(init=False, default=None)
    _copy: Any = field(init=False, default=None)  # of the last content, whose memory the next one uses

    def __post_init__(self) -> None:
        if self.shards:
            self._side = replace(self.runtime, _control=self.runtime.new_group())

    def write(self, step: int, content: dict[str, Any] | None) -> None:
        """Write the checkpoint of ``step``, after the one before. ``content``: on rank 0; with ``shards`` on every
        rank. Collective. Raises CheckpointError, also that of the checkpoint before."""
        self.wait()
        if not self.behind and not self.shards:
            with self.runtime.together("saving"):
                self._write(step, content)
            return
        if self.behind:
            with self.runtime.together("copying the checkpoint"):
                content = self._copy = copied(content, self._copy)
                _synchronize(content)
        self._busy = True
        self._future = background(lambda: self._write(step, content), "harness-checkpoint")
        if not self.behind:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is on its way is complete. Collective. Raises CheckpointError on all ranks."""
        if self._busy:
            self._busy, future = False, self._future
            assert future is not None
            self.runtime.patiently("writing the checkpoint", future.result)

    @property
    def is_writing(self) -> bool:
        """True while this rank's thread works on a checkpoint."""
        return self._future is not None and not self._future.done()

    def close(self) -> None:
        """Give the checkpoint that is on its way a moment, when a run fails. Not collective."""
        if self._busy and self._future is not None:
            with suppress(Exception):
                self._future.result(_CLOSE_S)

    def _write(self, step: int, content: dict[str, Any] | None) -> None:
        if self._side is not None:
            self._write_shards(self._side, step, content or {})
        elif content is not None:
            self.checkpoints.write(step, content)
            self.publish()

    def _write_shards(self, side: Runtime, step: int, content: dict[str, Any]) -> None:
        plain, tensors = fsdp.split(content)
        first = side.rank == 0
        with side.together("saving"):
            folder = self.checkpoints.begin(step) if first else self.checkpoints.unfinished(step)
        try:
            files = sharded.write(folder, tensors, side.rank, side.group)
        except CheckpointError:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        of_ranks = side.gather(files)
        with side.together("saving"):
            if first:
                every = {name: facts for of_rank in of_ranks for name, facts in of_rank.items()}
                if missing := [name for name in every if not (folder / name).exists()]:
                    raise CheckpointError(
                        f"rank 0 cannot find {missing[0]}, which another rank has written", where=str(folder),
                        hint="a sharded checkpoint needs a folder that all machines share: set output to one, or use "
                        "checkpoint.format=whole",
                    )  # fmt: skip
                self.checkpoints.write(step, plain, every)
                self.publish()


def copied(tree: Any, before: Any) -> Any:
    """``tree`` (of dictionaries and lists) with its tensors copied to the CPU, into the memory of the earlier copy
    ``before`` where it fits. Copies from CUDA are not complete before the device is synchronized."""
    if isinstance(tree, Tensor):
        return _copied_tensor(tree.detach(), before)
    if isinstance(tree, dict):
        earlier = before if isinstance(before, dict) else {}
        return {key: copied(value, earlier.get(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        earlier_items = before if isinstance(before, list | tuple) and len(before) == len(tree) else [None] * len(tree)
        return type(tree)(copied(value, item) for value, item in zip(tree, earlier_items, strict=True))
    return tree


def _copied_tensor(tensor: Tensor, before: Any) -> Tensor:
    here = fsdp.local(tensor)
    there = fsdp.local(before) if isinstance(before, Tensor) else None
    if there is None or there.shape != here.shape or there.dtype != here.dtype or there.stride() != here.stride():
        there = torch.empty_like(here, device="cpu", pin_memory=here.is_cuda)
    there.copy_(here, non_blocking=True)
    return fsdp.wrapped_like(tensor, there)


def _synchronize(content: Any) -> None:
    if content is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
