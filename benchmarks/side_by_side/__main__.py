"""Runs, kills and resumes the same fine-tuning with HF Trainer, accelerate, Lightning and the harness, and by hand.

    python -m benchmarks.side_by_side [--rounds 3] [--only TEXT ...] [--photos FOLDER]

FOLDER has photos as shared/data/mnist_png_csv beside the repository does. The packages of the extra ``peers`` must be
installed. Without --only, it writes benchmarks/results/side_by_side.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import machine

HERE = Path(__file__).parent
ROWS = {"train": 640, "eval": 100}
STEPS = 60  # of the run: three epochs
KILLED_AT = 30  # in the middle of the second epoch
_LIMIT_S = 600.0  # for a run


@dataclass(frozen=True)
class Mark:
    """A step of a run: CPU time when it ended and when its mark was written, digest of the weights."""

    cpu_s: float
    marked_s: float
    digest: str


@dataclass
class Trainer:
    name: str
    package: str
    command: list[str]  # of Python
    files: list[str]  # that its user writes
    often: list[tuple[str, str]] = field(default_factory=list)
    """What changes in the first file to write a checkpoint every 8 steps."""
    runs: list[list[Mark]] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)  # CPU time from start to end, without that of marks

    @property
    def lines(self) -> int:
        """Lines with code or settings."""
        lines = [line.strip() for file in self.files for line in (HERE / file).read_text().splitlines()]
        return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)

    @property
    def step_s(self) -> float:
        return statistics.median(after.cpu_s - before.marked_s for run in self.runs for before, after in pairwise(run))


TRAINERS = [
    Trainer("by hand, no checkpoints", "torch", ["by_hand.py"], ["by_hand.py", "photos.py"]),
    Trainer(
        "HF Trainer", "transformers", ["hf_trainer.py"], ["hf_trainer.py", "photos.py"],
        [('eval_strategy="epoch",', 'eval_strategy="steps", eval_steps=8,'),
         ('save_strategy="epoch",', 'save_strategy="steps", save_steps=8,')],
    ),
    Trainer(
        "accelerate", "accelerate", ["accelerate_loop.py"], ["accelerate_loop.py", "photos.py"],
        [("first = 0\n", "first = taken = 0\n"),
         ("    first = project.iteration = len(", "    project.iteration = len("),
         ('"out/checkpoints"))\n', '"out/checkpoints"))\n    taken = 8 * project.iteration\n'
          "    first = taken // len(train_loader)\n"),
         ("    for batch in train_loader:\n", "    skipped = taken - epoch * len(train_loader)\n"
          "    rest = accelerator.skip_first_batches(train_loader, skipped) if skipped else train_loader\n"
          "    for batch in rest:\n"),
         ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        taken += 1\n"
          "        if taken % 8 == 0:\n            accelerator.save_state()\n"),
         ("    accelerator.save_state()\naccelerator.unwrap", "accelerator.unwrap")],
    ),
    Trainer(
        "Lightning", "lightning", ["lightning_fit.py"], ["lightning_fit.py", "photos.py"],
        [('monitor="top1", mode="max"', "every_n_train_steps=8")],
    ),
    Trainer(
        "apex-harness", "harness", ["-m", "harness", "train", "-c", "harness.yaml", "data.num_workers=0"],
        ["harness.yaml"],
        [("train: {epochs: 3}", "train: {epochs: 3}\ncheckpoint: {every: 8}")],
    ),
]  # fmt: skip


def prepare(photos: Path, folder: Path) -> None:
    """Write the photos, their tables, the model to start from and what the users write to ``folder``."""
    with tarfile.open(photos / "images.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    for split, source in (("train", "train.csv"), ("eval", "test.csv")):
        with open(photos / source) as file:
            rows = list(csv.DictReader(file))[: ROWS[split]]
        lines = ["path,label", *(f"{row['filepath']},{row['label']}" for row in rows)]
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4, layer_type="basic")
    ResNetForImageClassification(config).save_pretrained(folder / "start")
    for file in {file for trainer in TRAINERS for file in trainer.files} | {"marked.py"}:
        shutil.copy(HERE / file, folder)


def run(trainer: Trainer, folder: Path, **environ: str) -> list[Mark]:
    """Run the job in ``folder`` until it ends, with KILL_AT by a kill; return its steps and, if it was not killed,
    the end. Raises RuntimeError if it fails."""
    marks = folder / f"marks.{time.monotonic_ns()}"
    marks.touch()
    expected = -9 if "KILL_AT" in environ else 0
    environ |= {"MARKS": str(marks), "APEX_HARNESS_CACHE": str(folder / "cache")}
    with open(folder / "output.txt", "a") as output:
        done = subprocess.run(
            [sys.executable, "marked.py", *trainer.command], cwd=folder, env={**os.environ, **environ},
            stdout=output, stderr=output, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    if done.returncode != expected:
        text = (folder / "output.txt").read_text()
        raise RuntimeError(f"{trainer.name} ended with {done.returncode}, not {expected}:\n{text[-3000:]}")
    lines = [line.split() for line in marks.read_text().splitlines()]
    return [Mark(float(cpu), float(marked), digest) for cpu, marked, digest in lines]


def fresh(data: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(data, place)
    return place


def measure(trainer: Trainer, folder: Path) -> None:
    """Run the job undisturbed, and keep its times."""
    *marks, end = run(trainer, folder)
    if len(marks) != STEPS:
        raise RuntimeError(f"{trainer.name} took {len(marks)} steps, not {STEPS}")
    trainer.whole_s.append(end.cpu_s - sum(mark.marked_s - mark.cpu_s for mark in marks))
    trainer.runs.append(marks)


def killed(trainer: Trainer, folder: Path, undisturbed: list[list[Mark]]) -> str:
    """Kill the job, type its command again, and say how many steps are lost, and whether it ended as if undisturbed."""
    before = run(trainer, folder, KILL_AT=str(KILLED_AT))
    try:
        *after, _ = run(trainer, folder)
    except RuntimeError as error:
        print(f"resumed: {error}", flush=True)
        return "the resumed run fails"
    one, *others = [[mark.digest for mark in marks] for marks in [*undisturbed, before]]
    if any(other != one[: len(other)] for other in others):
        exact = "cannot tell: undisturbed runs differ"
    else:
        exact = "exact" if [mark.digest for mark in after] == one[STEPS - len(after) :] else "**not exact**"
    return f"{KILLED_AT + len(after) - STEPS}, {exact}"


def predictions(folder: Path) -> list[tuple[str, str]]:
    """[(label, prediction)] of the validation rows."""
    (path,) = [path for path in (folder / "predictions.csv", folder / "out" / "predictions.csv") if path.is_file()]
    with open(path) as file:
        rows = [(row["label"], row["prediction"]) for row in csv.DictReader(file)]
    if len(rows) != ROWS["eval"]:
        raise RuntimeError(f"{path.name} has {len(rows)} rows, not {ROWS['eval']}")
    return rows


def left(data: Path, folder: Path) -> str:
    """What the run left, folders with their files."""
    names = []
    for path in sorted(folder.iterdir()):
        if not (data / path.name).exists() and not path.name.startswith(
            ("marks.", "output.txt", "cache", "__pycache__")
        ):
            inside = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.glob("*"))
            names.append(f"{path.name}/ ({', '.join(inside)})" if path.is_dir() else path.name)
    return ", ".join(names)


def saving_often(trainer: Trainer, folder: Path) -> Path:
    """Change the first file of the user in ``folder``, which is returned."""
    path = folder / trainer.files[0]
    text = path.read_text()
    for old, new in trainer.often:
        if text.count(old) != 1:
            raise SystemExit(f"error: {path.name} has {old!r} {text.count(old)} times")
        text = text.replace(old, new)
    path.write_text(text)
    return folder


def row(trainer: Trainer, data: Path, place: Path, by_hand: Trainer) -> list[str]:
    """Kill and resume the run that was measured, and return its row."""
    end, found = left(data, place), predictions(place)
    each_epoch = killed(trainer, folder := fresh(data, place), trainer.runs)
    if predictions(folder) != found:
        each_epoch += ", **other predictions**"
    each_8 = "-"
    if trainer.often:
        *undisturbed, _ = run(trainer, saving_often(trainer, fresh(data, place)))
        each_8 = killed(trainer, saving_often(trainer, fresh(data, place)), [undisturbed])
    cells = [
        trainer.name,
        "this commit" if trainer.package == "harness" else metadata.version(trainer.package),
        str(trainer.lines),
        f"{statistics.median(run[0].cpu_s for run in trainer.runs):.1f}",
        f"{1000 * trainer.step_s:.1f}",
        f"{1000 * (trainer.step_s - by_hand.step_s):+.1f}",
        f"{statistics.median(trainer.whole_s):.1f}",
        each_epoch,
        each_8,
        f"{statistics.mean(label == prediction for label, prediction in found):.2f}",
        end,
    ]
    print(" | ".join(cells), flush=True)
    return cells


HEADER = [
    "trainer", "version", "lines", "first step after, s", "a step, ms", "overhead, ms", "in all, s",
    "checkpoint each epoch: steps lost", "each 8 steps: steps lost", "top1", "left in the end",
]  # fmt: skip


def page(rounds: int, busy: float) -> str:
    return (
        "`python -m benchmarks.side_by_side`: a small ResNet of transformers with random weights from a folder, on "
        f"{ROWS['train']} photos of 28x28 pixels; {STEPS} steps in three epochs on one thread, with augmentation, "
        f"validation on {ROWS['eval']} photos and a checkpoint after each epoch. The [files](../side_by_side) are "
        "written as the documentation of each trainer teaches. Lines are those that are neither blank nor comments, "
        f"with those of the data set where one is written. Times are CPU time, medians of {rounds} runs; all trainers "
        f"ran at the same time, and other programs used {busy:.0%} of the machine. HF Trainer clips gradients, its "
        f"default. kill -9 comes after step {KILLED_AT}, then the same command again: the resumed run is exact if the "
        "weights after each of its steps are those of an undisturbed run, bit for bit. By hand, it starts over. A "
        "checkpoint each 8 steps is one setting, but six lines more in accelerate's loop. The harness reads rows in "
        "the training process here, as the loaders of the others do by default."
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="undisturbed runs of each")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of names; nothing is written")
    parser.add_argument("--photos", type=Path, default=HERE.parents[2] / "shared" / "data" / "mnist_png_csv")
    arguments = parser.parse_args(words)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]).strip(":")
    by_hand, *others = TRAINERS
    chosen = [by_hand, *(trainer for trainer in others if any(text in trainer.name for text in arguments.only))]
    load = machine.OtherLoad()
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "data")
        data.mkdir()
        prepare(arguments.photos, data)
        places = {trainer.name: Path(temporary, "run", trainer.package) for trainer in chosen}
        with ThreadPoolExecutor(len(chosen)) as pool:
            for _ in range(arguments.rounds):
                list(pool.map(lambda trainer: measure(trainer, fresh(data, places[trainer.name])), chosen))
            busy = load.share()
            rows = list(pool.map(lambda trainer: row(trainer, data, places[trainer.name], by_hand), chosen))
    text = f"{page(arguments.rounds, busy)}\n\n{machine.table(HEADER, rows)}"
    if arguments.only == [""]:
        machine.write("side_by_side", "The same job with four trainers", text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
