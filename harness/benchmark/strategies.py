"""``harness bench strategies``: the same model and batch under every strategy, each case in fresh processes.

Here: which cases there are, and running them. What a process measures is in ``harness.benchmark.case``; what is made of
the figures in ``harness.benchmark.report``.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.benchmark import case as bench_case
from harness.benchmark import report
from harness.benchmark.report import Figures
from harness.config import loader
from harness.config.schema import Config
from harness.errors import ConfigError, HarnessError

log = logging.getLogger("harness")

STRATEGIES = {
    "ddp delayed": ["parallel.strategy=ddp", "parallel.delay_allreduce=true"],
    "ddp overlapped": ["parallel.strategy=ddp", "parallel.delay_allreduce=false"],
    "fsdp": ["parallel.strategy=fsdp"],
}
ALONE = ["parallel.strategy=none"]
_CASE_S = 900.0  # until a case is given up


@dataclass(frozen=True)
class Case:
    """``rows`` of a step in each of ``num_processes``; see ``bench_case.Part`` for ``messages``."""

    name: str
    settings: tuple[str, ...]
    num_processes: int
    rows: int
    messages: Literal["none", "real", "mute"]


def strategies(
    path: str, overrides: Sequence[str], worlds: Sequence[int], steps: int, rounds: int, threads: int, out: Path
) -> list[Path]:
    """Measure and write ``strategies.md``, ``.json`` and (with matplotlib) ``.png`` into ``out``; return their paths.

    Rounds over all cases in turn, so that a machine that slows down slows all of them. Raises ConfigError for what
    cannot be run at all; a strategy that does not fit the configuration is left out, and the page says why.
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
                "round %d of %d: %-16s x%d, %d rows, %s messages: %7.2f ms a step, %6.2f ms forward (%.0f s)",
                number + 1, rounds, case.name, case.num_processes, case.rows, case.messages,
                figures["train_s"] * 1e3, figures["forward_s"] * 1e3, time.perf_counter() - start,
            )  # fmt: skip
    bench = report.Bench(
        config=config.name, model=config.model.name, level=config.precision.opt_level, steps=steps, threads=threads,
        cases=[
            {"name": case.name, "processes": case.num_processes, "rows": case.rows, "messages": case.messages,
             "rounds": rounds_of}
            for case, rounds_of in measured.items()
        ],
        left_out=left_out,
    )  # fmt: skip
    return report.write(bench, out)


def plan(
    path: str, overrides: Sequence[str], config: Config, worlds: Sequence[int]
) -> tuple[list[Case], dict[str, str]]:
    """(cases, {what is left out: why}). With ``batch.global`` the ranks share its rows; else each brings its own."""
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
            f"one process alone cannot run this, and all else is compared with it: {left_out['none']}", where=path
        )
    for world in worlds:
        if world == 1:
            continue
        if batch.global_ is not None and batch.global_ % (world * batch.accumulate):
            left_out[f"{world} processes"] = f"batch.global={batch.global_} cannot be dealt to {world} ranks"
            continue
        if rows(world) != rows(single):
            cases.append(Case("none", tuple(ALONE), 1, rows(world), "none"))
        cases.append(Case("none", tuple(ALONE), world, rows(world), "none"))
        for name, settings in STRATEGIES.items():
            if why := _refused(path, overrides, settings):
                left_out[name] = why
                continue
            for messages in ("mute", "real"):
                cases.append(Case(name, tuple(settings), world, rows(world), messages))  # type: ignore[arg-type]
    return cases, left_out


def _refused(path: str, overrides: Sequence[str], settings: Sequence[str]) -> str:
    try:
        loader.load(path, [*overrides, *settings])
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def run(case: Case, path: str, overrides: Sequence[str], steps: int, threads: int) -> Figures:
    """The figures of ``case``: those of its slowest, and largest, process. Raises HarnessError with what it said."""
    with tempfile.TemporaryDirectory(prefix="harness-bench-") as folder, ExitStack() as stack:
        ports = _free_ports()
        parts = [
            bench_case.Part(
                config=path,
                overrides=[
                    *overrides, *case.settings, "batch.global=null", f"batch.per_rank={case.rows}", "trackers=[]",
                    "data.num_workers=0", "checkpoint.resume=never", "train.max_steps=null", "train.patience=null",
                ],
                messages=case.messages, rank=rank, num_processes=case.num_processes, ports=ports, steps=steps,
                threads=threads, folder=folder,
            )
            for rank in range(case.num_processes)
        ]  # fmt: skip
        processes = [stack.enter_context(_started(part)) for part in parts]
        _wait(case, processes, parts)
        results = [json.loads(bench_case.result_path(part).read_text()) for part in parts]
    largest = {key: max(result[key] for result in results) for key in ("train_s", "forward_s", "peak_bytes")}
    total = {"rows": sum(result["rows"] for result in results)}
    # of shards some are larger; the mean is what N ranks hold, a rank
    held = {"held_bytes": sum(result["held_bytes"] for result in results) / len(results)}
    return {**results[0], **largest, **total, **held}


class _started:
    """A process of a case; ended when the case is left, however it is left."""

    def __init__(self, part: bench_case.Part) -> None:
        self.errors = Path(part.folder) / f"errors-{part.rank}.txt"
        self._part = part

    def __enter__(self) -> subprocess.Popen[bytes]:
        with open(self.errors, "wb") as file:
            self._process = subprocess.Popen(bench_case.command(self._part), stdout=file, stderr=file)
        return self._process

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _free_ports() -> tuple[int, int]:
    """Two TCP ports of the loopback interface that were free a moment ago."""
    with socket.socket() as one, socket.socket() as other:
        for opened in (one, other):
            opened.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _wait(case: Case, processes: list[subprocess.Popen[bytes]], parts: list[bench_case.Part]) -> None:
    deadline = time.monotonic() + _CASE_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    for process, part in zip(processes, parts, strict=True):
        if process.poll() != 0 and (process.poll() is not None or time.monotonic() > deadline):
            said = list(_last_lines(Path(part.folder) / f"errors-{part.rank}.txt"))
            raise HarnessError(
                f"{case.name} on {case.num_processes} processes: process {part.rank} "
                + (f"ended with {process.poll()}" if process.poll() is not None else f"took over {_CASE_S:.0f} s"),
                hint="\n     ".join(said) or "it said nothing",
            )


def _last_lines(path: Path, count: int = 5) -> Iterator[str]:
    yield from path.read_text(errors="replace").strip().splitlines()[-count:]
