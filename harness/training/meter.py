"""The measurements between two log lines: the loss, the times of the phases of a step, and what else takes time.

Nothing here makes the host wait for the device, but for what the device had been given before the end of a window. All
of it is added up locally and is part of the one reduction of a log line. ``harness explain`` reads the times from
``metrics.jsonl``: the fields ``time_PHASE`` and ``cost``.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from harness.data.loader_workers import run_queue_s
from harness.distributed.runtime import Runtime
from harness.training.logical_ranks import LogicalRanks
from harness.training.progress import Used
from harness.training.strategies import sharding

# The time of the phases

# The phases of a step, in order. ``reduce`` is the part of the gradient exchange that follows the backward pass.
PHASES = ("forward", "backward", "reduce", "optimizer")

_READ_AT = 256  # events in flight, from which on those that the device has passed are read


class StepTimer:
    """Marks in a step: ``start``, then ``end`` of one phase after the other. This one is for devices whose work is done
    when a call returns."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PHASES, 0.0)  # seconds in each phase, up to the last ``settle``
        self._mark = 0.0

    def start(self) -> None:
        """Mark the start of a step. The time since the last mark belongs to no phase."""
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``."""
        now = time.perf_counter()
        self.spent_s[phase] += now - self._mark
        self._mark = now

    def end_window(self) -> None:
        """Let the next ``settle`` stop at the last mark, although further ones may follow before it."""

    def settle(self) -> None:
        """Bring ``spent_s`` up to the end of the window, or to the last mark. The host waits for the device to pass
        it."""


class CudaTimer(StepTimer):
    """For CUDA devices, whose calls only queue work: the marks are events in the stream.

    An event is reused once it is read. The driver's launch queue limits how far the host runs ahead of the device, and
    so the number of events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[tuple[str, torch.cuda.Event]] = deque()  # (phase that ends there, event), not read yet
        self._window_end: torch.cuda.Event | None = None

    def start(self) -> None:
        self.end("")

    def end(self, phase: str) -> None:
        if len(self._pending) >= _READ_AT:
            self._read()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending.append((phase, event))

    def end_window(self) -> None:
        self._window_end = self._pending[-1][1] if self._pending else None

    def settle(self) -> None:
        if self._pending:
            wait_for(self._window_end or self._pending[-1][1])
            self._read()
        self._window_end = None

    def _read(self) -> None:
        """Add up the events of the window that the device has passed, without waiting."""
        while len(self._pending) > 1 and self._pending[1][1].query():
            if self._pending[0][1] is self._window_end:
                return
            _, before = self._pending.popleft()
            phase, event = self._pending[0]
            if phase:
                self.spent_s[phase] += before.elapsed_time(event) / 1000
            self._free.append(before)


def wait_for(event: torch.cuda.Event) -> None:
    """Wait until the device has passed ``event``."""
    if not event.query():
        event.synchronize()


def end_backward_before_exchange(timer: StepTimer, loss: Tensor) -> None:
    """Mark the end of "backward" when all local gradients are computed, before waiting for other ranks. Call this
    before ``loss.backward()``.

    Apex's DDP, ours and FSDP finish the exchange of gradients in callbacks that autograd runs after the backward pass,
    in the order in which they were queued. The loss is the first tensor of the pass, so this callback comes first.
    """

    def queue_first(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: timer.end("backward"))  # as torch's own FSDP does

    loss.register_hook(queue_first)


# The time outside steps

SAMPLE_S = 0.5  # between two looks at the machine, which take about 0.1 ms

# Seconds, summed over ranks.
_SUMS = (
    "read", "decode", "transform", "load",  # in the loader, by stage and altogether
    "cpu", "load_starved",  # of "load", on a core; of loader processes, ready to run but without a core
    "checkpoint", "log",  # parts of the phase "host"
    "tracker",  # on a core, in the threads of trackers
    "starved", "threads_starved",  # ready to run but without a core: the training thread, all threads of the rank
    "own", "busy", "sampled", "sampled_ranks",  # on a core: this run, the whole machine; meanwhile: per machine, rank
)  # fmt: skip


class Costs:
    """The costs of one rank since the last log line."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(_SUMS, 0.0)
        self._machine = _Machine()

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            if name in self.spent_s:
                self.spent_s[name] += value

    def take(self, runtime: Runtime, phases: Mapping[str, float]) -> list[float]:
        """This rank's costs and, in slots that are zero on other ranks, its own time: without the exchange of
        gradients, and the part of it that it waited for data. Resets the counters."""
        self.add(self._machine.sample(runtime.launch.local_rank == 0))
        slots = [0.0] * (2 * runtime.world_size)
        slots[2 * runtime.rank] = sum(phases.values()) - phases["reduce"]
        slots[2 * runtime.rank + 1] = phases["data"]
        values = [*self.spent_s.values(), *slots]
        self.spent_s = dict.fromkeys(_SUMS, 0.0)
        return values


def summed(values: Sequence[float], world_size: int) -> dict[str, float]:
    """Return the sums over ranks of what ``take`` returned, by name: those in _SUMS that are not zero, and

    slowest, wait, slowest_data: with several ranks, the one with the most time of its own; the seconds that the others
    waited for it, summed over them; and how much longer than the median rank it waited for data
    """
    cost = {name: round(value, 6) for name, value in zip(_SUMS, values, strict=False) if value}
    if world_size > 1:
        own, data = values[len(_SUMS) :: 2], values[len(_SUMS) + 1 :: 2]
        slowest = max(range(world_size), key=lambda rank: own[rank])
        more = data[slowest] - sorted(data)[(world_size - 1) // 2]
        cost |= {"slowest": slowest, "wait": round(sum(own[slowest] - s for s in own), 6)}
        cost |= {"slowest_data": round(more, 6)}
    return cost


class _Machine:
    """CPU time of this process and of the whole machine, and time without a core, from Linux's /proc."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._seen = self._read(True)

    def sample(self, first_of_machine: bool) -> dict[str, float]:
        """Seconds since the last sample; empty if that is too recent. Only one rank of a machine reports for it."""
        now = time.perf_counter()
        if now - self._mark < SAMPLE_S:
            return {}
        seen, before, elapsed = self._read(first_of_machine), self._seen, now - self._mark
        self._mark, self._seen = now, seen
        spent = {name: max(0.0, seen[name] - before[name]) for name in seen.keys() & before.keys()}
        known = "busy" in spent
        return {**spent, "sampled_ranks": elapsed, "sampled": elapsed if known else 0.0}

    def _read(self, first_of_machine: bool) -> dict[str, float]:
        found = {"own": time.process_time()}
        with suppress(OSError, ValueError, IndexError):  # not Linux, or a kernel without these files
            found["starved"] = run_queue_s()
            tasks = os.listdir("/proc/self/task")
            found["threads_starved"] = sum(run_queue_s(f"/proc/self/task/{task}/schedstat") for task in tasks)
        if first_of_machine:
            with suppress(OSError, ValueError, IndexError):
                ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
                idle = ticks[3] + ticks[4]  # the second is idle time while a disk works
                found["busy"] = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
        return found


# The meter


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
            wait_for(self._event)
        return {**self._numbers, **(dict(zip(self._names, self._copy.tolist(), strict=True)) if self._names else {})}


class Window(NamedTuple):
    """The measurements between two log lines, over all ranks."""

    total: float
    """Sum of the loss over the rows of applied steps; NaN if the loss of any step was."""
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


class Meter:
    """Loss and times since the last log line. The loss is summed on the device; only ``tick`` and ``reduce`` wait, for
    what the device had been given by ``end_window``."""

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
        self._mark = time.perf_counter()

    def restart_clock(self) -> None:
        """Exclude the time since the last ``tick``, which was not spent training."""
        self._mark = time.perf_counter()

    def tick(self) -> None:
        """Update the times. The host waits for the device, as the timer's ``settle`` does."""
        self.timer.settle()
        now = time.perf_counter()
        self.time_s, self._mark = self.time_s + now - self._mark, now

    def add_loss(self, mean: Tensor, rows: int, skip: bool | Tensor = False, place: int = 0) -> None:
        """Add the mean loss of ``rows`` rows to the sum of the rank at ``place`` in this process. That of a skipped
        step is left out, unless it is not finite: then it makes the sum NaN, since no loss scale can fix it. ``skip``:
        not 0 if the step is skipped."""
        mean = mean.detach()
        total = self.losses[place]
        if isinstance(skip, Tensor):
            self.losses[place] = torch.where(skip != 0, total.add(mean, alpha=0), total.add(mean, alpha=rows))
        else:
            total.add_(mean, alpha=0 if skip else rows)

    def count(self, used: Used, skip: bool) -> None:
        """Count a step and its rows."""
        self.steps += 1
        for place, (num_rows, bad) in enumerate(zip(used.num_rows, used.bad, strict=True)):
            self.bad[place] += bad
            self.rows_skipped[place] += num_rows * skip
            self.rows[place] += num_rows * (not skip)

    def end_window(self, scale: float | Tensor = 1.0) -> None:
        """End the window of a log line: ``tick`` and ``reduce``, which may come after the next backward pass, read what
        the device has measured until now. Collective if gradients are sharded."""
        norm, self.norm = self.norm, None
        measured = {} if norm is None else {"norm": sharding.full(norm)}
        losses = {f"loss {place}": total for place, total in enumerate(self.losses)}
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
        """Seconds of this rank by phase. The time between steps is ``data`` while the host waited for data, and
        ``host`` otherwise: the loop, log lines, checkpoints. On CUDA, steps are timed on the stream."""
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
        seen, self._ended = self._ended.values(), None
        spent = self.spent_s()
        costs = self.costs.take(ranks.runtime, spent)
        own = [self.wait_s, *spent.values(), *costs]  # of the process: its first rank has them
        parts = [
            [seen[f"loss {place}"], self.rows[place], self.rows_skipped[place], len(self.bad[place])]
            + (own if place == 0 else [0.0] * len(own))
            for place in range(len(self.losses))
        ]
        sums = ranks.sum([torch.tensor(part, dtype=torch.float64) for part in parts], on_host=True).tolist()
        total, rows, skipped, bad, wait_s, *rest = sums
        times, costs = rest[: len(spent)], rest[len(spent) :]
        bad_rows = ranks.runtime.gather([*chain(*self.bad)]) if bad else []  # by all or none: ``bad`` is reduced
        for of_rank in self.losses:
            of_rank.zero_()
        self.rows, self.rows_skipped = ([0] * len(self.losses) for _ in range(2))
        self.bad = [[] for _ in self.losses]
        self.steps = 0
        self.wait_s = self.time_s = 0.0
        self.timer.spent_s = dict.fromkeys(PHASES, 0.0)
        time_s = sum(times) or math.inf  # without time all shares are zero
        shares = {phase: seconds / time_s for phase, seconds in zip(spent, times, strict=True)}
        loss = total / rows if rows else math.nan
        cost = summed(costs, ranks.runtime.world_size)
        return Window(
            total, loss, int(rows + skipped), int(skipped), int(bad), sorted({*chain(*bad_rows)}), wait_s / time_s,
            shares, cost, seen.get("norm"), seen["scale"],
        )  # fmt: skip

    def state(self) -> list[dict[str, Any]]:
        """Return what each rank of this process has measured, as numbers and a list, which can be added over ranks. The
        first has the times of the process."""
        self.tick()
        spent = {f"{phase}_s": seconds for phase, seconds in self.timer.spent_s.items()}
        times = {"wait_s": self.wait_s, "time_s": self.time_s, **spent}
        return [
            {"loss": loss.item(), "rows": rows, "rows_skipped": skipped, "bad": [*bad], "steps": self.steps,
             **(times if place == 0 else dict.fromkeys(times, 0.0))}
            for place, (loss, rows, skipped, bad) in enumerate(
                zip(self.losses, self.rows, self.rows_skipped, self.bad, strict=True)
            )
        ]  # fmt: skip

    def load_state(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Continue from what the ranks of this process had measured."""
        for loss, of_rank in zip(self.losses, ranks, strict=True):
            loss.fill_(of_rank["loss"])
        self.steps = ranks[0]["steps"]
        self.rows, self.rows_skipped = ([of_rank[key] for of_rank in ranks] for key in ("rows", "rows_skipped"))
        self.bad = [[*of_rank["bad"]] for of_rank in ranks]
        times = {key: sum(of_rank[key] for of_rank in ranks) for key in ranks[0] if key.endswith("_s")}
        self.wait_s, self.time_s = times["wait_s"], times["time_s"]
        self.timer.spent_s = {phase: times[f"{phase}_s"] for phase in PHASES}
