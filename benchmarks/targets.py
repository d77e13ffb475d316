"""Several labels per image, a number per image, and classes of texts: their configurations over three seeds.

harness data digit_canvases data/digit_canvases && harness data rotated_digits data/rotated_digits
harness data character_names data/character_names && python -m benchmarks.targets
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pandas as pd

from benchmarks import machine

SEEDS = range(3)
SHOWN = {
    "multi_label": ("mean_average_precision", "micro_f1", "exact_match"),
    "regression": ("rmse", "mae", "r2"),
    "text": ("top1", "macro_f1", "mean_class_accuracy"),
}
ROOT = Path(__file__).resolve().parent.parent


def evaluation(folder: Path, config: str, seed: int) -> dict[str, float]:
    """The last validation of a run, which is not repeated if it has finished."""
    name = f"{config}-{seed}"
    summary = folder / name / "summary.json"
    command = [sys.executable, str(ROOT / "driver.py"), "-c", str(ROOT / "configs" / f"{config}.yaml")]
    words = [f"output={folder}", f"name={name}", f"seed={seed}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    if not (summary.exists() and json.loads(summary.read_text())["finished"]):
        subprocess.run([*command, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=1200, env=environ)
    return dict(json.loads(summary.read_text())["evaluation"])


def without_learning() -> dict[str, str]:
    """What a constant prediction would reach."""
    tags = pd.read_csv(ROOT / "data/digit_canvases/eval.csv", dtype=str)["tags"].str.get_dummies("|")
    angles = pd.read_csv(ROOT / "data/rotated_digits/eval.csv")["angle"]
    categories = pd.read_csv(ROOT / "data/character_names/eval.csv")["category"]
    return {
        "mean_average_precision": f"{tags.mean().mean():.4f}",
        "rmse": f"{angles.std(ddof=0):.2f}",
        "mae": f"{(angles - angles.mean()).abs().mean():.2f}",
        "r2": "0",
        "top1": f"{categories.value_counts(normalize=True).max():.4f}",
    }


def main() -> None:
    constant, rows = without_learning(), []
    for config, metrics in SHOWN.items():
        found = [evaluation(ROOT / "runs" / "targets", config, seed) for seed in SEEDS]
        for metric in metrics:
            values = [each[metric] for each in found]
            numbers = [f"{value:.4f}" for value in (statistics.mean(values), min(values), max(values))]
            rows.append([f"`configs/{config}.yaml`", metric, *numbers, constant.get(metric, "")])
    header = ["configuration", "metric", "mean", "lowest", "highest", "a constant prediction"]
    text = f"""Each of the three configurations of [targets.md](../../docs/targets.md) was trained unchanged on one
process with {len(SEEDS)} seeds. They predict which digits are on a canvas (3,000 canvases for training, 600 for
validation), the angle of a rotated digit in degrees (3,000 and 600), and the category of a character from its name
(11,110 and 1,661). The numbers are from the last epoch.

{machine.table(header, rows)}"""
    machine.write("targets", "Labels, numbers and texts", text)


if __name__ == "__main__":
    main()
