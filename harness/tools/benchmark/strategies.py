"""``harness bench strategies``: the same model and batch under every strategy, each case in fresh processes.

A process for each rank runs this module too, and times the harness's own training step on one batch; reading data is
not measured. Every figure is a measurement or the difference of two. Of several rounds the fastest counts, because
other work on a machine only slows it down. The time of a step of a strategy on N processes consists of:

    ideal          a step of one process, divided: its time x rows per rank / its rows
    batch          one process alone with the rows of one rank, less the ideal: costs that do not shrink with the batch
    contention     N processes without communication, side by side, less one alone: shared cores, caches and memory
    overhead       the strategy without communication, less that: copies, hooks, work per bucket or block
    communication  the strategy, less that: communication, and waiting for the slowest rank
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.config import loader
from harness.config.schema import Config
from harness.data.loader import MicroBatch
from harness.distributed import devices
from harness.distributed.launch_env import Launch, local_environment
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.stop import Stop
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.errors import ConfigError, HarnessError, LaunchError, plural
from harness.runs.files import write_atomically
from harness.runs.run_dir import RunFolder
from harness.tools.report import formatting
from harness.training import build, memory, precision
from harness.training.evaluate import prepare
from harness.training.loop import step
from harness.training.run import Run

log = logging.getLogger("harness")

Figures = dict[str, Any]  # of one case in one round, see measure
PARTS = ("ideal", "batch", "contention", "overhead", "communication")
Value = TypeVar("Value")
Communication = Literal["none", "real", "fake"]
"""none: processes that do not communicate, side by side · real: ranks of one process group · fake: each process runs as
a rank of a process group whose communication is left out."""
WARM_UP = 3  # steps
_TIMEOUT_S = 300.0
STRATEGIES = {
    "ddp delayed": ["parallel.strategy=ddp", "parallel.delay_allreduce=true"],
    "ddp overlapped": ["parallel.strategy=ddp", "parallel.delay_allreduce=false"],
    "fsdp": ["parallel.strategy=fsdp"],
}
ALONE = ["parallel.strategy=none"]
_CASE_S = 900.0  # time limit of a case
_POLL_S = 0.05


# The plan, and its processes


@dataclass(frozen=True)
class Case:
    """``rows``: per step, in each of ``num_processes``."""

    name: str
    settings: tuple[str, ...]
    num_processes: int
    rows: int
    communication: Communication


def strategies(
    path: str, overrides: Sequence[str], worlds: Sequence[int], steps: int, rounds: int, threads: int, out: Path
) -> Bench:
    """Measure all cases and write ``strategies.json`` into ``out``.

    Each round runs all cases in turn, so that a busy machine slows down all of them. Raises ConfigError if the
    configuration cannot run at all; ``left_out`` names the strategies that do not fit it.
    """
    config = loader.load(path, overrides)
    cases, left_out = plan(path, overrides, config, sorted({1, *worlds}))
    measured: dict[Case, list[Figures]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            start = time.perf_counter()
            figures = run(case, path, overrides, steps, threads)
            measured[case].append(figures)
            log.info(
                "round %d of %d: %-16s x%d, rows %d, communication %s: %7.2f ms per step, %6.2f ms forward (%.0f s)",
                number + 1, rounds, case.name, case.num_processes, case.rows, case.communication,
                figures["train_s"] * 1e3, figures["forward_s"] * 1e3, time.perf_counter() - start,
            )  # fmt: skip
    bench = Bench(
        config=config.name, model=config.model.name, level=config.precision.opt_level, steps=steps, threads=threads,
        cases=[
            {"name": case.name, "processes": case.num_processes, "rows": case.rows,
             "communication": case.communication, "rounds": rounds_of}
            for case, rounds_of in measured.items()
        ],
        left_out=left_out,
    )  # fmt: skip
    write(bench, out)
    return bench


def plan(
    path: str, overrides: Sequence[str], config: Config, worlds: Sequence[int]
) -> tuple[list[Case], dict[str, str]]:
    """(cases, {what is left out: why}). Ranks share the rows of ``batch.global``; ``batch.per_rank`` is for each."""
    batch, cases, left_out = config.batch, [], {}

    def rows(world: int) -> int:
        return batch.per_rank or (batch.global_ or 0) // world

    single = worlds[0]
    for name, settings in (("none", ALONE), ("dp", ["parallel.strategy=dp"])):
        if why := _refused(path, overrides, settings):
            left_out[name] = why
        else:
            cases.append(Case(name, tuple(settings), 1, rows(single), "none"))
    if "none" in left_out:
        raise ConfigError(
            f"one process, the baseline of every comparison, cannot run this: {left_out['none']}", where=path
        )
    for world in worlds:
        if world == 1:
            continue
        if batch.global_ is not None and batch.global_ % (world * batch.accumulate):
            why = f"batch.global={batch.global_} cannot be divided evenly among {world} ranks"
            left_out[f"{world} processes"] = why
            continue
        try:
            devices.choose(config.runtime.device, world - 1, world)
        except LaunchError as error:
            left_out[f"{world} processes"] = error.message
            continue
        if rows(world) != rows(single):
            cases.append(Case("none", tuple(ALONE), 1, rows(world), "none"))
        cases.append(Case("none", tuple(ALONE), world, rows(world), "none"))
        for name, settings in STRATEGIES.items():
            if why := _refused(path, overrides, settings):
                left_out[name] = why
                continue
            cases.append(Case(name, tuple(settings), world, rows(world), "fake"))
            cases.append(Case(name, tuple(settings), world, rows(world), "real"))
    return cases, left_out


def _refused(path: str, overrides: Sequence[str], settings: Sequence[str]) -> str:
    """The error of the configuration with ``settings``; empty if there is none."""
    try:
        loader.load(path, [*overrides, *settings])
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def run(case: Case, path: str, overrides: Sequence[str], steps: int, threads: int) -> Figures:
    """The largest figures of the processes of ``case``. Raises HarnessError with the output of a failed process."""
    fixed = [
        *case.settings, "batch.global=null", f"batch.per_rank={case.rows}", "trackers=[]", "data.num_workers=0",
        "checkpoint.resume=never", "train.max_steps=null", "train.patience=null",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="harness-bench-") as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        parts = [
            Part(
                path, [*overrides, *fixed], case.communication, rank, case.num_processes, store.port, steps, threads,
                folder,
            )
            for rank in range(case.num_processes)
        ]  # fmt: skip
        _run_processes(case, parts)
        results = [json.loads(result_path(part).read_text()) for part in parts]
    largest = {key: max(result[key] for result in results) for key in ("train_s", "forward_s", "peak_bytes")}
    rows = sum(result["rows"] for result in results)
    # Shards differ in size; the mean is the memory of all ranks, per rank.
    held = sum(result["held_bytes"] for result in results) / len(results)
    return {**results[0], **largest, "rows": rows, "held_bytes": held}


def _run_processes(case: Case, parts: Sequence[Part]) -> None:
    outputs = [Path(part.folder) / f"output-{part.rank}.txt" for part in parts]
    workers = {
        part.rank: Worker(
            [sys.executable, "-m", "harness.tools.benchmark.strategies", json.dumps(asdict(part))],
            {**os.environ, **local_environment(part.rank, len(parts), part.store_port, "harness bench")},
            output=output,
        )
        for part, output in zip(parts, outputs, strict=True)
    }
    group = WorkerGroup(workers, 0.0, ends_with_parent=True)
    try:
        deadline = time.monotonic() + _CASE_S
        while not group.poll() and not any(group.exits.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    finally:
        exits = dict(group.exits)
        group.kill()
        group.wait()
    for rank, output in enumerate(outputs):
        if exits.get(rank) != 0 and (rank in exits or not any(exits.values())):
            reason = f"exit code {exits[rank]}" if rank in exits else f"it took more than {_CASE_S:.0f} s"
            raise HarnessError(
                f"{case.name} on {plural(case.num_processes, 'process')}: process {rank} failed ({reason})",
                hint="\n     ".join(output.read_text(errors="replace").strip().splitlines()[-5:])
                or "it printed nothing",
            )


# The measurement of one case, in a process for each rank


@dataclass(frozen=True)
class Part:
    """The part of a case that one process measures. ``store_port``: of the store that the parent process holds."""

    config: str
    overrides: list[str]
    communication: Communication
    rank: int
    num_processes: int
    store_port: int
    steps: int
    threads: int
    folder: str


@dataclass
class FakeRuntime(Runtime):
    """A rank without communication: every peer would contribute what this rank does."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Value) -> list[Value]:
        return [value] * self.world_size

    def from_first(self, value: Value) -> Value:
        return value

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        yield


@contextmanager
def _runtime(part: Part, device: str) -> Iterator[Runtime]:
    count = part.num_processes
    launch = Launch(
        part.rank, part.rank, count, count, "127.0.0.1", part.store_port, "harness bench", store_is_held=True
    )
    if part.communication == "real":
        with open_runtime(launch, device, _TIMEOUT_S) as runtime:
            yield runtime
        return
    target = devices.choose(device, launch.local_rank, launch.local_world_size)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if part.communication == "none":
        yield Runtime(Launch(), target)
        return
    # torch has no public process group without communication. Its own init_process_group("fake") imports this module;
    # older versions of torch need the import, which registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=part.rank, world_size=count)  # type: ignore[no-untyped-call]
    try:
        yield FakeRuntime(launch, target)
    finally:
        dist.destroy_process_group()


class Barriers:
    """Points at which the processes of a case wait for each other, independent of the communication they measure."""

    def __init__(self, part: Part) -> None:
        self._count = part.num_processes
        timeout = timedelta(seconds=_TIMEOUT_S)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", part.store_port, is_master=False, timeout=timeout
        )

    def arrive(self, point: str) -> None:
        self._store.add(point, 1)

    def complete(self, point: str) -> bool:
        return bool(self._store.add(point, 0) >= self._count)

    def wait(self, point: str) -> None:
        self.arrive(point)
        while not self.complete(point):
            time.sleep(0.002)


def _timed(name: str, work: Callable[[], None], part: Part, barriers: Barriers, device: torch.device) -> list[float]:
    """Seconds of ``part.steps`` calls of ``work``, while every process of the case runs it.

    Ranks that communicate take the same number of steps. Other processes continue until all have been measured.
    """

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        once()
    barriers.wait(f"{name}: ready")
    times = [once() for _ in range(part.steps)]
    barriers.arrive(f"{name}: done")
    while part.communication != "real" and not barriers.complete(f"{name}: done"):
        once()
    barriers.wait(f"{name}: left")
    return times


def measure(part: Part) -> dict[str, Any]:
    """The results of this process."""
    torch.set_num_threads(part.threads)
    torch.set_flush_denormal(True)  # without communication, gradients may become denormal, which would be slow
    barriers = Barriers(part)
    config = loader.load(part.config, part.overrides)
    with ExitStack() as stack:
        runtime = stack.enter_context(_runtime(part, config.runtime.device))
        device = runtime.device
        stack.enter_context(precision.float16_on_cpu(config.precision, device))
        folder = RunFolder(Path(part.folder) / f"run-{part.rank}")
        folder.checkpoints.folder.mkdir(parents=True)
        before = _start_of_memory(device)
        run = build.build(config, runtime, folder, Stop(runtime))
        try:
            group = next(run.train_data.groups(0, []))
            run.parallel.model.train()
            train = _timed("train", lambda: step(run, group), part, barriers, device)
            peak = _peak_of_memory(device) - before
            held = _held_bytes(run)
            run.module.eval()
            forward = _timed("forward", lambda: _forward(run, group), part, barriers, device)
        finally:
            run.close()
        return {
            "train_s": _undisturbed(train),
            "forward_s": _undisturbed(forward),
            "rows": sum(micro.num_rows for micro in group),
            "peak_bytes": peak,
            "held_bytes": held,
            "parallel": run.parallel.strategy,
            "skipped": run.state.skipped,
            "device": str(device),
        }


def _undisturbed(times: list[float]) -> float:
    """The time of the fastest tenth of the steps, which other work on the machine disturbed the least."""
    return statistics.quantiles(times, n=10, method="inclusive")[0] if len(times) > 1 else times[0]


@torch.no_grad()
def _forward(run: Run, group: list[MicroBatch]) -> None:
    for micro in group:
        run.parallel.evaluated(prepare(run, micro.batch.inputs))


def _held_bytes(run: Run) -> int:
    """Bytes of weights, gradients and optimizer state on this rank."""
    return sum(size for name, size in memory.held(run).items() if name != "moving average")


def _start_of_memory(device: torch.device) -> int:
    """Reset the peak memory counter and return the memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0  # the peak is then of the whole process
    return _status("VmRSS")


def _peak_of_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    """Bytes in a line of /proc/self/status; 0 on other systems."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def result_path(part: Part) -> Path:
    return Path(part.folder) / f"result-{part.rank}.json"


def measure_part() -> None:
    part = Part(**json.loads(sys.argv[1]))
    if "" not in sys.path:
        sys.path.append("")  # the user's own models and tasks
    result_path(part).write_text(json.dumps(measure(part)))


# The result


@dataclass(frozen=True)
class Bench:
    """``cases``: name, processes, rows (per process), communication, rounds (their figures)."""

    config: str
    model: str
    level: str
    steps: int
    threads: int
    cases: list[dict[str, Any]]
    left_out: dict[str, str]

    def find(self, name: str, processes: int, rows: int, communication: str) -> dict[str, Any]:
        wanted = {"name": name, "processes": processes, "rows": rows, "communication": communication}
        return next(case for case in self.cases if wanted.items() <= case.items())

    @property
    def single(self) -> dict[str, Any]:
        """One process with all rows: the baseline."""
        return self.cases[0]

    @property
    def distributed(self) -> list[dict[str, Any]]:
        """The strategies on several processes."""
        return [case for case in self.cases if case["communication"] == "real"]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The cases that a user chooses between."""
        rows = self.single["rows"]
        return [c for c in self.cases if c["communication"] == "real" or (c["processes"] == 1 and c["rows"] == rows)]


def best(case: dict[str, Any], key: str) -> float:
    """The smallest value of all rounds."""
    return float(min(figures[key] for figures in case["rounds"]))


def spread(case: dict[str, Any], key: str = "train_s") -> float:
    """The median round less the best: smaller differences are noise."""
    return float(statistics.median(figures[key] for figures in case["rounds"])) - best(case, key)


def speed(case: dict[str, Any], key: str) -> float:
    """Rows per second over all processes."""
    return best(case, "rows") / best(case, key)


def parts(bench: Bench, case: dict[str, Any], key: str = "train_s") -> dict[str, tuple[float, float]]:
    """{part of a step: (seconds, noise in seconds)}. The seconds add up to the step; noise can make a part negative."""
    rows, processes = case["rows"], case["processes"]
    share = rows / bench.single["rows"]
    cases = [
        bench.find("none", 1, rows, "none"),
        bench.find("none", processes, rows, "none"),
        bench.find(case["name"], processes, rows, "fake"),
        case,
    ]
    marks = [(best(bench.single, key) * share, spread(bench.single, key) * share)]
    marks += [(best(each, key), spread(each, key)) for each in cases]
    steps = zip(PARTS, [(0.0, 0.0), *marks[:-1]], marks, strict=True)
    return {name: (after[0] - before[0], after[1] + before[1]) for name, before, after in steps}


def write(bench: Bench, out: Path) -> Path:
    """Write the figures as ``strategies.json``; return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "strategies.json"
    write_atomically(path, json.dumps({"machine": machine(), **asdict(bench)}, indent=1) + "\n")
    return path


def text(bench: Bench) -> str:
    """The tables for the terminal, with the noise between rounds after ±."""
    lines = [
        f"{bench.config} ({bench.model}, {bench.level}) on {machine()}; {plural(bench.threads, 'thread')} per process",
        f"Times are the 10th percentile of {plural(bench.steps, 'step')}, on the slowest rank, in the best of "
        f"{plural(len(bench.single['rounds']), 'round')}; ± is the median round less the best.",
        *_warning(bench),
        "",
        *formatting.table(_summary(bench), right=range(1, 10)),
        "",
        "Memory is per rank, its peak without the interpreter and its libraries; state is weights, gradients and "
        "optimizer state. Inference is on the same rows, without gradients.",
    ]
    if bench.distributed:
        rows = formatting.table(_breakdown(bench), right=range(1, 9))
        lines += ["", "Where the time of a training step goes, in ms (docs/strategies.md):", *rows]
    lines += [f"left out: {name}: {why}" for name, why in bench.left_out.items()]
    return "\n".join(lines)


def _warning(bench: Bench) -> Iterator[str]:
    """A warning if the rounds of a case differ a lot, or if there is only one."""
    if len(bench.single["rounds"]) == 1:
        yield "One round only: the noise is unknown; use --rounds 3."
        return
    worst = max(bench.cases, key=lambda case: spread(case) / best(case, "train_s"))
    share = spread(worst) / best(worst, "train_s")
    if share > 0.1:
        yield (
            f"The machine was busy: the median round of {worst['name']} on {plural(worst['processes'], 'process')} "
            f"was {share:.0%} slower than its best. Smaller differences are not meaningful."
        )


def _summary(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", "rows", "ms per step", "rows/s", "speed-up", "peak MiB", "state MiB",
             "inference ms", "speed-up"]]  # fmt: skip
    for case in bench.shown:
        # For dp also the devices, because without a second one it trains on one device.
        name = case["rounds"][0]["parallel"] if case["name"] == "dp" else case["name"]
        gains = (speed(case, key) / speed(bench.single, key) for key in ("train_s", "forward_s"))
        train, forward = (f"{gain:.2f}" for gain in gains)
        rows.append(
            [name, str(case["processes"]), f"{best(case, 'rows'):.0f}",
             f"{best(case, 'train_s') * 1e3:.2f} ± {spread(case) * 1e3:.2f}", f"{speed(case, 'train_s'):.0f}", train,
             f"{best(case, 'peak_bytes') / 2**20:.0f}", f"{best(case, 'held_bytes') / 2**20:.1f}",
             f"{best(case, 'forward_s') * 1e3:.2f}", forward]
        )  # fmt: skip
    return rows


def _breakdown(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", *PARTS, "step"]]
    for case in bench.distributed:
        took = [f"{value * 1e3:.2f} ± {noise * 1e3:.2f}" for value, noise in parts(bench, case).values()]
        rows.append([case["name"], str(case["processes"]), *took, f"{best(case, 'train_s') * 1e3:.2f}"])
    return rows


def machine() -> str:
    """Processor, cores, versions; no host name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    cpu = names[0] if names else platform.processor() or platform.machine()
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([*cards, cpu, plural(os.cpu_count() or 1, "core"), f"torch {torch.__version__}"])


if __name__ == "__main__":
    measure_part()
