"""Measures how long a checkpoint of a large model stops the training.

    python -m benchmarks.large_model [--saves 9]

Everything runs in one process on the CPU. Checkpoints go through the harness's own ``build``, ``step`` and ``save``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torchvision.io import write_png

from benchmarks import machine, steps
from harness.config import loader
from harness.config.schema import Config
from harness.distributed.runtime import Runtime
from harness.training import loop
from harness.training.checkpoints import checkpointing
from harness.training.run import Run

_SIZE = 32  # pixels per side of an image
_ROWS = 64


def config(folder: Path, *overrides: str) -> Config:
    lines = ["path,label"]
    for row in range(_ROWS):
        path = folder / f"{row}.png"
        if not path.exists():
            write_png(torch.randint(0, 255, (3, _SIZE, _SIZE), dtype=torch.uint8), str(path))
        lines.append(f"{path.name},{row % 4}")
    for split in ("train", "eval"):
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"""
name: run
output: {folder}/runs
task: {{name: image_csv, train_csv: {folder}/train.csv, eval_csv: {folder}/eval.csv, root: {folder}}}
model: {{name: vit_b_16, args: {{image_size: {_SIZE}}}}}
data: {{num_workers: 0, cache_dir: {folder}/cache}}
optimizer: {{name: adamw, lr: 0.0001}}
precision: {{opt_level: O0}}
runtime: {{device: cpu}}
"""
    )
    return loader.load(str(folder / "config.yaml"), overrides)


def take_step(run: Run) -> float:
    group = next(run.train_data.groups(run.state.epoch, run.state.segments))
    start = time.perf_counter()
    loop.step(run, group)
    return time.perf_counter() - start


def checkpoint_stall(num_saves: int) -> str:
    """Saves of a vision transformer with AdamW: all in memory, and at once or behind the training."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for behind in (False, True):
            given = config(Path(name), "batch.global=2", f"checkpoint.async_save={str(behind).lower()}")
            with steps.opened(given, Path(name) / f"run-{behind}", Runtime()) as run:
                times = [take_step(run) for _ in range(3)][1:]
                stalls, busy = [], []
                for _ in range(num_saves):
                    take_step(run)
                    start = time.perf_counter()
                    checkpointing.save(run)
                    stalls.append(time.perf_counter() - start)
                    while behind and run.writer.is_writing:
                        busy.append(take_step(run))
                run.writer.wait()
                count = sum(param.numel() for param in run.module.parameters())
            size = (run.checkpoints.newest() or Path()) / "state.pt"
            rows.append([behind, stalls, statistics.median(times), busy, size.stat().st_size])
    sync, behind_row = rows
    usual = [statistics.median(row[1][1:]) for row in rows]
    table = machine.table(
        ["checkpoint", "first save, s", "later saves, s", "step, s", "step during the write, s"],
        [[("async_save" if row[0] else "synchronous"), f"{row[1][0]:.2f}", f"{later:.2f}", f"{row[2]:.2f}",
          f"{statistics.median(row[3]):.2f}" if row[3] else "-"] for row, later in zip(rows, usual, strict=True)],
    )  # fmt: skip
    share = usual[1] / usual[0]
    measured = "stall of later saves with async_save, relative to synchronous ones"
    reached = "yes" if share <= 0.05 else "no"
    goal = machine.table(
        ["measured", "found", "goal", "reached"], [[measured, f"{share:.3f}", "at most 0.05", reached]]
    )
    return (
        f"## The stall of a checkpoint\n\n{count / 1e6:.0f} million parameters with AdamW, a checkpoint of "
        f"{sync[4] / 2**30:.2f} GiB. The time of a save is how long the training loop waits. "
        f"Later saves: the median of {num_saves - 1}; the first save also allocates memory for the copy.\n\n"
        f"{table}\n\n{goal}\n\n"
        f"With `checkpoint.async_save`, the loop waits for {share:.1%} of the time of a synchronous save "
        f"({behind_row[1][0] / usual[0]:.0%} the first time), for the copy and for the check that all weights are "
        "finite."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_model", description=__doc__)
    parser.add_argument("--saves", type=int, default=9)
    arguments = parser.parse_args()
    machine.write("large_model", "Checkpoints of a large model", checkpoint_stall(arguments.saves))


if __name__ == "__main__":
    main()
