"""Models for tests, named in a configuration by their dotted path."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Slow(nn.Module):
    """A linear model whose training batches take ``step_s`` seconds, until a file named ``until`` exists."""

    def __init__(self, num_classes: int, step_s: float = 0.05, until: str | None = None) -> None:
        super().__init__()
        self.layer, self.step_s, self.until = nn.LazyLinear(num_classes), step_s, until

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        if self.training and not (self.until and os.path.exists(self.until)):
            time.sleep(self.step_s)
        return self.layer(images.flatten(1))


class Raises(Slow):
    """Raises in training step ``step`` of a process (from 1), only on rank ``rank``."""

    def __init__(self, num_classes: int, rank: int, step: int, step_s: float = 0.0) -> None:
        super().__init__(num_classes, step_s)
        self.rank, self.left = rank, step

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0 and int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == self.rank:
            raise ArithmeticError("a layer went wrong, only here")
        return super().forward(images)


class Odd(BaseException):
    """Not an ``Exception``."""


class Mute(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no text")


class RaisesUnusual(Slow):
    """Raises ``kind``, Odd or Mute, in the third training step."""

    def __init__(self, num_classes: int, kind: str) -> None:
        super().__init__(num_classes, 0.0)
        self.kind, self.left = {"Odd": Odd, "Mute": Mute}[kind], 3

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0:
            raise self.kind("unusual")
        return super().forward(images)


class Forks(Slow):
    """Forks two processes in the third training step. One calls sys.exit(3), the other raises an error."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, 0.0)
        self.left = 3

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        for child in (0, 1) if self.left == 0 else ():
            if pid := os.fork():
                print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            elif child == 0:
                sys.exit(3)
            else:
                raise ArithmeticError("of the child")
        return super().forward(images)


def _announce_and_sleep() -> None:
    print("the model sleeps", flush=True)
    time.sleep(1e9)


def _wait_for_another_thread() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _reduce_alone() -> None:
    torch.distributed.all_reduce(torch.zeros(1000))


def _raise_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1e9,)).start()
    raise ArithmeticError("a layer went wrong, only here")


WAYS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(1e9),
    "announced sleep": _announce_and_sleep,
    "lock": _wait_for_another_thread,
    "c call": lambda: ctypes.PyDLL(None).pause(),  # holds Python's global lock: none of its threads runs
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "extra collective": _reduce_alone,
    "exit": lambda: sys.exit(0),
    "vanish": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "thread": _raise_beside_a_thread,
}


class Hangs(Slow):
    """Goes wrong in training step ``step`` (from 1) in one of WAYS, only on rank ``rank``."""

    def __init__(self, num_classes: int, rank: int, step: int, how: str) -> None:
        super().__init__(num_classes, 0.0)
        self.left, self.how = step, how
        self.here = int(os.environ.get("RANK", "0")) == rank

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0 and self.here and self.training:
            if self.how == "no gradient":
                return torch.zeros(len(images), self.layer.out_features, requires_grad=True)
            WAYS[self.how]()
        return super().forward(images)


class Synchronizes(Slow):
    """In training step ``step`` (from 1), waits for a device that never answers: in C code that releases Python's
    global lock, outside of any collective of gloo, as in a CUDA synchronization."""

    def __init__(self, num_classes: int, step: int) -> None:
        super().__init__(num_classes, 0.0)
        self.left = step

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0 and self.training:
            ctypes.CDLL(None).pause()
        return super().forward(images)


class Overflowing(nn.Module):
    """A linear model with gradients so large that float16 overflows until the loss scale is reduced."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layer(images.flatten(1)) * 16


class NanAtStep(nn.Module):
    """A linear model that yields NaN in training step ``step`` (from 1), only on rank ``rank`` if one is given."""

    def __init__(self, num_classes: int, step: int, rank: int | None = None) -> None:
        super().__init__()
        self.layer, self.left = nn.LazyLinear(num_classes), step
        self.here = rank is None or int(os.environ.get("RANK", "0")) == rank

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        logits = self.layer(images.flatten(1))
        return logits * float("nan") if self.training and self.left == 0 and self.here else logits


class BatchNormed(nn.Module):
    """Batch norm over vectors, which cannot train on a single row."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layers(images)


class Versioned(nn.Module):
    """Refuses weights of another version of itself, as torchvision's mnasnet does."""

    _version = 2

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layers(images)

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version") != 2:
            raise ValueError("the version should be 2")
        super()._load_from_state_dict(state, prefix, metadata, *others)


class Residual(nn.Module):
    """A convolution with batch norm and dropout beside a shortcut."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape of ``x``, (batch, width, height, width)."""
        return x + self.drop(self.norm(self.conv(x)).relu())


class Blocks(nn.Module):
    """A network of residual blocks; at ``width`` 96 each is an FSDP unit."""

    def __init__(
        self, num_classes: int, in_channels: int = 1, width: int = 8, num_blocks: int = 3, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(in_channels, width, 3), nn.Linear(width, num_classes)
        self.blocks = nn.Sequential(*(Residual(width, dropout) for _ in range(num_blocks)))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.end(self.blocks(self.start(images)).mean((2, 3)))


class OfItsRank(nn.Module):
    """A network with all that belongs to a rank: batch norm, dropout, spectral norm, a buffer that counts, a branch
    that some batches do not use, and, if ``overflows``, gradients that overflow in float16 for some batches only."""

    def __init__(self, num_classes: int, overflows: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.3), nn.utils.spectral_norm(nn.Linear(4, num_classes))
        self.branch = nn.Linear(4, num_classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.overflows = overflows

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, height, width) -> logits (batch, classes)."""
        hidden = self.drop(self.norm(self.conv(images)).relu()).mean((2, 3))
        logits, bright = self.last(hidden), bool(images[0].float().mean() > images[-1].float().mean())
        if self.training:
            self.seen += 1 + bright
        if bright:
            logits = logits + self.branch(hidden)
        return logits * 30_000 if self.training and self.overflows and bright else logits
