"""Records of a small made-up training, as the hook writes them, with one change per fault."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.audit.records import StartRecord, read

Event = dict[str, Any]
Change = Callable[[Event], None]
ROWS = 8


def other(digest: str, kind: str = "module") -> dict[str, Any]:
    """Return what the hook records of a tensor beside the model, or of a generator."""
    return {"kind": kind, "digests": [digest]}


@dataclass
class Training:
    """A training of ``steps`` steps in epochs of ``epoch`` steps, with a checkpoint after every ``save`` of them."""

    steps: int = 24
    epoch: int = 10
    save: int = 6
    ranks: int = 1
    optimizers: int = 1
    micro_batches: int = 1
    skipped: tuple[int, ...] = ()
    shuffled: bool = True
    save_name: str = "out/last.pt"

    def step(self, number: int, rank: int = 0) -> Event:
        """Step ``number``, from 1, of an exact run."""
        optimizer = (number - 1) % self.optimizers
        updates = (number - 1) // self.optimizers - sum(
            skipped < number and (skipped - 1) % self.optimizers == optimizer for skipped in self.skipped
        )
        epoch, place = divmod(number - 1, self.epoch)
        order = epoch if self.shuffled else 0
        names = [f"net{optimizer}.{name}" for name in ("weight", "bias")]
        calls = [
            {
                "module": "Net", "in": f"in {rank}.{order}.{place}.{part}", "rows": ROWS,
                "out": f"out {rank}.{number}.{part}",
            }
            for part in range(self.micro_batches)
        ]  # fmt: skip
        return {
            "event": "step",
            "number": number,
            "optimizer": optimizer,
            "skipped": number in self.skipped,
            "calls": calls,
            "weights": {name: f"{name} {updates}" for name in names},
            "buffers": {"running_mean": f"mean {rank}.{number}"},
            "state": {f"{name}.momentum": f"momentum {name} {updates}" for name in names if updates},
            "groups": [{"lr": round(0.1 * 0.9 ** ((number - 1) // self.optimizers), 9), "momentum": 0.9}],
            "gradients": {name: f"gradient {name} {number}" for name in names},
            "scale": [[65536.0 / 2 ** sum(skipped < number for skipped in self.skipped), number]],
            "streams": {
                "torch": f"torch {rank}.{number}",
                "numpy": f"numpy {rank}.{epoch}",
                "random": f"random {rank}",
            },
            "samples": {name: samples(name, updates) for name in names},
            "others": {"EMA.weight": other(f"ema {number}"), "a tensor [2]": other(f"copy {number}", "unnamed")}
            if number % self.save == 1
            else None,
        }

    def checkpoint(self, after: int, begun: int = 0) -> list[Event]:
        path = self.save_name.replace("N", str(after))
        content = {
            "model.weight": f"{after:016x}", "ema.weight": f"{after + 999:016x}", "epoch": after // self.epoch,
            "step": after, "rng": f"{after + 5000:016x}", "saved_time": 12.5 + after, "args.out": "out",
        }  # fmt: skip
        return [
            {"event": "write", "path": f"{path}.tmp", "how": "torch.save"},
            {"event": "written", "path": f"{path}.tmp", "how": "torch.save", "after": after - begun, "bytes": 9,
             "content": content},
            {"event": "renamed", "source": f"{path}.tmp", "target": path},
        ]  # fmt: skip

    def events(self, begun: int = 0, until: int | None = None, rank: int = 0) -> list[Event]:
        """From after step ``begun`` to the end, or to a kill before step ``until``."""
        found: list[Event] = [{"event": "process", "rank": rank, "world": self.ranks, "time": 1.0, "torch": "2.9"}]
        if begun:
            found.append({"event": "loaded", "path": self.save_name.replace("N", str(begun)), "how": "torch.load"})
        last = self.steps if until is None else until - 1
        for number in range(begun + 1, last + 1):
            if (number - 1) % self.epoch == 0 or number == begun + 1:
                found.append({"event": "epoch", "after": number - 1 - begun, "batches": self.epoch})
            found.append({**self.step(number, rank), "number": number - begun})
            if number % self.save == 0 and rank == 0:
                found += self.checkpoint(number, begun)
        if until is None:
            after = self.step(self.steps + 1, rank)
            found.append({"event": "end", "exception": None, **{k: after[k] for k in ("weights", "state", "buffers")},
                          "others": {"EMA.weight": other(f"ema {self.steps + 1}")}})  # fmt: skip
        return found


def samples(name: str, updates: int) -> list[float]:
    """Float32 numbers that neither float16 nor bfloat16 can hold."""
    return [rounded("f", 0.1 * (place + 1) + 0.01 * updates + 0.001 * len(name)) for place in range(8)]


def rounded(kind: str, value: float) -> float:
    return struct.unpack(f"<{kind}", struct.pack(f"<{kind}", value))[0]


@dataclass
class Starts:
    """The four starts of an audit, as events by rank, before they are written."""

    training: Training
    checkpoint: int = 12
    kill: int = 16
    """The step before which the start is killed."""
    place: str = "step"
    undisturbed: list[list[Event]] = field(default_factory=list)
    again: list[list[Event]] = field(default_factory=list)
    killed: list[list[Event]] = field(default_factory=list)
    resumed: list[list[Event]] = field(default_factory=list)
    codes: dict[str, int | None] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(self.training.ranks)
        self.undisturbed = [self.training.events(rank=rank) for rank in ranks]
        self.again = [self.training.events(rank=rank) for rank in ranks]
        self.killed = [self.training.events(until=self.kill, rank=rank) for rank in ranks]
        self.resumed = [self.training.events(begun=self.checkpoint, rank=rank) for rank in ranks]
        self.codes = {"undisturbed": 0, "again": 0, "killed": None, "resumed": 0}

    def steps(self, name: str, rank: int = 0) -> list[Event]:
        return [event for event in getattr(self, name)[rank] if event["event"] == "step"]

    def from_step(self, number: int, change: Change, name: str = "resumed", rank: int = 0) -> None:
        """Change each step from step ``number`` of the undisturbed start on."""
        begun = self.checkpoint if name == "resumed" else 0
        for step in self.steps(name, rank):
            if step["number"] + begun >= number:
                change(step)

    def apart(self, number: int, name: str = "resumed", rank: int | None = None) -> None:
        """Training is another one from step ``number`` on, as after any fault."""

        def change(step: Event) -> None:
            step["weights"] = {key: f"other {value}" for key, value in step["weights"].items()}
            for call in step["calls"]:
                call["out"] = f"other {call['out']}"

        for each in range(self.training.ranks) if rank is None else [rank]:
            self.from_step(number, change, name, each)
            for event in getattr(self, name)[each]:
                if event["event"] == "end":
                    change({**event, "calls": []})
                    event["weights"] = {key: f"other {value}" for key, value in event["weights"].items()}

    def read(self, folder: Path) -> list[StartRecord]:
        return [self.written(folder, name) for name in ("undisturbed", "again", "killed", "resumed")]

    def written(self, folder: Path, name: str) -> StartRecord:
        records = folder / name
        records.mkdir(parents=True, exist_ok=True)
        for rank, events in enumerate(getattr(self, name)):
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (records / f"rank{rank}-{100 + rank}.jsonl").write_text(lines)
        (records / "output.txt").write_text(self.output.get(name, "epoch 1 loss 0.5\n"))
        killed = {"place": self.place, "number": self.kill, "step": self.kill - 1, "rank": 0, "path": None}
        about = {
            "name": name, "command": ["python", "train.py"], "code": self.codes[name], "wall_s": 1.5,
            "killed": killed if name == "killed" else None, "output": str(records / "output.txt"),
        }  # fmt: skip
        (records / "ended.json").write_text(json.dumps(about))
        return read(records)
