"""Draws docs/run.png from real runs: the digits on two processes, unbroken, and killed with SIGKILL four times.

python -m docs.picture        (needs matplotlib: pip install -e '.[plot]')
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from harness.data import digits
from tests.conftest import ROOT
from tests.end_to_end.experiment import Kill, assert_same_run, run, write_config

KILLS = ((1, 31), (0, 83), (1, 120), (0, 171))  # rank, step
INK, QUIET, BLUE, RED = "#1f2430", "#8a93a6", "#2f6fde", "#d1453b"


def train(folder: Path) -> tuple[list[dict], list[dict], str]:
    """The records of the unbroken and of the killed run, equal bit for bit, and what a terminal says."""
    data = folder / "digits"
    digits.write(data)
    settings = {
        "task": {"augment": {"crop_padding": 1, "horizontal_flip": 0.0}},
        "model": {"args": {"width": 32, "batch_norm": True}},
        "batch": {"global": 64},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": {"name": "cosine", "warmup_epochs": 1.0},
        "precision": {"opt_level": "O1"},
        "train": {"epochs": 10, "log_every": 3},
        "checkpoint": {"every_steps": 10},
    }
    unbroken = write_config(folder / "unbroken", data, name="digits", **settings)
    assert run(unbroken, 2) == [0, 0]
    killed = write_config(folder / "killed", data, name="digits", **settings)
    for rank, step in KILLS:
        run(killed, 2, kill=Kill(rank, step))
    assert run(killed, 2) == [0, 0]
    folders = [config.parent / "runs" / "digits" for config in (unbroken, killed)]
    assert_same_run(*folders)
    records = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    return records[0], records[1], _terminal(folder)


def _terminal(folder: Path) -> str:
    """What ``make train`` prints: the same command, on the same data, in a folder of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    (folder / "data").mkdir()
    (folder / "digits").rename(folder / "data" / "digits")
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    command = [*launcher, str(ROOT / "driver.py"), "-c", str(ROOT / "configs" / "digits.yaml")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "  step " not in line and "run.py" not in line]
    epochs = [index for index, line in enumerate(lines) if line.startswith("epoch ")]
    shown = lines[: epochs[4]] + ["…"] + lines[epochs[-2] :]
    return "\n".join(["$ make train", *shown])


def draw(record: list[dict], killed: list[dict], terminal: str, path: Path) -> None:
    figure, (text, axes) = pyplot.subplots(1, 2, figsize=(15, 5.2), width_ratios=(1.15, 1), facecolor="white")
    text.set_axis_off()
    text.add_patch(pyplot.Rectangle((0, 0), 1, 1, transform=text.transAxes, color=INK, zorder=0))
    text.text(
        0.02,
        0.97,
        terminal,
        transform=text.transAxes,
        family="monospace",
        size=7.4,
        color="#e8ebf2",
        va="top",
        linespacing=1.35,
    )

    steps = [line["step"] for line in record if line["split"] == "train"]
    losses, again = ([line["loss"] for line in lines if line["split"] == "train"] for lines in (record, killed))
    edges = [0, *(step for _, step in KILLS), steps[-1] + 1]
    axes.plot(steps, losses, color=QUIET, linewidth=6, alpha=0.45, label="unbroken", solid_capstyle="round")
    for number, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        part = [(step, loss) for step, loss in zip(steps, again, strict=True) if first - 3 <= step <= last]
        axes.plot(
            *zip(*part, strict=True),
            color=BLUE,
            linewidth=1.6,
            label="killed and started again" if not number else None,
        )
    for rank, step in KILLS:
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
    evaluations = [line for line in record if line["split"] == "eval"]
    accuracy.plot(
        [e["step"] for e in evaluations],
        [e["top1"] for e in evaluations],
        "o-",
        color="#2d9d62",
        markersize=4,
        linewidth=1,
    )
    accuracy.set_ylabel("held-out accuracy", color="#2d9d62")
    accuracy.set_ylim(0, 1.02)
    for side in (axes, accuracy):
        side.spines["top"].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    axes.set_title("Same weights, same record, bit for bit", size=11, pad=26, color=INK)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(*train(Path(folder)), ROOT / "docs" / "run.png")
