"""Fine-tuning against training from scratch: configs/finetune.yaml over five seeds, with and without its weights.

harness data mnist data/mnist && harness train -c configs/mnist.yaml train.epochs=2
harness data digits data/digits && head -n 101 data/digits/train.csv > data/digits/few.csv
python -m benchmarks.fine_tuning
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import machine

SEEDS = range(5)
VARIANTS: dict[str, tuple[list[str], list[str]]] = {  # {title: (learning rates, overrides)}; at 0.1, MNIST's diverges
    "from MNIST": (["0.003", "0.01", "0.03"], []),
    "from scratch": (["0.01", "0.03", "0.05"], ["model.weights=null"]),
}
ROOT = Path(__file__).resolve().parent.parent


def best(folder: Path, seed: int, lr: str, *overrides: str) -> float:
    """The best validation accuracy of a run."""
    name = f"{'scratch' if overrides else 'tuned'}-{lr}-{seed}"
    words = [f"output={folder}", f"name={name}", f"seed={seed}", f"optimizer.lr={lr}", *overrides]
    command = [sys.executable, str(ROOT / "driver.py"), "-c", str(ROOT / "configs" / "finetune.yaml"), *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return float(json.loads((folder / name / "summary.json").read_text())["best"]["top1"])


def main() -> None:
    folder = ROOT / "runs" / "fine_tuning"
    rows, means = [], {}
    for title, (rates, overrides) in VARIANTS.items():
        for lr in rates:
            found = [best(folder, seed, lr, *overrides) for seed in SEEDS]
            means[title, lr] = statistics.mean(found)
            rows.append([title, lr, f"{means[title, lr]:.4f}", f"{min(found):.4f}", f"{max(found):.4f}"])
    top = {title: max(value for (key, _), value in means.items() if key == title) for title, _ in means}
    header = ["weights", "optimizer.lr", "mean of best top1", "lowest", "highest"]
    on_mnist = json.loads((ROOT / "runs" / "mnist" / "summary.json").read_text())["best"]["top1"]
    text = f"""`configs/finetune.yaml` trains on 100 of the 1,437 digits of scikit-learn, scaled to 28 × 28, and is
evaluated on all 360 validation images; {len(SEEDS)} seeds for each learning rate. The network of `configs/mnist.yaml`,
from which it starts, has an accuracy of {on_mnist:.4f} on MNIST after two epochs.

{machine.table(header, rows)}

At the best learning rate of each, starting from MNIST is better by {top["from MNIST"] - top["from scratch"]:.4f}."""
    machine.write("fine_tuning", "Fine-tuning on 100 images", text)


if __name__ == "__main__":
    main()
