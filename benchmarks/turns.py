"""Measures contenders that take turns, so that a busy machine slows all of them alike.

Each contender runs in processes of its own, one thread per rank. They take turns in short rounds of equal length, and
are restarted STARTS times, because the speed of a process also depends on where its memory lies. The reference runs
twice: a ratio is the median over the rounds of a contender's time to the mean of the two in the same round, with the
quartiles. How far the two differ is the noise.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Steps = Callable[[int], float]  # takes that many steps; returns the seconds they took
Batches = list[tuple[Tensor, Tensor]]
LIMIT_S = 300.0  # for a round of any contender
AGAIN = "again"  # the reference in a second process: the noise
STARTS = 3
WARM_UP = 60  # steps: with the first log line of the harness


@dataclass(frozen=True)
class Case:
    """``contenders`` {name: makes its steps, in a process of its own}; the first is the reference of the others."""

    name: str
    contenders: dict[str, Callable[[], Steps]]
    goals: dict[str, tuple[str, Callable[[Result], bool]]]  # {contender: (in words, whether it is reached)}
    num_steps: int  # per round
    world: int = 1


@dataclass(frozen=True)
class Result:
    """``times``: {contender: microseconds per step of the slowest rank, by round}."""

    case: Case
    times: dict[str, list[float]]

    @property
    def reference(self) -> list[float]:
        pairs = zip(self.times[next(iter(self.times))], self.times[AGAIN], strict=True)
        return [statistics.mean(pair) for pair in pairs]

    def ratios(self, name: str) -> list[float]:
        return [mine / other for mine, other in zip(self.times[name], self.reference, strict=True)]

    def ratio(self, name: str) -> float:
        return statistics.median(self.ratios(name))

    def overhead(self, name: str) -> float:
        """Microseconds per step more than the reference."""
        return statistics.median(mine - other for mine, other in zip(self.times[name], self.reference, strict=True))

    def rows(self) -> Iterator[list[str]]:
        for name, times in self.times.items():
            goal, reached = self.case.goals.get(name, ("", lambda _: True))
            low, _, high = statistics.quantiles(self.ratios(name), n=4)
            yield [
                self.case.name, name, f"{statistics.median(times):.0f}", f"{self.overhead(name):+.0f}",
                f"{self.ratio(name):.3f}", f"{low:.3f} to {high:.3f}", goal,
                ("yes" if reached(self) else "no") if goal else "",
            ]  # fmt: skip


def measure(case: Case, rounds: int, starts: int = STARTS) -> Result:
    """Let the contenders of ``case`` take turns, in another order each round. Nothing is left running."""
    first = next(iter(case.contenders))
    makers = {first: case.contenders[first], AGAIN: case.contenders[first], **case.contenders}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(starts):
        teams = {name: Team(make, case.world) for name, make in makers.items()}
        try:
            for team in teams.values():
                team.steps(max(case.num_steps, WARM_UP))
            order = list(teams)
            for index in range(-(-rounds // starts)):
                start = index % len(order)
                for name in order[start:] + order[:start]:
                    times[name].append(teams[name].steps(case.num_steps) / case.num_steps * 1e6)
        finally:
            for team in teams.values():
                team.stop()
    return Result(case, times)


class Team:
    """The ranks of one contender, each a process that waits for the next number of steps."""

    def __init__(self, make: Callable[[], Steps], world: int) -> None:
        port = free_port()
        context = multiprocessing.get_context("spawn")
        self.members = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_member, args=(make, rank, world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, mine))

    def steps(self, count: int) -> float:
        """Take ``count`` steps; return the seconds of the slowest rank."""
        for _, pipe in self.members:
            pipe.send(count)
        seconds = []
        for _, pipe in self.members:
            if not pipe.poll(LIMIT_S):
                raise TimeoutError(f"a contender took more than {LIMIT_S:.0f} s for {count} steps")
            seconds.append(pipe.recv())
        return max(seconds)

    def stop(self) -> None:
        for process, _ in self.members:
            process.kill()
            process.join()


def _member(make: Callable[[], Steps], rank: int, world: int, port: int, pipe: Any) -> None:
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = make()
    while True:
        pipe.send(steps(pipe.recv()))


def free_port() -> int:
    """A free TCP port below 32768, where Linux begins to give ports to outgoing connections."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("", port))
            return port
    raise RuntimeError("100 ports from 20000 to 32767 were tried, and all are in use")


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def settle() -> None:
    """Wait until the GPU, if this process uses one, has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(step: Callable[[Tensor, Tensor], None], batches: Batches) -> Steps:
    """Steps over ``batches``, again and again."""

    def steps(count: int) -> float:
        start = time.perf_counter()
        for inputs, targets in itertools.islice(itertools.cycle(batches), count):
            step(inputs, targets)
        settle()
        return time.perf_counter() - start

    return steps
