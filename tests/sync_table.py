"""Counts how often the host waits for the device in each part of a run, on the GPU of ``tests/syncs.py``.

python -m tests.sync_table    # writes benchmarks/results/waits.md; tests/training/test_loop.py compares it
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.apex import amp
from harness.config import loader
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.training import build, counting, loop
from harness.training.checkpoints import checkpointing
from harness.training.evaluation.evaluate import evaluate
from harness.training.optimizer.ema import Ema
from harness.training.run import Run
from harness.training.run_start import run_folder
from tests.fixtures import make_config, settings, write_rows, write_yaml
from tests.ranks import run_ranks
from tests.syncs import ROOT, Gpu, Sync, fake_gpu

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
OF_FSDP = ["O0", "O1", "O4"]  # the levels that keep the weights in float32
STRATEGIES = {"none": 1, "ddp": 2, "fsdp": 2}  # and the number of ranks
OPTIONS = {"`train.clip_norm`": {"clip_norm": 1.0}, "`train.on_nan: skip`": {"on_nan": "skip"}}  # of a step
PAGE = ROOT / "benchmarks" / "results" / "waits.md"
BEGIN, END = "<!-- written by python -m tests.sync_table -->", "<!-- end of the table -->"


def runtime(strategy: str) -> Runtime:
    if STRATEGIES[strategy] == 1:
        return Runtime(device=torch.device("cuda:0"))
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), local_world_size=dist.get_world_size())
    return Runtime(launch, torch.device("cuda:0"), timeout_s=60, group=dist.new_group(backend="gloo"))


def counted(folder: Path, strategy: str, level: str) -> dict[str, list[Sync]]:
    """The waits of this rank in each part of a run; called on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    overrides = [f"parallel.strategy={strategy}", f"precision.opt_level={level}", "runtime.device=cuda"]
    if strategy == "fsdp":  # the shapes of a fused update of DTensors would be computed by CUDA
        overrides.append("optimizer.args={foreach: true}")
    tree = settings(folder, model={"name": "small_cnn", "args": {"width": 4}}, name=f"{strategy}-{level}-{rank}",
                    train={"epochs": 2, "log_every": 1, "deterministic": False})  # fmt: skip
    config = loader.load(write_yaml(folder / f"rank-{rank}.yaml", tree), overrides)
    with fake_gpu() as gpu:
        of_rank = runtime(strategy)
        folder = run_folder(config)
        folder.claim(config)
        run = build.build(config, of_rank, folder, Stop(of_rank))
        try:
            return dict(_parts(run, gpu))
        finally:
            run.close()
            amp.reset()


def _parts(run: Run, gpu: Gpu) -> Iterator[tuple[str, list[Sync]]]:
    """What fills a cache at its first use comes before it is counted."""
    groups = iter(run.train_data.groups(0, []))

    def of(call: Any) -> list[Sync]:
        gpu.syncs.clear()
        call()
        return list(gpu.syncs)

    def step(**options: Any) -> list[Sync]:
        before = run.config
        run.config = before.model_copy(update={"train": before.train.model_copy(update=options)})
        waits = of(lambda: (loop.step(run, next(groups)), counting.catch_up(run)))
        run.config = before
        return waits

    step(), step(), counting.catch_up(run)
    yield "a step", step()
    for name, options in OPTIONS.items():
        yield f"a step with {name}", step(**options)
    params = list(run.precision.master_params(run.optimizer))
    trained = [param for group in run.optimizer.param_groups for param in group["params"]]
    run.ema = Ema(trained, params, 0.9)
    yield "a step with `train.ema_decay`", step()
    run.ema = None
    loop.step(run, next(groups), measured=True)
    yield "a log line", of(lambda: (counting.end_window(run), counting.catch_up(run)))
    evaluate(run)
    whole = of(lambda: evaluate(run))
    data, run.eval_data = run.eval_data, replace(run.eval_data, batch_size=run.eval_data.num_rows)
    fixed = of(lambda: evaluate(run))  # in one batch
    yield "a batch of an evaluation", whole[len(fixed) :] if data.num_turns() > 1 else whole
    yield "the end of an evaluation", fixed
    yield "a checkpoint", of(lambda: checkpointing.save(run))


def _on_rank(folder: str, strategy: str, levels: list[str]) -> list[dict[str, list[Sync]]]:
    return [counted(Path(folder), strategy, level) for level in levels]


def all_counts(folder: Path, strategy: str) -> dict[str, dict[str, list[Sync]]]:
    """{level: {part: waits of rank 0}}, for each level that the strategy has."""
    levels = OF_FSDP if strategy == "fsdp" else LEVELS
    write_rows(folder, "train", 96)
    write_rows(folder, "eval", 24)
    make_config(folder).task.open(0, folder / "cache")  # converts the tables once
    if STRATEGIES[strategy] == 1:
        found = _on_rank(str(folder), strategy, levels)
    else:
        found = run_ranks(STRATEGIES[strategy], _on_rank, str(folder), strategy, levels, timeout_s=280)[0]
    return dict(zip(levels, found, strict=True))


def rows(counts: dict[str, dict[str, list[Sync]]]) -> list[str]:
    """The lines of the table for a strategy, without its name."""
    parts = next(iter(counts.values()))
    cells = [[str(len(counts[level][part])) if level in counts else "" for level in LEVELS] for part in parts]
    return [f"{part} | {' | '.join(line)} |" for part, line in zip(parts, cells, strict=True)]


def written(strategy: str) -> list[str]:
    """The lines for a strategy in docs/, without its name."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    split = [line.removeprefix("| ").partition(" | ") for line in table.splitlines()]
    return [rest for names, _, rest in split if strategy in names.split(", ")]


def main() -> None:
    lines = ["", f"| strategy | part of a run | {' | '.join(LEVELS)} |", f"| --- | --- |{' --- |' * len(LEVELS)}"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            alike.setdefault(tuple(rows(all_counts(Path(folder), strategy))), []).append(strategy)
    for found, names in alike.items():
        lines += [f"| {', '.join(names)} | {row}" for row in found]
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join([BEGIN, *lines, END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
