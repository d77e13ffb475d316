"""One rank of one benchmark case, as a process of its own: the harness's own step on one batch, timed.

Started by ``harness.benchmark.strategies``; writes its figures as JSON and ends. Reading data is left out: a batch is read once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from harness.training import build
from harness.training.evaluate import prepare
from harness.training.fsdp import local
from harness.training.loop import step
from harness.training.run import Run

Value = TypeVar("Value")
WARM_UP = 3  # steps
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Part:
    """What one process of a case is told. ``messages``: ``none``: it trains alone, whatever runs beside it; ``real``:
    the ranks are one gang; ``mute``: each believes so, and messages end where they start."""

    config: str
    overrides: list[str]
    messages: Literal["none", "real", "mute"]
    rank: int
    num_processes: int
    ports: tuple[int, int]  # of the gang, and of the meeting before the clock starts
    steps: int
    threads: int
    folder: str


@dataclass
class Mute(Runtime):
    """A rank of a gang whose messages are left out: what peers would say is what it says itself."""

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
    launch = Launch(part.rank, part.rank, count, count, "127.0.0.1", part.ports[0], "harness bench")
    if part.messages == "real":
        with open_runtime(launch, device, _TIMEOUT_S) as runtime:
            yield runtime
        return
    target = devices.choose(device, launch.local_rank, launch.local_world_size)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if part.messages == "none":
        yield Runtime(Launch(), target)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=part.rank, world_size=count)  # type: ignore[no-untyped-call]
    try:
        yield Mute(launch, target)
    finally:
        dist.destroy_process_group()


class Meeting:
    """Where the processes of a case wait for each other, beside whatever they measure."""

    def __init__(self, part: Part) -> None:
        self.count, self.keeps_store = part.num_processes, part.rank == 0
        timeout = timedelta(seconds=_TIMEOUT_S)
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", part.ports[1], self.count, self.keeps_store, timeout
        )

    def arrived(self, point: str) -> int:
        return self.store.add(point, 1)

    def all_at(self, point: str) -> bool:
        return self.store.add(point, 0) >= self.count

    def leave(self) -> None:
        """The last word; the process that keeps the store hears everybody's before it ends."""
        self.arrived("gone")
        while self.keeps_store and not self.all_at("gone"):
            time.sleep(0.002)

    def wait(self, point: str) -> None:
        self.arrived(point)
        while not self.all_at(point):
            time.sleep(0.002)


def _timed(name: str, work: Callable[[], None], part: Part, meeting: Meeting, device: torch.device) -> list[float]:
    """Seconds of ``part.steps`` calls of ``work``, while every process of the case is at it.

    A gang takes the same number of steps by itself; processes that do not talk go on until all have their figures.
    """

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        once()
    meeting.wait(f"{name}: ready")
    times = [once() for _ in range(part.steps)]
    meeting.arrived(f"{name}: done")
    while part.messages != "real" and not meeting.all_at(f"{name}: done"):
        once()
    meeting.wait(f"{name}: left")
    return times


def measure(part: Part) -> dict[str, Any]:
    """The figures of this process."""
    torch.set_num_threads(part.threads)
    torch.set_flush_denormal(True)  # muted messages leave odd numbers, which must not be slow ones
    meeting = Meeting(part)
    config = loader.load(part.config, part.overrides)
    with _runtime(part, config.runtime.device) as runtime:
        device = runtime.device
        folder = RunFolder(Path(part.folder) / f"run-{part.rank}")
        folder.checkpoints.folder.mkdir(parents=True)
        before = _start_of_memory(device)
        run = build.build(config, runtime, folder, Stop(runtime))
        try:
            group = next(run.train_data.groups(0, []))
            run.parallel.model.train()
            train = _timed("train", lambda: step(run, group), part, meeting, device)
            peak = _peak_of_memory(device) - before
            held = _held_bytes(run)
            run.module.eval()
            forward = _timed("forward", lambda: _forward(run, group), part, meeting, device)
        finally:
            run.close()
        meeting.leave()
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
    """The time that a tenth of the steps stay under: of a step that nothing else on the machine got in the way of."""
    return statistics.quantiles(times, n=10, method="inclusive")[0] if len(times) > 1 else times[0]


@torch.no_grad()
def _forward(run: Run, group: list[MicroBatch]) -> None:
    for micro in group:
        run.parallel.evaluated(prepare(run, micro.batch.inputs))


def _held_bytes(run: Run) -> int:
    """Weights, gradients and optimizer state of this rank."""
    weights = {id(param): local(param.detach()) for param in run.module.parameters()}
    stepped = {id(p): local(p.detach()) for group in run.optimizer.param_groups for p in group["params"]}
    state = [local(v) for entry in run.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in [*(weights | stepped).values(), *stepped.values(), *state])


def _start_of_memory(device: torch.device) -> int:
    """Start counting peak memory anew; return what is in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0  # the peak is then that of the whole process
    return _status("VmRSS")


def _peak_of_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status; 0 on systems without."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def command(part: Part) -> list[str]:
    """What starts a process that measures ``part``."""
    return [sys.executable, "-m", "harness.benchmark.case", json.dumps(asdict(part))]


def result_path(part: Part) -> Path:
    return Path(part.folder) / f"result-{part.rank}.json"


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    if "" not in sys.path:
        sys.path.append("")  # the user's own models and tasks
    result_path(part).write_text(json.dumps(measure(part)))


if __name__ == "__main__":
    main()
