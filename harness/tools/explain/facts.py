"""The facts about a run's time in its record: seconds by phase, its loaders, its slowest rank, its machine."""

from __future__ import annotations

import functools
import math
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.duration import Duration, Unit
from harness.config.trees import flatten
from harness.errors import ConfigError
from harness.runs import hints, layout, reader
from harness.runs.metrics_table import PHASES

_WARM_UP = 4  # log lines, from which on the first is left out: it holds the start of the loaders and of libraries
_SINCE = 5  # log lines, and an eighth of all, that a rank must be slow for
_LAYERS, _REPEATS = 20, 30  # of a measurement
_BLOCK, _BLOCKS = bytes(1 << 20), 128
Line = dict[str, Any]


# Measurements on this machine, each a fraction of a second, for facts that a run's record lacks


@functools.cache
def measure(name: str) -> float:
    return {"launch_s": _launch_s, "loopback": _loopback}[name]()


def _launch_s() -> float:
    """Return the seconds of the host per layer of a model in its forward and backward pass and update, of layers that
    are too small to take time themselves. Median of _REPEATS."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*(part for _ in range(_LAYERS) for part in (nn.Linear(4, 4), nn.ReLU())))
    optimizer, inputs, times = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.zeros(2, 4), []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (2 * _LAYERS)


def _loopback() -> float:
    """Return the bytes per second through a socket of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()

        def receive() -> None:
            buffer = bytearray(1 << 20)
            while receiver.recv_into(buffer):
                pass

        with receiver:
            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            start = time.perf_counter()
            for _ in range(_BLOCKS):
                sender.sendall(_BLOCK)
            sender.shutdown(socket.SHUT_WR)
            thread.join(10.0)
            return len(_BLOCK) * _BLOCKS / (time.perf_counter() - start)


# The facts


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for."""

    rank: int
    share: float
    """The part of the training time by which its own exceeds that of the others, since ``step``. It is the median of
    the log lines, so that a hiccup does not count."""
    step: int | None
    """None: from the start."""
    by_data: float
    """The part of its delay in which it waited for data."""


@dataclass(frozen=True)
class RunFacts:
    """What a run's time was spent on, as its record and its machine tell."""

    path: Path
    total_s: float
    """The time with evaluations and checkpoints."""
    train_s: float
    steps: int
    epochs: int
    evaluations: int
    eval_data_s: float
    eval_row_s: float
    """Seconds per validation row."""
    rows: int
    spent: dict[str, float]
    """Seconds of a rank, on average, by phase, and in evaluation, checkpoints and log lines."""
    load: dict[str, float]
    """Seconds of loading by stage, of a rank."""
    slow_rank: SlowRank | None
    waited_s: float
    """Waiting for the slowest rank, on average."""
    late_data_s: float
    """Waiting for data, on average, that only the slowest rank does."""
    own: float
    """Busy cores per machine, of this run."""
    others: float
    """Busy cores per machine, of other programs."""
    starved: float
    """The share of the time that the training thread was ready but had no core."""
    threads_starved: float
    """The number of a rank's threads in this state."""
    tracker_s: float
    world: int
    local_ranks: int
    cores: int
    threads: int
    layers: int
    gradient_bytes: int
    settings: dict[str, Any]
    measure: Callable[[str], float] = field(repr=False, default=measure)

    def share(self, *names: str) -> float:
        return sum(self.spent[name] for name in names) / self.total_s

    def setting(self, key: str, default: Any = None) -> Any:
        value = self.settings.get(key)
        return default if value is None else value

    def steps_of(self, key: str, default: Any, bare: Unit) -> int:
        """Return a length of the configuration in steps. ``bare``: the unit of a number without one."""
        return Duration.parse(self.setting(key, default), bare).steps(round(self.steps / max(1, self.epochs)))

    @property
    def workers(self) -> int:
        return int(self.setting("data.num_workers", 2))

    @property
    def step_s(self) -> float:
        """Seconds of a step without waiting for data."""
        return (self.train_s - self.spent["data"]) / self.steps

    @property
    def rows_per_pass(self) -> float:
        """Rows of a micro-batch on a rank."""
        return self.rows / self.steps / self.world / int(self.setting("batch.accumulate", 1))

    @property
    def exchange_s(self) -> float:
        """Seconds of a step in which gradients are exchanged, without waiting for a slow rank."""
        return max(0.0, self.spent["reduce"] - self.waited_s) / self.steps

    @property
    def exchanged_bytes(self) -> float:
        """Bytes that a rank sends per step in a ring all-reduce."""
        return 2 * (self.world - 1) / self.world * self.gradient_bytes


def read(path: Path) -> RunFacts:
    """Return the facts of the run folder ``path``. Raises ConfigError if it is no run or has too few log lines."""
    record = reader.read(path)
    if record.state == "unreadable":
        problem = "this is not a run folder" if path.exists() else "there is no such folder"
        raise ConfigError(problem, where=str(path), hint=hints.run_hint(path))
    lines = [line for line in record.metrics().to_pylist() if line.get("cost")]
    train = list(_with_time(line for line in lines if line["split"] == "train"))
    if not train or not sum(line["window_s"] for line in train):
        raise record.lacking(
            "training line with the time of each phase",
            "wait for the first log line (train.log_every steps); runs by older versions lack these times",
        )  # fmt: skip
    start = record.provenance[-1] if record.provenance else {}
    return _facts(path, train, [line for line in lines if line["split"] == "eval"], record, start)


def _with_time(lines: Iterable[Line]) -> Iterable[Line]:
    """Yield ``lines`` with their rows, steps and seconds since the line before."""
    samples = step = 0
    for line in lines:
        rows, steps = line["samples"] - samples, line["step"] - step
        samples, step = line["samples"], line["step"]
        speed = line.get("samples_per_s")
        yield {**line, "rows": rows, "steps": steps, "window_s": rows / speed if speed else 0.0}


def _facts(path: Path, train: list[Line], evals: list[Line], record: reader.Record, start: Line) -> RunFacts:
    """Return the facts of the log lines ``train`` and ``evals``, and of the record of the newest ``start``."""
    world = record.world_size or 1
    begin = train[0]["wall_s"] - train[0]["window_s"]
    if len(train) >= _WARM_UP:
        begin, train = train[0]["wall_s"], train[1:]
        evals = [line for line in evals if line["wall_s"] > begin]
    settings = flatten(record.config)
    end = max([train[-1]["wall_s"], *(line["wall_s"] for line in evals)])
    if record.state == "finished":
        end = max(end, float(record.summary.get("wall_s") or 0.0))
    train_s = sum(line["window_s"] for line in train)
    cost = _summed(train)
    evaluation_s = sum(line["cost"].get("evaluation") or 0.0 for line in evals)
    spent = {phase: sum((line.get(f"time_{phase}") or 0.0) * line["window_s"] for line in train) for phase in PHASES}
    parts = {name: min(cost[name] / world, spent["host"]) for name in ("checkpoint", "log")}
    spent["host"] = max(0.0, spent["host"] - sum(parts.values()))
    total_s = max(end - begin, train_s + evaluation_s)
    # What is neither training nor evaluation is saving, at the end of an epoch.
    spent |= parts | {"evaluation": evaluation_s, "between": total_s - train_s - evaluation_s}
    hosts = Counter(rank["host"] for rank in reader.ranks(start)) or {"": world}
    own_s = cost["own"] + (cost["cpu"] if settings.get("data.num_workers", 2) else 0.0)
    machine_s = cost["sampled"] or math.inf
    model = reader.section(start, "model")
    return RunFacts(
        path=path, total_s=total_s, train_s=train_s, spent=spent, world=world, settings=settings,
        steps=max(1, sum(line["steps"] for line in train)), rows=sum(line["rows"] for line in train),
        epochs=1 + train[-1]["epoch"] - train[0]["epoch"], evaluations=len(evals),
        eval_data_s=sum(line["cost"].get("data") or 0.0 for line in evals),
        eval_row_s=evaluation_s / max(1, sum(line.get("rows_used") or 0 for line in evals)),
        load={name: cost[name] / world for name in ("read", "decode", "transform", "load", "cpu", "load_starved")},
        slow_rank=_slow_rank(train, world), waited_s=cost["wait"] / world,
        late_data_s=max(0.0, cost["slowest_data"]) / world, own=own_s / machine_s,
        others=max(0.0, cost["busy"] - own_s) / machine_s,
        starved=cost["starved"] / (cost["sampled_ranks"] or math.inf),
        threads_starved=cost["threads_starved"] / (cost["sampled_ranks"] or math.inf),
        tracker_s=cost["tracker"], local_ranks=max(hosts.values()), cores=start.get("cores") or 1,
        threads=start.get("threads") or 1, layers=model.get("layers") or 0,
        gradient_bytes=model.get("gradient_bytes") or 0,
    )  # fmt: skip


def _summed(lines: Iterable[Line]) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in lines:
        total.update({name: value for name, value in line["cost"].items() if value})
    return total


def _slow_rank(train: list[Line], world: int) -> SlowRank | None:
    """Return the rank that costs the others most, and since when: the lines from there on exceed half of its usual
    lead."""
    if world == 1:
        return None
    leads = [(line["cost"].get("slowest"), (line["cost"].get("wait") or 0.0) / (world - 1)) for line in train]
    rank = max(range(world), key=lambda rank: sum(lead for slowest, lead in leads if slowest == rank))
    signed = [lead if slowest == rank else -lead for slowest, lead in leads]
    shares = [lead / line["window_s"] if line["window_s"] else 0.0 for lead, line in zip(signed, train, strict=True)]
    half = sorted(shares)[len(shares) * 3 // 4] / 2
    later = [sum(share - half for share in shares[first:]) for first in range(len(shares))]
    later = later[: max(1, len(later) - max(_SINCE, len(later) // 8) + 1)]
    first = later.index(max(later))
    if first and statistics.median(shares[:first]) > statistics.median(shares[first:]) / 3:
        first = 0  # it was slow before, too, though less so
    lines, lead = train[first:], sum(signed[first:])
    by_data = sum(line["cost"].get("slowest_data") or 0.0 for line in lines if line["cost"].get("slowest") == rank)
    step = lines[0]["step"] - lines[0]["steps"] if first else None
    return SlowRank(rank, max(0.0, statistics.median(shares[first:])), step, by_data / lead if lead > 0 else 0.0)


def checkpoint_bytes(path: Path) -> int:
    """Return the size of the newest checkpoint; 0 if there is none."""
    sizes = [sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
             for folder in path.joinpath(layout.CHECKPOINTS).glob("*") if folder.is_dir()]  # fmt: skip
    return max(sizes, default=0)
