"""Writes a page about trained runs of the tutorials' systems: accuracies, losses, generated names and curves.

for name in mnist fashion_mnist pet_names pet_names_gru; do launch/single_node.sh 2 configs/$name.yaml; done
python -m benchmarks.tutorials --runs runs        (needs matplotlib: pip install -e '.[dev]')
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from benchmarks import machine
from harness.config import loader
from harness.data.names import ALPHABET, BLANK_CODE, whole
from harness.inference import generate

INK, QUIET, COLORS = "#1f2430", "#8a93a6", ("#2f6fde", "#d1453b", "#2a9d6f", "#b07aa1")
IMAGES = {
    "mnist": ("MNIST", 0.990),
    "fashion_mnist": ("FashionMNIST", 0.900),
}  # with the accuracy they are expected to reach
NAMES = {"pet_names": "4 layers of LSTM, windows of 8", "pet_names_gru": "2 layers of GRU, whole names"}


def read(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    starts = json.loads((folder / "provenance.json").read_text())
    assert summary["finished"], f"{folder} is not finished"
    return summary | {"starts": starts, "folder": folder}


def resumed(runs: dict[str, dict[str, Any]]) -> str:
    """A sentence about runs that were resumed."""
    several = [f"`{name}` ({len(run['starts'])} starts)" for name, run in runs.items() if len(run["starts"]) > 1]
    return f"None was interrupted, except {', '.join(several)}." if several else "None was interrupted."


def duration(run: dict[str, Any]) -> str:
    steps = [json.loads(line) for line in (run["folder"] / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_s"] for line in steps if line["split"] == "train" and line["samples_per_s"]]
    minutes = run["wall_s"] / 60
    return f"{minutes:.1f} min (median {np.median(rates):.0f}, fastest {max(rates):.0f} rows/s)"


def images_table(runs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, (title, claim) in IMAGES.items():
        run = runs[name]
        by_epoch = [entry["top1"] for entry in run["history"]]
        reached = next((i + 1 for i, value in enumerate(by_epoch) if value >= claim), None)
        rows.append(
            [title, f"{claim:.3f}", f"{by_epoch[-1]:.4f}", f"{max(by_epoch):.4f}", str(reached or "not reached"),
             str(len(by_epoch)), duration(run)]
        )  # fmt: skip
    header = [
        "data",
        "expected",
        "last epoch",
        "best",
        "expected value reached in epoch",
        "epochs",
        "time on 2 processes",
    ]
    return machine.table(header, rows) + "\n\n" + epochs(runs, IMAGES, "top1")


def epochs(runs: dict[str, dict[str, Any]], names: Any, metric: str) -> str:
    lines = []
    for name in names:
        values = " ".join(f"{entry[metric]:.4f}" for entry in runs[name]["history"])
        lines.append(f"- `{name}`, {metric} after each epoch: {values}")
    return "\n".join(lines)


def counted(names_file: str) -> dict[str, float]:
    """Baselines in nats per character of the validation names, from character counts of the training names."""
    from harness.tasks.pet_names.config import Task

    opened = Task(name="pet_names", names=names_file, rows="names").open(0, None)
    pairs = np.ones((len(ALPHABET), len(ALPHABET)))  # add-one smoothing, so that no pair is impossible
    pairs[:, BLANK_CODE] = 0

    def each(given: Any) -> np.ndarray:
        rows = whole(given)
        codes = rows.codes(np.arange(len(rows))).astype(int)
        both = np.stack([codes[:, :-1], codes[:, 1:]])
        return both[:, both[1] != BLANK_CODE]

    np.add.at(pairs, tuple(each(opened.train_names)), 1)
    before, after = each(opened.eval_names)
    single = pairs.sum(0) / pairs.sum()
    following = pairs / pairs.sum(1, keepdims=True)
    return {
        "uniform over characters": math.log(len(ALPHABET) - 1),
        "frequency of each character": -np.log(single[after]).mean(),
        "frequency after the previous character": -np.log(following[before, after]).mean(),
    }


def names_table(runs: dict[str, dict[str, Any]]) -> str:
    task = loader.load(runs["pet_names"]["folder"] / "config.yaml").task
    rows = [[f"(counts: {name})", f"{value:.3f}", "", "", "", ""] for name, value in counted(task.names).items()]
    for name, title in NAMES.items():
        run = runs[name]
        best = min(run["history"], key=lambda entry: entry["char_loss"])
        rows.append(
            [f"`{name}`: {title}", f"{best['char_loss']:.3f}", f"{best['window_loss']:.3f}",
             f"{best['char_accuracy']:.3f}", f"{best['epoch']} of {len(run['history'])}", duration(run)]
        )  # fmt: skip
    header = ["model", "nats per character", "nats per window position", "character accuracy", "best epoch", "time"]
    return machine.table(header, rows) + "\n\n" + epochs(runs, NAMES, "char_loss")


def generated(folder: Path) -> str:
    return ", ".join(generate.names(folder, generate.Wish(50, temperature=0.8)))


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), dpi=110)
    for axis, (name, (title, claim)), color in zip(axes, IMAGES.items(), COLORS, strict=False):
        curve(axis, runs[name], "top1", color, title)
        axis.axhline(claim, color=QUIET, linestyle="--", linewidth=1)
        axis.text(axis.get_xlim()[1], claim, f" {claim:.2f}", color=QUIET, va="center", fontsize=8)
        axis.set_title(f"{title}: validation accuracy", color=INK, loc="left", fontsize=10)
    for name, color in zip(NAMES, COLORS[2:], strict=True):
        curve(axes[2], runs[name], "char_loss", color, NAMES[name])
    axes[2].legend(frameon=False, fontsize=8)
    axes[2].set_title("Pet names: nats per validation character", color=INK, loc="left", fontsize=10)
    for axis in axes:
        axis.set_xlabel("epoch", color=INK, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", color="#e6e9ef")
    figure.tight_layout()
    figure.savefig(path)


def curve(axis: Any, run: dict[str, Any], metric: str, color: str, label: str) -> None:
    values = [entry[metric] for entry in run["history"]]
    axis.plot(range(1, len(values) + 1), values, color=color, marker="o", markersize=3, label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    folder = parser.parse_args().runs
    runs = {name: read(folder / name) for name in (*IMAGES, *NAMES)}
    draw(runs, machine.RESULTS / "tutorials.png")
    text = f"""Each configuration of `configs/` was trained once, unchanged, on two processes with one thread each. The
machine was not idle, so times are upper bounds. {resumed(runs)}
Accuracies and losses count each validation row once.

![Validation accuracy and loss after each epoch](tutorials.png)

## Images

{images_table(runs)}

## Pet names

The data are 13,992 different names. One in ten is used for validation, split by name, so that no name is in both parts.
Nats per character, the deciding metric, counts each character of a validation name and its end once. Nats per window
position follows the tutorial and averages over all eight positions of each window, blanks included. Whole names have no
blanks to predict, so that column only compares models of windows. All numbers are from the best epoch, whose weights
are kept.

{names_table(runs)}

Fifty names of `pet_names_gru` (`harness generate runs/pet_names_gru -n 50`, temperature 0.8, seed 0), none of which
is in the data:

{generated(runs["pet_names_gru"]["folder"])}.

Fifty of `pet_names`:

{generated(runs["pet_names"]["folder"])}."""
    machine.write("tutorials", "Results of the tutorials' systems", text)


if __name__ == "__main__":
    main()
