"""Notes the indices of each batch that a loader gives. Its sampler may be ahead of it, for the worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.dataloader import _BaseDataLoaderIter


def watch(note: Callable[[Any], None]) -> None:
    """Call ``note`` with what the sampler asked for, whenever a loader has given the batch of it."""
    iterator: Any = _BaseDataLoaderIter
    asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
    resets, asks, gives = iterator._reset, iterator._next_index, iterator.__next__

    def reset(this: Any, *args: Any, **options: Any) -> None:
        asked.pop(this, None)
        resets(this, *args, **options)

    def next_index(this: Any) -> Any:
        index = asks(this)
        if not _is_none(index):
            asked.setdefault(this, deque()).append(index)
        return index

    def next_batch(this: Any) -> Any:
        batch = gives(this)
        if waiting := asked.get(this):
            note(waiting.popleft())
        return batch

    iterator._reset, iterator._next_index, iterator.__next__ = reset, next_index, next_batch


def _is_none(index: Any) -> bool:
    """Return True for what the sampler of a dataset without indices asks for."""
    return index is None or (isinstance(index, list) and all(each is None for each in index))
