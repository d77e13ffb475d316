"""A script that an auditor starts: it takes no torch, and writes the records of the hook itself.

    python fake_training.py [--out FOLDER] [--resume FILE] [--steps N] [--save-every N] [--fault NAME]

Its weight is a hash of all rows so far. Faults: forget (a resume skips a row), refuse (to resume), chance (draws from
the clock), dice (so are the rows), fail, hang, quiet (no records), absolute:FOLDER (saves there).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 60.0  # no test waits for longer


class FakeRecorder:
    """Writes what ``harness/audit/hook`` would, and is killed where it would be."""

    def __init__(self) -> None:
        self.plan = json.loads(Path(os.environ["RESUME_AUDIT"]).read_text())
        self.records = Path(self.plan["records"])
        self.file = open(self.records / f"rank0-{os.getpid()}.jsonl", "w")  # noqa: SIM115
        self.steps = self.saves = 0
        self.write("process", pid=os.getpid(), rank=0, world=1, argv=sys.argv, time=time.time())

    def write(self, event: str, **fields: object) -> None:
        print(json.dumps({"event": event, **fields}), file=self.file, flush=True)

    def reach(self, place: str, number: int) -> None:
        kill = self.plan["kill"]
        if not kill or (kill["place"], kill["number"]) != (place, number):
            return
        mark = {"place": place, "number": number, "step": self.steps, "rank": 0, "pid": os.getpid(), "path": None}
        self.write("killed", **mark)
        temporary = self.records / "mark.tmp"
        temporary.write_text(json.dumps(mark))
        temporary.rename(self.records / "mark.json")
        if self.plan["signal"] == "KILL":
            os.kill(os.getpid(), signal.SIGSTOP)
        until(lambda: (self.records / "mark.seen").exists())

    def step(self, row: int, weight: str) -> None:
        self.reach("step", self.steps + 1)
        self.steps += 1
        self.write(
            "step", number=self.steps, optimizer=0, skipped=False, weights={"w": weight}, groups=[{"lr": 0.1}],
            calls=[{"module": "Fake", "in": digest(str(row)), "rows": 1, "out": digest(f"{row} {weight}")}],
        )  # fmt: skip

    def save(self, path: Path, content: dict[str, object]) -> None:
        text = json.dumps(content)
        self.saves += 1
        self.write("write", path=str(path), how="fake")
        path.write_text(text[: len(text) // 2])
        self.reach("write", self.saves)
        path.write_text(text)
        self.write("written", path=str(path), how="fake", after=self.steps, bytes=len(text), content=content)
        self.reach("checkpoint", self.saves)

    def stop_if_planned(self, before: str) -> None:
        """``before``: the weight before the step."""
        if self.plan["steps"] == self.steps or self.plan["until"] == {"w": before}:
            self.write("stopped", number=self.steps)
            os._exit(0)


def until(is_reached) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_reached() and time.monotonic() < deadline:
        time.sleep(0.01)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    if options.fault == "fail":
        raise SystemExit("there is no data")
    if options.fault == "quiet":
        return 0
    recorder, weight, row = FakeRecorder(), "start", 0
    if options.resume:
        recorder.write("loaded", path=str(options.resume), how="fake")
        if options.fault == "refuse":
            raise SystemExit("the checkpoint is of another version")
        state = json.loads(options.resume.read_text())
        weight, row = state["weight"], state["row"] + (options.fault == "forget")
    options.out.mkdir(exist_ok=True)
    while row < options.steps:
        if row % 5 == 0:
            recorder.write("epoch", after=recorder.steps, batches=5)
        recorder.step(time.time_ns() if options.fault == "dice" else row, weight)
        by_chance = time.time_ns() if options.fault in ("chance", "dice") else ""
        before, weight = weight, digest(f"{weight} {row} {by_chance}")
        row += 1
        recorder.stop_if_planned(before)
        if options.fault == "hang":
            until(lambda: False)
        if row % options.save_every == 0:
            folder = Path(options.fault.partition("absolute:")[2] or options.out)
            recorder.save((folder / f"step-{row}.pt").absolute(), {"weight": weight, "row": row})
    recorder.write("end", weights={"w": weight}, state={}, buffers={}, others={}, exception=None)
    return 0


if __name__ == "__main__":
    signal.alarm(int(LIMIT_S))
    raise SystemExit(main())
