"""Draws chains and kills from a seed: chain N of a seed is always the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchvision.io import write_png

from harness.audit.plan import HowKilled, KillTarget, PlannedKill
from harness.audit.saved_files import Events

NAMES = "bella luna max lucy charlie cooper daisy buddy sadie molly bailey lola stella tucker zoe milo leo jasper"
LAUNCHED = 0.08  # share of the chains with real launchers, whose ranks take seconds to start
COMPILED = 0.06  # share of the chains with torch.compile, whose first steps take many seconds
OF_EVERY_START = ("start-up", "end")  # also of a run that has nothing left to train
_HOW: list[tuple[HowKilled, KillTarget]] = [
    ("KILL", "rank"), ("KILL", "all"), ("TERM", "rank"), ("TERM", "all"), ("INT", "all"), ("INT", "rank"),
]  # fmt: skip
_HOW_OFTEN = [10, 6, 2, 2, 2, 1]
_SCHEDULES: list[dict[str, Any]] = [
    {"name": "constant"}, {"name": "cosine", "warmup": 0.5}, {"name": "one_cycle"},
    {"name": "plateau", "args": {"patience": 0, "threshold": 0.1, "factor": 0.5}},
    {"name": "cosine_restarts", "args": {"cycle_epochs": 1}},
    {"name": "wsd", "warmup": "2 steps", "args": {"decay_ratio": 0.5}},
]  # fmt: skip
_WAYS = [("ddp", 1), ("ddp", 2), ("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 2), ("dp", 1), ("none", 1)]


@dataclass(frozen=True)
class Chain:
    """One configuration, how its ranks are started, and how often it is killed. ``traits``: one value per dimension of
    the result table. With ``logical_ranks``, each start has another number of ranks, at most ``world_size``."""

    name: str
    engine: str
    world_size: int
    num_kills: int
    sections: dict[str, Any]
    at_url: bool
    traits: dict[str, str]
    logical_ranks: bool = False

    def sizes(self) -> Iterator[int]:
        """The number of ranks of each start; the uninterrupted run is the first."""
        rng = random.Random(f"sizes {self.name}")
        while True:
            yield rng.randint(1, self.world_size) if self.logical_ranks else self.world_size

    @property
    def compiled(self) -> bool:
        return bool(self.sections["model"].get("compile"))

    def config(self, folder: Path, data: Path) -> dict[str, Any]:
        """The configuration of a run whose files are all in ``folder``."""
        task = {
            key: value.replace("DATA", str(data)) if isinstance(value, str) else value
            for key, value in self.sections["task"].items()
        }
        place = f"file://{folder}/url" if self.at_url else str(folder / "runs")
        return {
            **self.sections, "name": "run", "output": place, "task": task,
            "data": {**self.sections["data"], "cache_dir": str(folder / "cache")},
            "runtime": {"device": "cpu", "timeout_s": 300 if self.compiled else 20},
            "launch": {"nproc": self.world_size, "threads": 1, "grace_s": 20},
        }  # fmt: skip


def chain(seed: int, number: int, logical_ranks: bool = False) -> Chain:
    """Chain ``number`` of ``seed``; with ``logical_ranks``, of two to four of them."""
    rng = random.Random(f"campaign {seed} {number}")
    strategy, world_size = ("ddp", rng.choice([2, 3, 4])) if logical_ranks else rng.choice(_WAYS)
    level = rng.choice(["O0", "O1", "O4"] if strategy == "fsdp" else ["O0", "O1", "O2", "O3", "O4", "O5"])
    launched = rng.random() < LAUNCHED
    engine = (
        rng.choice(["harness launch", "harness launch", "torchrun", "torch.distributed.launch"]) if launched else "bare"
    )
    if launched and world_size == 3:
        world_size = 2
    overlapped = strategy == "ddp" and rng.random() < 0.5 and not logical_ranks
    shard = rng.choice(["contiguous", "strided", "global"])
    accumulate = rng.choice([1, 1, 2])
    train: dict[str, Any] = {"epochs": 3, "log_every": rng.choice([1, 3])}
    if ema := rng.random() < 0.4:
        train["ema_decay"] = 0.9
    if clip := rng.random() < 0.4:
        train["clip_norm"] = 1.0
    workers = rng.choice([0, 0, 0, 1])
    at_url = rng.random() < 0.15
    name, task, model, options = _task(rng, strategy, level)
    every = rng.choice([None, 1, 2, 3])
    behind, shards = rng.random() < 0.4, strategy == "fsdp" and rng.random() < 0.5 and not at_url
    if again := strategy != "dp" and rng.random() < 0.3:
        model["activation_checkpointing"] = ["*"]
    schedule = rng.choice(_SCHEDULES)
    if compiled := strategy != "dp" and rng.random() < COMPILED:
        model["compile"] = True
    sgd, adam = {"name": "sgd", "lr": 0.05, "momentum": 0.9}, {"name": "adam", "lr": 0.003}
    sections = {
        "seed": number,
        "task": task,
        "model": model,
        "data": {"num_workers": workers, "shard": shard},
        "batch": {"global": 12 if 12 % (world_size * accumulate) == 0 else 24, "accumulate": accumulate},
        "optimizer": adam if rng.random() < 0.5 and level != "O3" else sgd,  # Adam's epsilon is 0 in float16
        "schedule": schedule,
        "precision": {"opt_level": level},
        "parallel": {
            "strategy": strategy,
            "delay_allreduce": not overlapped,
            "logical_ranks": world_size if logical_ranks else None,
        },
        "train": train,
        "checkpoint": {
            "every": every,
            "keep": rng.choice([1, 2]),
            "async_save": behind,
            "format": "sharded" if shards else "whole",
        },
    }
    if schedule["name"] == "one_cycle":
        sections["optimizer"] = {key: value for key, value in sections["optimizer"].items() if key != "momentum"}
    num_kills = rng.randint(3, 4) if launched or compiled else rng.randint(4, 6)
    if within := rng.random() < 0.3:  # which may be at a step of checkpoint.every that ends no other log line
        train |= rng.choice([{"evaluate_every": f"{rng.choice([2, 3])} steps"}, {"max_steps": 5}])
    options |= {"evaluation in an epoch": within}
    options |= {"asynchronous checkpoints": behind, "sharded checkpoints": shards, "activation checkpointing": again,
                "compiled": compiled}  # fmt: skip
    options |= {"moving average": ema, "clipping": clip, "micro-batches": accumulate > 1, "loader worker": workers > 0}
    kind = f"ddp, {'overlapped' if overlapped else 'delayed'}" if strategy == "ddp" else strategy
    traits = {
        "level": level, "strategy": kind, "ranks": str(world_size), "engine": engine, "shard rule": shard,
        "task": name, "run folder": "URL" if at_url else "local",
        "checkpoint interval": f"{every} step{'s' * (every > 1)}" if every else "epoch",
        "schedule": schedule["name"],
        "option": ",".join(option for option, on in options.items() if on) or "none",
    }  # fmt: skip
    name = f"{seed}-{number}{'-logical' * logical_ranks}"
    return Chain(name, engine, world_size, num_kills, sections, at_url, traits, logical_ranks)


def _task(rng: random.Random, strategy: str, level: str) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, bool]]:
    """(name, section task, section model, which options they use)."""
    if rng.random() < 0.3:
        task = {"name": "pet_names", "names": "DATA/names.txt", "rows": "names"}
        dropout = rng.choice([0.0, 0.2])
        args = {"embedding": 8, "hidden": 8, "num_layers": 2, "dropout": dropout}
        return "pet_names", task, {"name": "char_gru", "args": args}, {"dropout": dropout > 0}
    augment, dropout, norm = rng.random() < 0.5, rng.choice([0.0, 0.2]), rng.random() < 0.5
    images: dict[str, Any] = {
        "name": "image_csv", "train_csv": "DATA/train.csv", "eval_csv": "DATA/eval.csv", "root": "DATA",
        "color": "gray",
    }  # fmt: skip
    if augment:
        images["transforms"] = {"train": [{"RandomCrop": {"size": 8, "padding": 1}}, "RandomHorizontalFlip"]}
    model = {"name": "small_cnn", "args": {"width": 3, "dropout": dropout, "batch_norm": norm}}
    return "image_csv", images, model, {"augmentation": augment, "dropout": dropout > 0, "batch norm": norm}


def places(chain: Chain) -> list[str]:
    """What each kill of a chain hits. A run that has reached its end has no steps left, so that comes last."""
    rng = random.Random(f"places {chain.name}")
    weights = {"start-up": 2, "step": 4, "file": 7, "evaluation": 2, "end": 2}
    drawn = rng.choices([*weights], [*weights.values()], k=chain.num_kills)
    return sorted(drawn, key=lambda place: place == "end")


def kill(
    chain: Chain, number: int, place: str, size: int, events: Mapping[int, Events], steps_left: int
) -> tuple[PlannedKill, HowKilled]:
    """Kill ``number`` of a chain. ``size``: ranks of this start; ``events``: by rank of the uninterrupted run, which
    may have had fewer; ``steps_left``: of this start."""
    rng = random.Random(f"kill {chain.name} {number}")
    rank = rng.choices(range(size), [2.0] + [1.0] * (size - 1))[0]
    own = events[min(rank, max(events))]
    # The run must not end before its last kill.
    most = max(1, round(0.8 / chain.num_kills * sum(event["event"] == "step" for event in own)))
    how, target = rng.choices(_HOW, _HOW_OFTEN)[0]
    if chain.engine != "bare" and rng.random() < 0.4:
        target = "launcher"
    delay_s = rng.choice([0.0, 0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.1)])
    where: tuple[Any, ...]
    if place == "step":
        where = "step", rng.randint(1, most), 0
    elif place == "evaluation":
        where = "evaluation", rng.randint(1, 3), rng.randint(1, most)
    elif place == "start-up":
        where = "operation", rng.randint(1, max(1, _operations(own)[0])), 0
    elif place == "end":
        where = "operation", rng.randint(1, max(1, _operations(own)[-1])), steps_left
    else:
        most_operations = max(_operations(own)[1:-1], default=1)
        where = "operation", rng.randint(1, max(1, most_operations)), rng.randint(1, most)
    return PlannedKill(where[0], where[1], rank=rank, target=target, after=where[2], delay_s=delay_s), how


def _operations(events: Events) -> list[int]:
    """Operations on files before the first step, after it, ..., and after the last."""
    found = [0]
    for event in events:
        if event["event"] == "step":
            found.append(0)
        found[-1] += event["event"] == "operation"
    return found


def write_data(folder: Path) -> None:
    """Write the data of all chains: striped images whose direction is the label, and names."""
    generator = torch.Generator().manual_seed(0)
    (folder / "images").mkdir(parents=True)
    for split, count in (("train", 37), ("eval", 14)):  # odd sizes: ragged shards, ragged last batches
        lines = ["path,label"]
        for row in range(count):
            label = row % 3
            pixels = torch.randint(0, 80, (1, 8, 8), generator=generator, dtype=torch.uint8)
            pixels[0, label::3] += 150
            write_png(pixels.transpose(1, 2).contiguous() if row % 2 else pixels, f"{folder}/images/{split}{row}.png")
            lines.append(f"images/{split}{row}.png,{'abc'[label]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    (folder / "names.txt").write_text("\n".join(NAMES.split()) + "\n")
