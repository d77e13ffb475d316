"""Synthetic run folders and sweep folders, for tests and benchmarks of reports."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PHASES = {"data": 0.05, "forward": 0.3, "backward": 0.4, "reduce": 0.1, "optimizer": 0.1, "host": 0.05}


@dataclass(frozen=True)
class Fake:
    """``rows``: training rows per epoch. ``speed``: rows per second on one rank; of several, each has ``efficiency``
    times that. ``final``: the validation accuracy that the run approaches."""

    name: str = "fake"
    lr: float = 0.1
    batch: int = 64
    seed: int = 0
    world: int = 1
    epochs: int = 10
    rows: int = 6400
    speed: float = 1000.0
    efficiency: float = 0.8
    final: float = 0.95
    log_every: int = 10
    shard: str = "global"
    state: str = "finished"
    settings: dict[str, Any] = field(default_factory=dict)
    spike_at: int | None = None  # the step of a loss spike
    skips: tuple[int, ...] = ()  # skipped steps

    @property
    def rows_per_s(self) -> float:
        return self.speed * (1.0 if self.world == 1 else self.world * self.efficiency)


def config(fake: Fake) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": fake.name, "output": "runs", "seed": fake.seed, "task": {"name": "image_csv", "root": "data"},
        "data": {"shard": fake.shard}, "model": {"name": "small_cnn"},
        "batch": {"global": fake.batch, "per_rank": None}, "optimizer": {"name": "sgd", "lr": fake.lr},
        "precision": {"opt_level": "O1"}, "train": {"epochs": fake.epochs, "deterministic": True},
    }  # fmt: skip
    for key, value in fake.settings.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree


def entries(fake: Fake) -> list[dict[str, Any]]:
    """The log: an entry every ``log_every`` steps and at the end of each epoch, and an evaluation of 1 s per epoch."""
    generator = np.random.default_rng([fake.seed, int(fake.lr * 1e6), fake.batch])
    steps = math.ceil(fake.rows / fake.batch)
    found: list[dict[str, Any]] = []
    wall_s, step, samples, scale, skipped = 0.0, 0, 0, 65536.0, 0
    for epoch in range(fake.epochs):
        while step < steps * (epoch + 1):
            new = min(fake.log_every, steps * (epoch + 1) - step)
            hits = [skip for skip in fake.skips if step < skip <= step + new]
            step, skipped, scale = step + new, skipped + len(hits), scale / 2 ** len(hits)
            before, samples = samples, min(step * fake.batch, fake.rows * (epoch + 1))
            wall_s += (samples - before) / fake.rows_per_s
            done = step / (steps * fake.epochs)
            loss = 0.1 + 2.2 * math.exp(-4 * done) * (1 + 0.1 * generator.standard_normal())
            loss = 50.0 if fake.spike_at is not None and step - new < fake.spike_at <= step else loss
            times = {f"time_{phase}": share for phase, share in PHASES.items()}
            found.append(
                {"split": "train", "step": step, "epoch": epoch + 1, "loss": loss, "lr": fake.lr * (1 - 0.9 * done),
                 "loss_scale": scale, "skipped": skipped, "samples": samples, "samples_skipped": skipped * fake.batch,
                 "samples_per_s": fake.rows_per_s, "data_wait": 0.05, "wall_s": wall_s, **times}
            )  # fmt: skip
        found.append({"split": "epoch", "step": step, "epoch": epoch + 1, "rows_used": fake.rows, "rows": fake.rows})
        wall_s += 1.0
        top1 = fake.final - (fake.final - 0.1) * math.exp(-5 * (epoch + 1) / fake.epochs)
        found.append(
            {"split": "eval", "step": step, "epoch": epoch + 1, "top1": top1, "loss": 2.3 * (1 - top1),
             "class_accuracy": {"cat": top1, "dog": None}, "rows": 100, "samples_per_s": 1e4, "wall_s": wall_s}
        )  # fmt: skip
    return found


def write_run(folder: Path, fake: Fake) -> Path:
    """Write the run folder of ``fake``; the log of an unfinished run has half of its entries and ends within a line."""
    (folder / "logs").mkdir(parents=True)
    record = [json.dumps(line) for line in entries(fake)]
    if fake.state != "finished":
        record = record[: len(record) // 2]
    text = "\n".join(record) + "\n"
    if fake.state == "unfinished":
        text += '{"split": "train", "ste'
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(fake), sort_keys=False))
    evaluations = [line for line in map(json.loads, record) if line["split"] == "eval"]
    start = {
        "started": "2026-01-02T03:04:05+0000", "command": ["/opt/python", "driver.py", "-c", "configs/fake.yaml"],
        "git": {"commit": "0123456789abcdef", "changed": False}, "packages": {"torch": "2.6.0", "numpy": "2.0.0"},
        "python": "3.11.7", "cuda": None, "amp": "harness.apex", "launched_by": "torchrun",
        "world_size": fake.world, "ranks": [{"host": "here", "device": "cpu", "name": "cpu"}] * fake.world,
    }  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps([start]))
    if evaluations:
        best = max(evaluations, key=lambda line: line["top1"])
        summary = {
            "name": fake.name, "finished": fake.state == "finished",
            "best": {"top1": best["top1"], "step": best["step"]},
            "history": [{key: line[key] for key in ("step", "epoch", "top1", "loss")} for line in evaluations],
            "world_size": fake.world,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    if fake.state == "failed":
        failure = {"rank": 0, "step": 7, "error": "TrainingError", "message": "the loss became nan\nand more"}
        (folder / "failure.json").write_text(json.dumps(failure))
    return folder


def write_sweep(folder: Path, fakes: list[Fake], keys: tuple[str, ...] = ("optimizer.lr", "batch.global")) -> Path:
    """Write a sweep folder with a trial for each of ``fakes``."""
    trials = []
    for number, fake in enumerate(fakes):
        place = f"trials/{number:04d}"
        write_run(folder / place, fake)
        known = {"optimizer.lr": fake.lr, "batch.global": fake.batch, "seed": fake.seed, **fake.settings}
        trials.append(
            {"number": number, "run": place, "params": {key: known[key] for key in keys}, "world": fake.world,
             "state": {"stopped": "pruned", "unfinished": "running"}.get(fake.state, fake.state),
             "value": fake.final if fake.state == "finished" else None,
             "error": "the loss became nan" if fake.state == "failed" else None}
        )  # fmt: skip
    content = {"name": folder.name, "direction": "maximize", "metric": "top1", "space": {}, "trials": trials}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder
