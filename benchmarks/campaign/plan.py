"""Draws chains and kills from a seed: chain N of a seed is always the same."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchvision.io import write_png

from benchmarks.campaign.trigger import Kill

NAMES = "bella luna max lucy charlie cooper daisy buddy sadie molly bailey lola stella tucker zoe milo leo jasper"
LAUNCHED = 0.08  # share of the chains with real launchers, whose ranks take seconds to start
COMPILED = 0.06  # share of the chains with torch.compile, whose first steps take many seconds
OF_EVERY_START = ("start-up", "end")  # also of a run that has nothing left to train
_SCHEDULES: list[dict[str, Any]] = [
    {"name": "constant"}, {"name": "cosine", "warmup_epochs": 0.5}, {"name": "one_cycle"},
    {"name": "plateau", "args": {"patience": 0, "threshold": 0.1, "factor": 0.5}},
    {"name": "cosine_restarts", "args": {"cycle_epochs": 1}},
    {"name": "wsd", "warmup_steps": 2, "args": {"decay_ratio": 0.5}},
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
    num_kills = rng.randint(3, 4) if launched or compiled else rng.randint(4, 6)
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


def kills(chain: Chain, sizes: Sequence[int], counts: Mapping[int, Mapping[str, int]]) -> list[tuple[int, Kill]]:
    """(ranks, kill) for each start that is killed. ``sizes``: the numbers of ranks; ``counts``: {rank: {place:
    operations}} of the uninterrupted run."""
    rng = random.Random(f"kills {chain.name}")
    drawn = [(size, _kill(rng, chain, size, counts)) for size in sizes]
    return sorted(drawn, key=lambda pair: pair[1].place == "end")  # a run that has reached its end has no steps left


def _kill(rng: random.Random, chain: Chain, size: int, counts: Mapping[int, Mapping[str, int]]) -> Kill:
    rank = rng.choices(range(size), [2.0] + [1.0] * (size - 1))[0]
    weights = {"start-up": 2, "step": 4, "checkpoint": 4, "evaluation": 2, "end": 2, "upload": 3}
    # The uninterrupted run may have had fewer ranks. Rank 0 also writes files, which others do not.
    known = counts.get(rank) or {place: counts[0].get(place, 0) for place in ("step", "evaluation")}
    places = [place for place in weights if known.get(place)]
    place = rng.choices(places, [weights[place] for place in places])[0]
    # The run must not end before its last kill.
    share = 1.0 if place in OF_EVERY_START else 0.8 / chain.num_kills
    number = rng.randint(1, max(1, round(share * known[place])))
    how, target = rng.choices(
        [("KILL", "one rank"), ("KILL", "all ranks"), ("TERM", "one rank"), ("TERM", "all ranks"), ("INT", "all ranks"),
         ("INT", "one rank"), ("STOP", "one rank")],
        [8, 6, 2, 2, 2, 1, 2],
    )[0]  # fmt: skip
    if chain.engine != "bare" and (target == "all ranks" or rng.random() < 0.3):
        target = "launcher"
    elif size == 1:
        target = "all ranks"
    if how == "STOP" and target == "launcher":
        how = "KILL"
    delay_s = rng.choice([0.0, 0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.1)])
    then_s = rng.uniform(0.05, 1.0) if how == "STOP" else 0.0
    return Kill(rank, place, number, int(signal.Signals[f"SIG{how}"]), target, delay_s, then_s)


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
