"""The measurements between two log lines: the loss, the times of the phases of a step, and what else takes time.

The host waits for what the device had been given before the end of a window, and for all of it at a checkpoint. All of
it is added up locally and is part of the one reduction of a log line. ``harness explain`` reads the times from
``metrics.jsonl``: the fields ``time_PHASE`` and ``cost``.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.training.measuring.costs import Costs, CostsOfRanks, summed
from harness.training.measuring.step_timer import PHASES, CudaTimer, StepTimer, wait_for_event
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.strategies import sharding


class Reading:
    """Numbers, of which those on a GPU are copied to the host while it goes on."""

    def __init__(self, numbers: Mapping[str, float | Tensor]) -> None:
        self._numbers = {name: value for name, value in numbers.items() if not isinstance(value, Tensor)}
        copied = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
        self._names, self._event = list(copied), None
        if copied:
            stacked = torch.stack([value.detach().double().reshape(()) for value in copied.values()])
            self._copy = stacked.to("cpu", non_blocking=True)  # into pinned memory
            if stacked.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(stacked.device))

    def values(self) -> dict[str, float]:
        """Return the numbers. The host waits until the device has passed the copy, not for what was queued after it."""
        if self._event is not None:
            wait_for_event(self._event)
        return {**self._numbers, **(dict(zip(self._names, self._copy.tolist(), strict=True)) if self._names else {})}


class StepRows(NamedTuple):
    """What a step used on this process, for each of its ranks."""

    rows: list[np.ndarray]
    """The rows of each micro-batch of all ranks of this process."""
    num_rows: list[int]
    bad: list[list[int]]
    """The numbers of those that could not be read."""


class Window(NamedTuple):
    """The measurements between two log lines, over all ranks."""

    total: float
    """Sum of the loss over the rows of applied steps; NaN if the loss of any step was that ``add_loss`` got."""
    loss: float
    """Mean over these rows; NaN if there are none."""
    rows: int
    """Rows of all steps."""
    rows_skipped: int
    """Rows of skipped steps."""
    bad: int
    bad_rows: list[int]
    """The numbers of the rows that could not be read."""
    waited: float
    """Fraction of the time that hosts waited for data."""
    shares: dict[str, float]
    """Fraction of the time by phase, including data and host; they add up to 1."""
    cost: dict[str, float]
    """From ``summed``."""
    norm: float | None
    """The norm of the gradients of the last step, if it was measured."""
    scale: float
    """The loss scale after the last step."""
    steps: int
    time_s: float
    """Seconds of training on this rank."""


class Meter:
    """Loss and times since the last log line. The loss is summed on the device; ``tick`` and ``reduce`` wait for what
    the device had been given by ``end_window``, ``state`` for all of it."""

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        """``num_ranks``: those of the recipe that this process computes."""
        self.device = device
        # The sum over the rows of each rank.
        self.losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(num_ranks)]
        self.rows = [0] * num_ranks  # of each rank, in applied steps
        self.rows_skipped = [0] * num_ranks  # in skipped steps
        self.bad: list[list[int]] = [[] for _ in range(num_ranks)]  # the rows that could not be read
        self.steps = 0
        self.wait_s = 0.0
        self.time_s = 0.0
        self.norm: Tensor | None = None  # of the gradients of the last step, if it was measured
        self.timer = CudaTimer(device) if device.type == "cuda" else StepTimer()
        self.costs = Costs()
        self._ended: Reading | None = None
        self._mark: float | None = time.perf_counter()  # up to which time_s counts; None: the clock is stopped

    @property
    def is_running(self) -> bool:
        """True if time counts as training: not after ``stop_clock``."""
        return self._mark is not None

    def stop_clock(self) -> None:
        """Exclude the time from now until ``restart_clock``."""
        if self._mark is not None:
            self.time_s, self._mark = self.time_s + time.perf_counter() - self._mark, None

    def restart_clock(self) -> None:
        """Exclude the time since the last ``tick``, which was not spent training."""
        self._mark = time.perf_counter()

    def tick(self) -> None:
        """Update the times. The host waits for the device, as the timer's ``settle`` does."""
        self.timer.settle()
        if self._mark is not None:
            now = time.perf_counter()
            self.time_s, self._mark = self.time_s + now - self._mark, now

    def add_loss(self, mean: Tensor, rows: int, skip: bool | Tensor = False, index: int = 0) -> None:
        """Add the mean loss of ``rows`` rows to the sum of the rank at ``index`` in this process. That of a skipped
        step is left out, unless it is not finite: then it makes the sum NaN, since no loss scale can fix it. ``skip``:
        not 0 if the step is skipped."""
        mean = mean.detach()
        total = self.losses[index]
        if isinstance(skip, Tensor):
            self.losses[index] = torch.where(skip != 0, total.add(mean, alpha=0), total.add(mean, alpha=rows))
        else:
            total.add_(mean, alpha=0 if skip else rows)

    def count(self, step_rows: StepRows, skip: bool) -> None:
        """Count a step and its rows."""
        self.steps += 1
        for index, (num_rows, bad) in enumerate(zip(step_rows.num_rows, step_rows.bad, strict=True)):
            self.bad[index] += bad
            self.rows_skipped[index] += num_rows * skip
            self.rows[index] += num_rows * (not skip)

    def end_window(self, scale: float | Tensor = 1.0) -> None:
        """End the window of a log line: ``tick`` and ``reduce``, which may come after the next backward pass, read what
        the device has measured until now. Collective if gradients are sharded."""
        norm, self.norm = self.norm, None
        measured = {} if norm is None else {"norm": sharding.full(norm)}
        losses = {f"loss {index}": total for index, total in enumerate(self.losses)}
        self._ended = Reading({**losses, "scale": scale, **measured})
        self.timer.end_window()

    @property
    def ended(self) -> bool:
        """True between ``end_window`` and ``reduce``."""
        return self._ended is not None

    def peak_mib(self) -> float:
        """Return the most memory of the device so far, in MiB: that of tensors on CUDA, that of this process on a
        CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # in KiB on Linux

    def spent_s(self) -> dict[str, float]:
        """Return the seconds of this rank by phase. The time between steps is ``data`` while the host waited for data,
        and ``host`` otherwise: the loop, log lines, checkpoints. On CUDA, steps are timed on the stream."""
        steps = self.timer.spent_s
        between = max(0.0, self.time_s - sum(steps.values()))
        data = min(self.wait_s, between)
        return {"data": data, **steps, "host": between - data}

    def reduce(self, ranks: LogicalRanks) -> Window:
        """Sum the window over all ranks and start a new one. Collective. The host waits for the device to have passed
        the end of the window."""
        if self._ended is None:
            self.end_window()
        assert self._ended is not None
        readings, spent = self._ended.values(), self.spent_s()
        rank_sums = [
            self.wait_s,
            *spent.values(),
            *self.costs.take(ranks.runtime, spent).vector(),
        ]  # of the process
        parts = [
            [readings[f"loss {index}"], self.rows[index], self.rows_skipped[index], len(self.bad[index])]
            + (rank_sums if index == 0 else [0.0] * len(rank_sums))
            for index in range(len(self.losses))
        ]
        sums = ranks.sum([torch.tensor(part, dtype=torch.float64) for part in parts], on_host=True).tolist()
        total, rows, skipped, bad, wait_s, *phase_sums = sums
        times, costs = phase_sums[: len(spent)], phase_sums[len(spent) :]
        bad_rows = ranks.runtime.gather([*chain(*self.bad)]) if bad else []  # by all or none: ``bad`` is reduced
        time_s = sum(times) or math.inf  # without time all shares are zero
        window = Window(
            total=total,
            loss=total / rows if rows else math.nan,
            rows=int(rows + skipped),
            rows_skipped=int(skipped),
            bad=int(bad),
            bad_rows=sorted({*chain(*bad_rows)}),
            waited=wait_s / time_s,
            shares={phase: seconds / time_s for phase, seconds in zip(spent, times, strict=True)},
            cost=summed(CostsOfRanks.of(costs)),
            norm=readings.get("norm"),
            scale=readings["scale"],
            steps=self.steps,
            time_s=self.time_s,
        )
        self._clear()
        return window

    def _clear(self) -> None:
        """Start a new window."""
        self._ended = None
        for loss in self.losses:
            loss.zero_()
        self.rows, self.rows_skipped = ([0] * len(self.losses) for _ in range(2))
        self.bad = [[] for _ in self.losses]
        self.steps = 0
        self.wait_s = self.time_s = 0.0
        self.timer.spent_s = dict.fromkeys(PHASES, 0.0)

    def state(self) -> list[dict[str, Any]]:
        """Return what each rank of this process has measured, as numbers and a list, which can be added over ranks. The
        first has the times of the process."""
        self.tick()
        spent = {f"{phase}_s": seconds for phase, seconds in self.timer.spent_s.items()}
        times = {"wait_s": self.wait_s, "time_s": self.time_s, **spent}
        return [
            {"loss": loss.item(), "rows": rows, "rows_skipped": skipped, "bad": [*bad], "steps": self.steps,
             **(times if index == 0 else dict.fromkeys(times, 0.0))}
            for index, (loss, rows, skipped, bad) in enumerate(
                zip(self.losses, self.rows, self.rows_skipped, self.bad, strict=True)
            )
        ]  # fmt: skip

    def load_state(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Continue from what the ranks of this process had measured."""
        for loss, rank_state in zip(self.losses, ranks, strict=True):
            loss.fill_(rank_state["loss"])
        self.steps = ranks[0]["steps"]
        self.rows, self.rows_skipped = ([rank_state[key] for rank_state in ranks] for key in ("rows", "rows_skipped"))
        self.bad = [[*rank_state["bad"]] for rank_state in ranks]
        times = {key: sum(rank_state[key] for rank_state in ranks) for key in ranks[0] if key.endswith("_s")}
        self.wait_s, self.time_s = times["wait_s"], times["time_s"]
        self.timer.spent_s = {phase: times[f"{phase}_s"] for phase in PHASES}
