"""What takes a rank's time besides the phases of a step. ``harness explain`` reads it from the field ``cost`` of
metrics.jsonl."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.data.loader_workers import run_queue_s
from harness.distributed.runtime import Runtime

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
        """Return this rank's costs and, in slots that are zero on other ranks, its own time: without the exchange of
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
        """Return the seconds since the last sample; empty if that is too recent. One rank of a machine reports it."""
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
