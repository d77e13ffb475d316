"""What ``benchmarks.explain`` plants in a run to make it slow, and the child process in which it does.

    python -m benchmarks.explain_plants PLANT CONFIG

Nothing here is part of the harness or known to ``harness explain``: a plant replaces a function of the run, such as the
one that reads a file, by one that is slower. Loader processes inherit it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEP_OF_CHANGE = 40


class ManyLayers(nn.Module):
    """Hundreds of operations, each too small to take any time."""

    def __init__(self, num_classes: int, in_channels: int = 3, layers: int = 150) -> None:
        super().__init__()
        del in_channels
        self.first = nn.LazyLinear(8)
        self.layers = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))
        self.last = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.layers(self.first(images.flatten(1))))


class WideEmbedding(nn.Module):
    """A table of weights of which a batch uses few rows, though the gradients of all are exchanged."""

    def __init__(self, num_classes: int, in_channels: int = 3, rows: int = 250_000) -> None:
        super().__init__()
        del in_channels
        self.rows = rows
        self.table = nn.Embedding(rows, 64)
        self.last = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        codes = (images.flatten(1)[:, :16] * 1e6).long().abs() % self.rows
        return self.last(self.table(codes).mean(1))


class PictureTracker:
    """A tracker of the user's own that draws, in Python, for each entry."""

    def start(self, info: Any, entries: Any) -> str:
        return "nowhere"

    def log(self, entry: Any) -> None:
        busy(0.4)

    def show(self, sample: Any) -> None: ...

    def finish(self, files: Any, done: bool) -> None: ...


def busy(seconds: float) -> None:
    """Compute in Python for ``seconds``."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def before(owner: Any, name: str, delay: Callable[..., None]) -> None:
    """Call ``delay`` with the same arguments before each call of ``owner.name``."""
    original = getattr(owner, name)

    def slower(*args: Any, **kwargs: Any) -> Any:
        delay(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, slower)


def slow_read(seconds: float, only: Callable[[str], bool] = lambda path: True) -> None:
    from harness.data.image_files import ImageFiles

    before(ImageFiles, "read", lambda files, path: time.sleep(seconds) if only(path) else None)


def slow_step(seconds: float, from_step: int = 0) -> None:
    from harness.training import loop

    steps = iter(range(10**9))
    before(loop, "prepare", lambda *args: time.sleep(seconds) if next(steps) >= from_step else None)


def slow_dataset(seconds: float) -> None:
    from harness.data.images import ImageTable

    before(ImageTable, "_stack", lambda *args: busy(seconds))


def slow_link(bytes_per_s: float) -> None:
    import torch.distributed as dist

    before(dist, "all_reduce", lambda tensor, *args, **kwargs: time.sleep(tensor.nbytes / bytes_per_s))


def slow_store(seconds: float) -> None:
    from harness.runs.checkpoint import Checkpoints

    before(Checkpoints, "write", lambda *args: time.sleep(seconds))


def slow_log(seconds: float) -> None:
    from harness.trackers.metrics_log import MetricsLog

    before(MetricsLog, "log", lambda *args: time.sleep(seconds))


def on_rank(rank: int, plant: Callable[..., None], *args: Any) -> None:
    if os.environ.get("RANK", "0") == str(rank):
        plant(*args)


PLANTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "slow disk": lambda: slow_read(0.02),
    "distant disk": lambda: slow_read(0.001),
    "more distant disk": lambda: slow_read(0.003),
    "slow dataset": lambda: slow_dataset(0.1),
    "slow rank 1": lambda: on_rank(1, slow_step, 0.05),
    "slow rank 1 later": lambda: on_rank(1, slow_step, 0.05, STEP_OF_CHANGE),
    "slow disk of rank 0": lambda: on_rank(0, slow_read, 0.02),
    "slow link": lambda: slow_link(4e6),
    "slow disk of validation": lambda: slow_read(0.02, lambda path: path.startswith("eval")),
    "slow store": lambda: slow_store(0.5),
    "slow log": lambda: slow_log(0.03),
}


def main(plant: str, config: str) -> int:
    from harness.training.main import main as train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    PLANTS[plant]()
    return train(config, [], os.environ, None)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
