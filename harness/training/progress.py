"""The position of a run, the rows it has used, and the measurements since the last log line.

All of it is saved in checkpoints. Nothing here holds weights.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.shards import Segment
from harness.distributed.runtime import Runtime
from harness.training import fsdp
from harness.training.costs import Costs, summed
from harness.training.schedule import Plateau
from harness.training.step_timer import PHASES, step_timer

_BUCKETS = 1 << 12  # of rows in Coverage: 96 KiB


@dataclass
class State:
    """Counters of a run, equal on every rank except ``train_s``. Epochs and steps are those that are finished."""

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)  # the steps of this epoch so far, by world size
    step: int = 0  # optimizer steps, including skipped ones
    applied: int = 0  # updates that changed the weights; the schedule counts these
    skipped: int = 0
    skipped_in_a_row: int = 0
    epoch_applied: int = 0  # the same within this epoch
    epoch_skipped: int = 0
    rows: int = 0  # training rows over all ranks, including those of skipped steps
    rows_skipped: int = 0  # of these, in skipped steps
    bad_rows: int = 0  # unreadable images, over all ranks
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None
    best_step: int = 0
    since_best: int = 0  # evaluations
    wall_s: float = 0.0
    train_s: float = 0.0  # the part of it spent in training, on this rank
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry per evaluation
    plateau: Plateau = field(default_factory=Plateau)

    def add_step(self, skipped: bool) -> None:
        self.step += 1
        if skipped:
            self.skipped += 1
            self.epoch_skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.applied += 1
            self.epoch_applied += 1
            self.skipped_in_a_row = 0

    def add_best(self, value: float) -> None:
        """Record that the evaluation at this step is the best so far."""
        self.best, self.best_step, self.since_best = value, self.step, 0

    def forget_best(self) -> None:
        """Make the next evaluation the best so far."""
        self.best, self.best_step, self.since_best = None, 0, 0
        self.plateau.forget_best()

    def next_epoch(self) -> None:
        self.epoch, self.segments = self.epoch + 1, []
        self.epoch_applied = self.epoch_skipped = 0

    @property
    def in_epoch(self) -> bool:
        return bool(self.segments)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        segments = [Segment(**segment) for segment in values["segments"]]
        plateau = Plateau(**values.get("plateau", {}))  # absent in checkpoints of older versions
        return cls(**{**values, "segments": segments, "plateau": plateau})


class Coverage:
    """The rows that an epoch has used, each rank recording its own, in memory that does not grow with the table.

    Rows are counted in at most _BUCKETS buckets of consecutive rows, with the sums of their numbers and of the squares.
    A bucket whose count and sums are those of all its rows has each of them once.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.width = max(-(-num_rows // _BUCKETS), 1)  # rows per bucket
        self._sums = np.zeros((3, -(-num_rows // self.width)), dtype=np.int64)  # count, numbers, squares, modulo 2^64
        self._pending: list[np.ndarray] = []  # batched: adding row by row would dominate a small step

    def add(self, rows: np.ndarray) -> None:
        self._pending.append(rows)
        if len(self._pending) == 256:
            self._flush()

    def sums(self, runtime: Runtime) -> Tensor:
        """The records of all ranks, int64 (3, buckets). Collective."""
        self._flush()
        return runtime.sum_on_host(torch.from_numpy(self._sums.copy()))

    def found(self, sums: Tensor, name: Callable[[int], str] = str) -> tuple[int, list[str]]:
        """(number of distinct rows, up to three of the missing rows, named by ``name``, or ranges that contain one)."""
        used, missing = 0, list[str]()
        for bucket, (count, total, squares) in enumerate(sums.T.tolist()):
            first = bucket * self.width
            size = min(self.width, self.num_rows - first)
            numbers, whole = size * (size - 1) // 2, (size - 1) * size * (2 * size - 1) // 6
            complete = count == size and total == numbers and (squares - whole) % (1 << 64) == 0
            used += size if complete else min(count, size - 1)
            if complete or len(missing) == 3:
                continue
            one = numbers - total  # the missing row, if it is only one
            is_one = count == size - 1 and 0 <= one < size and (whole - squares - one * one) % (1 << 64) == 0
            missing.append(name(first + one) if is_one else f"some of {first} to {first + size - 1}")
        return used, missing

    def clear(self) -> None:
        self._pending.clear()
        self._sums[:] = 0

    def load(self, sums: Tensor) -> None:
        self._sums[:] = sums.numpy()

    def _flush(self) -> None:
        if not self._pending:
            return
        buckets, offsets = np.divmod(np.concatenate(self._pending), self.width)
        order = np.argsort(buckets, kind="stable")
        buckets, offsets = buckets[order], offsets[order]
        firsts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for line, values in zip(self._sums, (np.ones_like(offsets), offsets, offsets * offsets), strict=True):
            line[buckets[firsts]] += np.add.reduceat(values, firsts)
        self._pending.clear()


class Window(NamedTuple):
    """The measurements between two log lines, over all ranks."""

    total: float  # sum of the loss over the rows of applied steps; NaN if the loss of any step was
    loss: float  # mean over these rows; NaN if there are none
    rows: int  # of all steps
    rows_skipped: int  # of skipped steps
    bad: int
    waited: float  # fraction of the time that hosts waited for data
    shares: dict[str, float]  # fraction of the time by phase, including data and host; they add up to 1
    cost: dict[str, float]  # see harness.training.costs


class Meter:
    """Loss and times since the last log line. The loss is summed on the device; only ``tick`` and ``reduce`` wait."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over this rank's rows
        self.rows = 0  # of this rank, in applied steps
        self.rows_skipped = 0  # of this rank, in skipped steps
        self.bad = 0
        self.steps = 0
        self.wait_s = 0.0
        self.time_s = 0.0
        self.norm: Tensor | None = None  # of the gradients of the last step, if it was measured
        self.timer = step_timer(device)
        self.costs = Costs()
        self._mark = time.perf_counter()

    def restart_clock(self) -> None:
        """Exclude the time since the last ``tick``, which was not spent training."""
        self._mark = time.perf_counter()

    def tick(self) -> None:
        """Update the times. The host waits for the device."""
        self.timer.settle()
        now = time.perf_counter()
        self.time_s, self._mark = self.time_s + now - self._mark, now

    def add_loss(self, mean: Tensor, rows: int) -> None:
        self.loss.add_(mean.detach(), alpha=rows)
        self.rows += rows

    def add_skipped(self, mean: Tensor | None, rows: int) -> None:
        """Count rows of a skipped step. Their loss is left out of the sum. A loss that is not finite makes the sum NaN,
        since no loss scale can fix it; pass None to tolerate it."""
        self.rows_skipped += rows
        if mean is not None:
            self.loss.add_(mean.detach(), alpha=0)

    def take_norm(self) -> float | None:
        """The gradient norm of the last step that measured it. Collective if gradients are sharded; the host waits for
        the device."""
        norm, self.norm = self.norm, None
        return None if norm is None else float(fsdp.full(norm))

    def peak_mib(self) -> float:
        """The most memory of the device so far, in MiB: that of tensors on CUDA, that of this process on a CPU."""
        if self.loss.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.loss.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # in KiB on Linux

    def spent_s(self) -> dict[str, float]:
        """Seconds of this rank by phase. The time between steps is ``data`` while the host waited for data, and
        ``host`` otherwise: the loop, log lines, checkpoints. On CUDA, steps are timed on the stream."""
        steps = self.timer.spent_s
        between = max(0.0, self.time_s - sum(steps.values()))
        data = min(self.wait_s, between)
        return {"data": data, **steps, "host": between - data}

    def reduce(self, runtime: Runtime) -> Window:
        """Sum the window over all ranks and start a new one. Collective. The host waits for the device."""
        spent = self.spent_s()
        costs = self.costs.take(runtime, spent)
        sums: list[float] = [self.rows, self.rows_skipped, self.bad, self.wait_s, *spent.values(), *costs]
        if runtime.world_size == 1:
            total, rows, skipped, bad, wait_s, *rest = self.loss.item(), *sums
        else:
            host = torch.tensor(sums, dtype=torch.float64).to(self.loss.device)
            total, rows, skipped, bad, wait_s, *rest = runtime.sum(torch.cat([self.loss.view(1), host])).tolist()
        times, costs = rest[: len(spent)], rest[len(spent) :]
        self.loss.zero_()
        self.rows = self.rows_skipped = self.bad = self.steps = 0
        self.wait_s = self.time_s = 0.0
        self.timer.spent_s = dict.fromkeys(PHASES, 0.0)
        time_s = sum(times) or math.inf  # without time all shares are zero
        shares = {phase: seconds / time_s for phase, seconds in zip(spent, times, strict=True)}
        loss = total / rows if rows else math.nan
        cost = summed(costs, runtime.world_size)
        return Window(total, loss, int(rows + skipped), int(skipped), int(bad), wait_s / time_s, shares, cost)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part as plain numbers, which can be summed over ranks."""
        self.tick()
        return {"loss": self.loss.item(), "rows": self.rows, "rows_skipped": self.rows_skipped, "bad": self.bad,
                "steps": self.steps, "wait_s": self.wait_s, "time_s": self.time_s,
                **{f"{phase}_s": seconds for phase, seconds in self.timer.spent_s.items()}}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.fill_(state["loss"])
        self.rows, self.bad, self.steps = state["rows"], state["bad"], state["steps"]
        self.rows_skipped = state.get("rows_skipped", 0)  # absent in checkpoints of older versions
        self.wait_s, self.time_s = state["wait_s"], state["time_s"]
        self.timer.spent_s = {phase: state[f"{phase}_s"] for phase in PHASES}
