"""Writes checkpoints: at once or behind the training, from rank 0 or as shards from every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.distributed.collectives import new_group
from harness.distributed.runtime import Runtime
from harness.distributed.threads import Background
from harness.runs.checkpoints import Checkpoints
from harness.training.strategies import sharding

_CLOSE_S = 10.0  # for the last checkpoint, when a run fails


@dataclass
class CheckpointWriter:
    """``behind``: ``write`` returns as soon as the content is copied, and a thread writes it; at most one checkpoint
    is on its way.

    The threads of all ranks communicate through a group of their own. Building it is collective.
    """

    runtime: Runtime
    checkpoints: Checkpoints
    behind: bool
    publish: Callable[[], None]
    complete: int = field(init=False, default=-1)
    """The newest step whose checkpoint this rank knows to be complete; -1 if there is none."""
    _side: Runtime | None = field(init=False, default=None)
    _step: int | None = field(init=False, default=None)
    """The step of the checkpoint on its way; the same on all ranks."""
    _work: Background[None] | None = field(init=False, default=None)
    _copy: Any = field(init=False, default=None)
    """The copy of the last content, whose memory the next one uses."""

    def __post_init__(self) -> None:
        if self.writes_shards:
            self._side = replace(self.runtime, group=new_group(self.runtime.work_timeout_s))

    @property
    def writes_shards(self) -> bool:
        """True if every rank writes its own part of sharded tensors."""
        return self.checkpoints.format.sharded and self.runtime.world_size > 1

    def write(self, step: int, content: dict[str, Any] | None) -> None:
        """Write the checkpoint of ``step``, after the one before. ``content``: on rank 0; if it ``writes_shards``, on
        every rank. Collective. Raises CheckpointError, also that of the checkpoint before."""
        self.wait()
        # A thread would read tensors that the device still writes.
        if self.behind or self.runtime.device.type == "cuda":
            with self.runtime.together("copying the checkpoint"):
                content = copied(content, self._copy, pinned=self.behind)
                _synchronize(content)
                self._copy = content if self.behind else None
        self._step, self._work = step, Background(lambda: self._write(step, content), "harness-checkpoint")
        if not self.behind:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is on its way is complete. Collective. Raises CheckpointError on all ranks."""
        if self._step is not None:
            step, self._step = self._step, None
            assert self._work is not None
            self.runtime.await_work("writing the checkpoint", self._work)
            self.complete = step

    def close(self) -> None:
        """Give the checkpoint that is on its way a moment, when a run fails. Not collective."""
        if self._step is not None and self._work is not None:
            with suppress(Exception):
                self._work.result(_CLOSE_S)
                if self.writes_shards or self.runtime.rank == 0:  # other ranks do nothing for a whole one
                    self.complete = self._step

    def _write(self, step: int, content: dict[str, Any] | None) -> None:
        if content is not None:
            self.checkpoints.write(step, content, self._side)
        if self.runtime.rank == 0:
            self.publish()


def copied(tree: Any, before: Any, pinned: bool = True) -> Any:
    """Return ``tree`` (of dictionaries and lists) with its tensors copied to the CPU, into the memory of the earlier
    copy ``before`` where it fits, else into new memory, ``pinned`` for tensors of a GPU. Copies from CUDA are not
    complete before the device is synchronized."""
    if isinstance(tree, Tensor):
        return _copied_tensor(tree.detach(), before, pinned)
    if isinstance(tree, dict):
        earlier = before if isinstance(before, dict) else {}
        return {key: copied(value, earlier.get(key), pinned) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        earlier_items = before if isinstance(before, list | tuple) and len(before) == len(tree) else [None] * len(tree)
        return type(tree)(copied(value, item, pinned) for value, item in zip(tree, earlier_items, strict=True))
    return tree


def _copied_tensor(tensor: Tensor, before: Any, pinned: bool) -> Tensor:
    source = sharding.local(tensor)
    copy = sharding.local(before) if isinstance(before, Tensor) else None
    if copy is None or copy.shape != source.shape or copy.dtype != source.dtype or copy.stride() != source.stride():
        copy = torch.empty_like(source, device="cpu", pin_memory=pinned and source.is_cuda)
    copy.copy_(source, non_blocking=True)
    return sharding.wrapped_like(tensor, copy)


def _synchronize(content: Any) -> None:
    if content is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
