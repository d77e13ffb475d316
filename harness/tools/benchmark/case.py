"""The measurement of one benchmark case on one rank: the harness's own training step on one batch, timed.

``harness.tools.benchmark.strategies`` starts this module as a process for each rank. Reading data is not measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config import loader
from harness.data.loader import MicroBatch
from harness.distributed import devices
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.stop import Stop
from harness.runs.run_dir import RunFolder
from harness.training import build, memory, precision
from harness.training.evaluate import prepare
from harness.training.loop import step
from harness.training.run import Run

Value = TypeVar("Value")
Communication = Literal["none", "real", "fake"]
"""none: processes that do not communicate, side by side · real: ranks of one process group · fake: each process runs as
a rank of a process group whose communication is left out."""
WARM_UP = 3  # steps
_TIMEOUT_S = 300.0


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


def command(part: Part) -> list[str]:
    """The command that measures ``part``."""
    return [sys.executable, "-m", "harness.tools.benchmark.case", json.dumps(asdict(part))]


def result_path(part: Part) -> Path:
    return Path(part.folder) / f"result-{part.rank}.json"


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    if "" not in sys.path:
        sys.path.append("")  # the user's own models and tasks
    result_path(part).write_text(json.dumps(measure(part)))


if __name__ == "__main__":
    main()
