"""Where a run stands: the numbers that say which step comes next and what is owed, and the meter of the open window.

Everything here is in the checkpoint, and nothing here holds weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.shards import Segment
from harness.distributed.runtime import Runtime
from harness.training import step_timer


@dataclass
class State:
    """Epochs and steps count finished ones. The same on every rank."""

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)  # what of the present epoch is done, and by how many ranks
    step: int = 0  # optimizer steps, the skipped ones included
    applied: int = 0  # updates really made; the schedule counts these
    skipped: int = 0
    skipped_in_a_row: int = 0
    rows: int = 0  # training rows over all ranks
    bad_rows: int = 0  # images that could not be read, over all ranks
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None
    best_step: int = 0
    since_best: int = 0  # evaluations
    wall_s: float = 0.0
    train_s: float = 0.0  # of it in training; this rank's
    history: list[dict[str, Any]] = field(default_factory=list)  # one evaluation an entry

    def book(self, skip: bool) -> None:
        """One more optimizer step, applied or skipped."""
        self.step += 1
        if skip:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.applied += 1
            self.skipped_in_a_row = 0

    def forget_best(self) -> None:
        """The next evaluation is the best so far."""
        self.best, self.best_step, self.since_best = None, 0, 0

    def next_epoch(self) -> None:
        self.epoch, self.segments = self.epoch + 1, []

    @property
    def in_epoch(self) -> bool:
        return bool(self.segments)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        return cls(**{**values, "segments": [Segment(**segment) for segment in values["segments"]]})


class Coverage:
    """Which rows of the epoch were used: counted, not assumed. Each rank books its own."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._seen = np.zeros(num_rows, dtype=bool)
        self._pending: list[np.ndarray] = []  # booked in bulk: one by one they would cost more than all else here

    def add(self, rows: np.ndarray) -> None:
        self._pending.append(rows)
        if len(self._pending) == 256:
            self._book()

    def bits(self, runtime: Runtime) -> Tensor:
        """The rows that any rank used, eight to a byte. Collective."""
        self._book()
        return runtime.union(torch.from_numpy(np.packbits(self._seen)))

    def count(self, runtime: Runtime) -> int:
        """How many distinct rows all ranks used. Collective."""
        return int(np.unpackbits(self.bits(runtime).numpy(), count=self.num_rows).sum())

    def clear(self) -> None:
        self._pending.clear()
        self._seen[:] = False

    def load(self, bits: Tensor) -> None:
        self._seen[:] = np.unpackbits(bits.numpy(), count=self.num_rows).astype(bool)

    def _book(self) -> None:
        if self._pending:
            self._seen[np.concatenate(self._pending)] = True
            self._pending.clear()


class Window(NamedTuple):
    """What was measured since the last log line, over all ranks."""

    loss: float  # the mean over its rows; NaN without any
    rows: int
    bad: int
    waited: float  # share of the time that hosts stood still for want of data
    shares: dict[str, float]  # of the time, by phase: with data and host, so that they add up to 1


class Meter:
    """Loss and time since the last log line. The loss is summed on the device; only ``tick`` and ``reduce`` wait."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over this rank's rows
        self.rows = 0  # of this rank, in applied steps
        self.bad = 0
        self.steps = 0
        self.wait_s = 0.0
        self.time_s = 0.0
        self.clock = step_timer.clock(device)
        self._mark = time.perf_counter()

    def resume_clock(self) -> None:
        """Leave out the time since the last ``tick``: it was not spent training."""
        self._mark = time.perf_counter()

    def tick(self) -> None:
        """Bring the times up to now, when the device has done all that it was told."""
        self.clock.settle()
        now = time.perf_counter()
        self.time_s, self._mark = self.time_s + now - self._mark, now

    def add_loss(self, mean: Tensor, rows: int) -> None:
        self.loss.add_(mean.detach(), alpha=rows)
        self.rows += rows

    def spent_s(self) -> dict[str, float]:
        """Seconds of this rank by phase. What lies between steps is ``data``, as far as the host waited for that, and
        else ``host``: the loop itself, log lines, checkpoints. On a CUDA device the steps are those of its stream."""
        steps = self.clock.spent_s
        between = max(0.0, self.time_s - sum(steps.values()))
        data = min(self.wait_s, between)
        return {"data": data, **steps, "host": between - data}

    def reduce(self, runtime: Runtime) -> Window:
        """The window over all ranks; starts a new one. Collective. The host waits for the device."""
        spent = self.spent_s()
        sums: list[float] = [self.rows, self.bad, self.wait_s, *spent.values()]
        if runtime.world_size == 1:
            total, rows, bad, wait_s, *times = self.loss.item(), *sums
        else:
            host = torch.tensor(sums, dtype=torch.float64).to(self.loss.device)
            total, rows, bad, wait_s, *times = runtime.sum(torch.cat([self.loss.view(1), host])).tolist()
        self.loss.zero_()
        self.rows = self.bad = self.steps = 0
        self.wait_s = self.time_s = 0.0
        self.clock.spent_s = dict.fromkeys(step_timer.PHASES, 0.0)
        time_s = sum(times) or math.inf  # no time, no shares
        shares = {phase: seconds / time_s for phase, seconds in zip(spent, times, strict=True)}
        return Window(total / rows if rows else math.nan, int(rows), int(bad), wait_s / time_s, shares)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; plain numbers, which add up over ranks."""
        self.tick()
        return {"loss": self.loss.item(), "rows": self.rows, "bad": self.bad, "steps": self.steps,
                "wait_s": self.wait_s, "time_s": self.time_s,
                **{f"{phase}_s": seconds for phase, seconds in self.clock.spent_s.items()}}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.fill_(state["loss"])
        self.rows, self.bad, self.steps = state["rows"], state["bad"], state["steps"]
        self.wait_s, self.time_s = state["wait_s"], state["time_s"]
        # A checkpoint may be older than the phases.
        self.clock.spent_s = {phase: state.get(f"{phase}_s", 0.0) for phase in step_timer.PHASES}
