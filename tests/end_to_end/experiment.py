"""A small experiment that covers everything a resume must restore, trained on real processes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torchvision.io import write_png

from harness.audit.plan import AuditPlan, KillPlace, PlannedKill
from harness.audit.starts import record_this_process
from harness.runs import checkpoints
from harness.runs.metrics_table import TIMES
from harness.tools.compare.exactness import differences
from tests.end_to_end.processes import drive_in_terminal
from tests.ranks import free_port, launch_environment, start, wait_for

NUM_TRAIN, NUM_EVAL, NUM_CLASSES, SIZE = 61, 23, 3, 8  # odd sizes: ragged shards, ragged last batches


def write_images(folder: Path, num_train: int = NUM_TRAIN, num_eval: int = NUM_EVAL) -> Path:
    """Write train.csv, eval.csv and their images: noisy stripes in three directions, learnable and always the same."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for split, count in (("train", num_train), ("eval", num_eval)):
        lines = ["path,label"]
        for index in range(count):
            label = int(generator.integers(NUM_CLASSES))
            rows, columns = np.mgrid[0:SIZE, 0:SIZE]
            wave = np.cos((rows, columns, rows + columns)[label] * 1.5 + generator.normal() * 0.3)
            pixels = np.clip(128 + 90 * wave + generator.normal(0, 20, (SIZE, SIZE)), 0, 255).astype(np.uint8)
            write_png(torch.from_numpy(pixels)[None], str(folder / "images" / f"{split}{index}.png"))
            lines.append(f"images/{split}{index}.png,{('row', 'column', 'slope')[label]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_config(folder: Path, data: Path, /, **settings: Any) -> Path:
    """Write ``folder/config.yaml``, an experiment on ``data`` with its output in ``folder``.

    ``settings`` are sections that extend or replace the defaults below.
    """
    config: dict[str, Any] = {
        "name": "run",
        "output": str(folder / "runs"),
        "task": {
            "name": "image_csv",
            "train_csv": str(data / "train.csv"),
            "eval_csv": str(data / "eval.csv"),
            "root": str(data),
            "color": "gray",
            "transforms": {"train": [{"RandomCrop": {"size": SIZE, "padding": 1}}, "RandomHorizontalFlip"]},
        },
        "data": {"num_workers": 0, "cache_dir": str(data / "cache")},
        "model": {"name": "small_cnn", "args": {"width": 4}},
        "batch": {"global": 8},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "schedule": {"name": "cosine", "warmup": 0.5},
        "precision": {"opt_level": "O0"},
        "train": {"epochs": 3, "log_every": 3},
        "runtime": {"device": "cpu", "timeout_s": 30},
    }
    for key, value in settings.items():
        extends = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if extends else value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_folder(config: Path) -> Path:
    """The folder of the run that ``write_config`` describes."""
    return config.parent / "runs" / "run"


def run(
    config: Path, world_size: int = 1, *overrides: str, kill: Kill | None = None, timeout_s: float = 90, **environ: str
) -> list[int]:
    """Train ``config`` on ``world_size`` processes; return exit codes by rank (negative: killed by that signal).

    Each rank's output goes to ``terminal-RANK.txt`` next to the configuration. ``environ`` is added to its environment.
    """
    port = free_port()
    processes = []
    for rank in range(world_size):
        terminal = config.parent / f"terminal-{rank}.txt"
        own = kill if kill and kill.rank == rank else None
        launched = launch_environment(rank, world_size, port) if world_size > 1 else {}
        processes.append(
            start(drive_until_killed, (["-c", str(config), *overrides], str(terminal), own), {**launched, **environ})
        )
    return wait_for(processes, timeout_s)


def drive_until_killed(arguments: list[str], terminal: str, kill: Kill | None) -> None:
    if kill is not None:
        kill.arm(Path(arguments[1]))
    drive_in_terminal(arguments, terminal)


def train(
    folder: Path, data: Path, world_size: int = 1, /, *overrides: str, limit_s: float = 90, **settings: Any
) -> Path:
    """Train the experiment with ``settings`` to its end on ``world_size`` processes; return the run folder."""
    config = write_config(folder, data, **settings)
    assert run(config, world_size, *overrides, timeout_s=limit_s) == [0] * world_size, (
        folder / "terminal-0.txt"
    ).read_text()
    return run_folder(config)


@dataclass(frozen=True)
class Kill:
    """Kills a rank with SIGKILL, by the recorder of ``harness verify-resume``.

    ``where``: "step" (once optimizer step ``step`` is done), "save" (while the first checkpoint from there on is being
    written) or "evaluation" (in the first evaluation from there on).
    """

    rank: int
    step: int
    where: str = "step"

    def arm(self, config: Path) -> None:
        """Arm this process, a rank that is about to train ``config``."""
        latest = run_folder(config) / "checkpoints" / "latest"
        # A start counts its own steps.
        after = self.step - (int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0)
        if self.where == "step":
            kill = PlannedKill("step", after + 1, rank=self.rank, target="rank")
        else:
            place: KillPlace = "write" if self.where == "save" else "evaluation"
            kill = PlannedKill(place, 1, rank=self.rank, target="rank", after=after)
        records = Path(tempfile.mkdtemp(prefix="records-", dir=config.parent))
        plan = AuditPlan(str(records), kill, detail="places", roots=(str(config.parents[1]),))
        record_this_process(plan.write(records / "plan.json"))


def record(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def of_split(folder: Path, split: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one split: "train", "epoch" or "eval"."""
    return [line for line in record(folder) if line["split"] == split]


def newest_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in record(folder) if "loss" in line]


def last_checkpoint(folder: Path) -> dict[str, Any]:
    """The content of the newest checkpoint without its times."""
    content: dict[str, Any] = checkpoints.read(newest_checkpoint(folder))
    for times in [content["state"], *[rank["meter"] for rank in content["ranks"]]]:
        for key in [key for key in times if key.endswith("_s")]:  # seconds
            times.pop(key)
    content.pop("log_sha256")
    content.pop("log_offset")  # counts bytes of lines with times, whose number of digits varies
    return content


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Assert that nested plain data and tensors are bitwise equal; name the first place that differs."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert left.shape == right.shape, where
        same = (
            torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
            if left.numel()
            else True
        )
        assert same, f"{where}: differs by up to {(left.double() - right.double()).abs().max().item():.3g}"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), f"{where}: {set(left) ^ set(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert left == right or (left != left and right != right), f"{where}: {left!r} != {right!r}"


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two finished run folders hold the same, bit for bit, times excluded."""
    found = [str(each) for each in differences(one, other)]
    assert not found, found
    # Once more without the project's own comparison, which could be wrong.
    assert_same(record(one), record(other), "metrics.jsonl")
    assert_same(last_checkpoint(one), last_checkpoint(other), "checkpoint")
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
