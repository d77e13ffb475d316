"""What tests plant in a run to make it slow: a function of the run is replaced by one that sleeps first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def before(owner: Any, name: str, delay: Callable[..., None]) -> None:
    """Call ``delay`` with the same arguments before each call of ``owner.name``."""
    original = getattr(owner, name)

    def slower(*args: Any, **kwargs: Any) -> Any:
        delay(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, slower)


def nothing() -> None: ...


def slow_read(seconds: float, only: Callable[[str], bool]) -> None:
    from harness.data.image_files import ImageFiles

    before(ImageFiles, "read", lambda files, path: time.sleep(seconds) if only(path) else None)


def slow_link(bytes_per_s: float) -> None:
    import torch.distributed as dist

    before(dist, "all_reduce", lambda tensor, *args, **kwargs: time.sleep(tensor.nbytes / bytes_per_s))


def slow_store(seconds: float) -> None:
    from harness.runs.checkpoints import Checkpoints

    before(Checkpoints, "write", lambda *args: time.sleep(seconds))
