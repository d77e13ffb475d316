"""Draws docs/run.png from real runs: digits on two processes, once unbroken, once killed four times.

python -m docs.pictures      (needs matplotlib: pip install -e '.[dev]')

docs/example_report.html comes from ``harness report``, of a sweep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.turns import free_port
from harness.tools.data import digits

ROOT = Path(__file__).resolve().parents[1]
KILLS = ((1, 30), (0, 81), (1, 120), (0, 171))  # rank, first logged step at which it is killed
SETTINGS = (
    "task.transforms={train: [{RandomCrop: {size: 8, padding: 1}}]}", "model.args={width: 32, batch_norm: true}",
    "batch.global=64", "optimizer.lr=0.1", "schedule.warmup_epochs=1.0", "precision.opt_level=O1", "train.epochs=10",
    "train.log_every=3", "checkpoint.every=10", "data.num_workers=0",
)  # fmt: skip
INK, QUIET, BLUE, RED = "#1f2430", "#8a93a6", "#2f6fde", "#d1453b"


def read(folder: Path) -> list[dict]:
    """The lines of the run's metrics.jsonl; the last one may still be incomplete."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def run(folder: Path, data: Path, kill: tuple[int, int] | None = None) -> int:
    """Train in ``folder`` on two processes; with ``kill``, kill a rank at a step. Returns the last logged step."""
    own = (f"output={folder.parent}", f"name={folder.name}", f"task.root={data}", f"data.cache_dir={data}/cache")
    files = (f"task.train_csv={data}/train.csv", f"task.eval_csv={data}/eval.csv")
    command = [sys.executable, "driver.py", "-c", "configs/digits.yaml", *own, *files, *SETTINGS]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**os.environ, **common, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**environ, "RANK": number, "LOCAL_RANK": number}) for number in "01"
    ]
    try:
        if kill:
            while not any(line["split"] == "train" and line["step"] >= kill[1] for line in read(folder)):
                assert ranks[0].poll() is None, "the run ended before it was killed"
                time.sleep(0.01)
            ranks[kill[0]].kill()
        codes = [rank.wait(900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert kill or codes == [0, 0], codes
    return max(line["step"] for line in read(folder) if line["split"] == "train")


def train(folder: Path) -> tuple[list[dict], list[dict], list[tuple[int, int]], str]:
    """The logs of the unbroken and the killed run, (rank, step) of the kills, and the terminal of ``make train``."""
    data = folder / "digits"
    digits.write(data)
    unbroken, killed = folder / "unbroken", folder / "killed"
    run(unbroken, data)
    kills = [(rank, run(killed, data, (rank, step))) for rank, step in KILLS]
    run(killed, data)
    weights = [(path / "weights.safetensors").read_bytes() for path in (unbroken, killed)]
    assert weights[0] == weights[1], "the killed run has other weights"
    return read(unbroken), read(killed), kills, _terminal(folder)


def _terminal(folder: Path) -> str:
    """The output of the command of ``make train`` on the same data."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    (folder / "data").mkdir()
    (folder / "digits").rename(folder / "data" / "digits")
    config = str(ROOT / "configs" / "digits.yaml")
    command = [sys.executable, "-m", "harness", "launch", "-c", config, "--nproc", "2"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "  step " not in line]
    epochs = [index for index, line in enumerate(lines) if line.startswith("epoch ")]
    shown = lines[: epochs[4]] + ["…"] + lines[epochs[-2] :]
    return "\n".join(["$ make train", *shown])


def draw_run(record: list[dict], killed: list[dict], kills: list[tuple[int, int]], terminal: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (text, axes) = pyplot.subplots(1, 2, figsize=(17, 5.2), width_ratios=(1.25, 1), facecolor="white")
    text.set_axis_off()
    text.add_patch(pyplot.Rectangle((0, 0), 1, 1, transform=text.transAxes, color=INK, zorder=0))
    text.text(
        0.02,
        0.97,
        terminal,
        transform=text.transAxes,
        family="monospace",
        size=6.4,
        color="#e8ebf2",
        va="top",
        linespacing=1.2,
    )

    steps = [line["step"] for line in record if line["split"] == "train"]
    losses, again = ([line["loss"] for line in lines if line["split"] == "train"] for lines in (record, killed))
    edges = [0, *(step for _, step in kills), steps[-1] + 1]
    axes.plot(steps, losses, color=QUIET, linewidth=6, alpha=0.45, label="unbroken", solid_capstyle="round")
    for number, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        part = [(step, loss) for step, loss in zip(steps, again, strict=True) if first - 3 <= step <= last]
        label = None if number else "killed and resumed"
        axes.plot(*zip(*part, strict=True), color=BLUE, linewidth=1.6, label=label)
    for rank, step in kills:
        axes.axvline(step, color=RED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"kill -9\nrank {rank}",
            (step, 1.05),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=RED,
            size=8,
            va="top",
            annotation_clip=False,
        )
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, 2 processes, O1")
    accuracy = axes.twinx()
    reached = [(line["step"], line["top1"]) for line in record if line["split"] == "eval"]
    accuracy.plot(*zip(*reached, strict=True), "o-", color="#2d9d62", markersize=4, linewidth=1)
    accuracy.set_ylabel("validation accuracy", color="#2d9d62")
    accuracy.set_ylim(0, 1.02)
    for side in (axes, accuracy):
        side.spines["top"].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    axes.set_title("Same weights, same metrics, bit for bit", size=11, pad=26, color=INK)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        draw_run(*train(Path(folder)), ROOT / "docs" / "run.png")


if __name__ == "__main__":
    main()
