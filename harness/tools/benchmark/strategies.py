"""``harness bench strategies``: the same model and batch under every strategy, each case in fresh processes."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.config import loader
from harness.config.schema import Config
from harness.distributed import devices
from harness.distributed.launch_env import local_environment
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.errors import ConfigError, HarnessError, LaunchError, plural
from harness.tools.benchmark import case as bench_case
from harness.tools.benchmark import report
from harness.tools.benchmark.case import Communication
from harness.tools.benchmark.report import Figures

log = logging.getLogger("harness")

STRATEGIES = {
    "ddp delayed": ["parallel.strategy=ddp", "parallel.delay_allreduce=true"],
    "ddp overlapped": ["parallel.strategy=ddp", "parallel.delay_allreduce=false"],
    "fsdp": ["parallel.strategy=fsdp"],
}
ALONE = ["parallel.strategy=none"]
_CASE_S = 900.0  # time limit of a case
_POLL_S = 0.05


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
) -> list[Path]:
    """Measure all cases and write ``strategies.md`` and ``.json`` into ``out``; return their paths.

    Each round runs all cases in turn, so that a busy machine slows down all of them. Raises ConfigError if the
    configuration cannot run at all; the page lists the strategies that do not fit it.
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
    bench = report.Bench(
        config=config.name, model=config.model.name, level=config.precision.opt_level, steps=steps, threads=threads,
        cases=[
            {"name": case.name, "processes": case.num_processes, "rows": case.rows,
             "communication": case.communication, "rounds": rounds_of}
            for case, rounds_of in measured.items()
        ],
        left_out=left_out,
    )  # fmt: skip
    return report.write(bench, out)


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
            bench_case.Part(
                path, [*overrides, *fixed], case.communication, rank, case.num_processes, store.port, steps, threads,
                folder,
            )
            for rank in range(case.num_processes)
        ]  # fmt: skip
        _run_processes(case, parts)
        results = [json.loads(bench_case.result_path(part).read_text()) for part in parts]
    largest = {key: max(result[key] for result in results) for key in ("train_s", "forward_s", "peak_bytes")}
    rows = sum(result["rows"] for result in results)
    # Shards differ in size; the mean is the memory of all ranks, per rank.
    held = sum(result["held_bytes"] for result in results) / len(results)
    return {**results[0], **largest, "rows": rows, "held_bytes": held}


def _run_processes(case: Case, parts: Sequence[bench_case.Part]) -> None:
    outputs = [Path(part.folder) / f"output-{part.rank}.txt" for part in parts]
    workers = {
        part.rank: Worker(
            bench_case.command(part),
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
