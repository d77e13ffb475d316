"""What takes a rank's time besides the phases of a step. ``harness explain`` reads it from the field ``cost`` of
metrics.jsonl."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from harness.distributed.machine import run_queue_s
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
    """Adds up the costs of this rank since the last log line."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(_SUMS, 0.0)
        self._machine = _Machine()

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self.spent_s[name] += value

    def take(self, runtime: Runtime, phases: Mapping[str, float]) -> CostsOfRanks:
        """Return this rank's costs. Resets the counters."""
        self.add(self._machine.sample(runtime.launch.local_rank == 0))
        spent_s, self.spent_s = self.spent_s, dict.fromkeys(_SUMS, 0.0)
        own_s, data_s = [0.0] * runtime.world_size, [0.0] * runtime.world_size
        own_s[runtime.rank], data_s[runtime.rank] = sum(phases.values()) - phases["reduce"], phases["data"]
        return CostsOfRanks(spent_s, own_s, data_s)


class CostsOfRanks(NamedTuple):
    """The costs of one rank, or their sums over ranks."""

    spent_s: dict[str, float]
    own: Sequence[float]
    """A slot per rank, zero on the others: its own time, without the exchange of gradients."""
    data: Sequence[float]
    """A slot per rank, zero on the others: the part of its own time that it waited for data."""

    def vector(self) -> list[float]:
        return [*self.spent_s.values(), *self.own, *self.data]

    @classmethod
    def of(cls, vector: Sequence[float]) -> CostsOfRanks:
        slots = vector[len(_SUMS) :]
        own_s, data_s = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        return cls(dict(zip(_SUMS, vector[: len(_SUMS)], strict=True)), own_s, data_s)


def summed(costs: CostsOfRanks) -> dict[str, float]:
    """Return sums over ranks by name: those in _SUMS that are not zero, and

    slowest, wait, slowest_data: with several ranks, the one with the most time of its own; the seconds that the others
    waited for it, summed over them; and how much longer than the median rank it waited for data
    """
    spent_s, own_s, data_s = costs
    cost = {name: round(value, 6) for name, value in spent_s.items() if value}
    if len(own_s) > 1:
        slowest = own_s.index(max(own_s))
        more = data_s[slowest] - sorted(data_s)[(len(own_s) - 1) // 2]
        cost |= {"slowest": slowest, "wait": round(sum(own_s[slowest] - s for s in own_s), 6)}
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
        reading, before, elapsed = self._read(first_of_machine), self._seen, now - self._mark
        self._mark, self._seen = now, reading
        spent = {name: max(0.0, reading[name] - before[name]) for name in reading.keys() & before.keys()}
        has_busy = "busy" in spent
        return {**spent, "sampled_ranks": elapsed, "sampled": elapsed if has_busy else 0.0}

    def _read(self, first_of_machine: bool) -> dict[str, float]:
        reading = {"own": time.process_time()}
        with suppress(OSError, ValueError, IndexError):  # not Linux, or a kernel without these files
            reading["starved"] = run_queue_s()
            tasks = os.listdir("/proc/self/task")
            reading["threads_starved"] = sum(run_queue_s(f"/proc/self/task/{task}/schedstat") for task in tasks)
        if first_of_machine:
            with suppress(OSError, ValueError, IndexError):
                ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
                idle = ticks[3] + ticks[4]  # the second is idle time while a disk works
                reading["busy"] = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
        return reading
