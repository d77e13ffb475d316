"""Stands in for ``harness launch`` in tests of sweeps: a process that behaves like a run, but in milliseconds.

It writes the same files, obeys the same signals, exits with the same codes and resumes from its last finished epoch.
``behaviour.json`` next to the sweep folder scripts it: {"0001": "fail"}. It imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

EPOCHS, TICKS, TICK_S, SLOW_TICK_S = 4, 4, 0.005, 0.2


def main(words: list[str]) -> int:
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    run = Path(settings["output"]) / settings["name"].strip('"')
    run.mkdir(parents=True, exist_ok=True)
    behaviour = _behaviour(run).get(run.name, "")
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with open(run.parent.parent / "who_ran.txt", "a") as file:
        nproc = settings.get("launch.nproc", "1")
        file.write(f"start {run.name} {nproc} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")
        file.flush()
        code = _train(run, settings, behaviour, asked)
        file.write(f"end {run.name} {nproc} {code}\n")
    return code


def _behaviour(run: Path) -> dict[str, str]:
    path = run.parent.parent.parent / "behaviour.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _train(run: Path, settings: dict[str, str], behaviour: str, asked: list[int]) -> int:
    (run / "failure.json").unlink(missing_ok=True)
    history = []
    if (run / "state.json").exists():
        history = json.loads((run / "state.json").read_text())
    text = "".join(_line("eval", each) for each in history)
    (run / "metrics.jsonl").write_text(text)
    starts = run / "starts.txt"
    with open(starts, "a") as file:
        file.write("x")
    if behaviour == "refused":
        early = {
            "rank": None,
            "cause": "error",
            "exit_code": 2,
            "message": "x.yaml: something is wrong",
            "hint": "fix it",
        }
        Path(os.environ["HARNESS_EARLY_FAILURE"]).write_text(json.dumps(early))
        return 2
    for epoch in range(len(history) + 1, EPOCHS + 1):
        for tick in range(TICKS):
            with open(run / "metrics.jsonl", "a") as record:
                record.write(
                    _line("train", {"step": epoch * TICKS + tick, "epoch": epoch - 1, "loss": 1 / (epoch + 1)})
                )
            time.sleep(SLOW_TICK_S if behaviour == "slow" else TICK_S)
            if asked:
                return 75
        if behaviour == "fail" and epoch == 2:
            report = {"rank": 0, "cause": "error", "exit_code": 70, "message": "the loss became nan\nand more"}
            (run / "failure.json").write_text(json.dumps(report))
            return 70
        if behaviour.startswith("die") and epoch == 2 and len(starts.read_text()) <= int(behaviour[3:] or 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "orphan" and epoch == 2 and len(starts.read_text()) == 1:
            child = os.fork()
            if child:
                (run / "orphan.txt").write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)
        lr = float(settings.get("optimizer.lr", 0.1))
        value = float("nan") if behaviour == "nan" else round(1 - abs(lr - 0.1) - 0.1 / epoch, 6)
        history.append(
            {
                "step": epoch * TICKS,
                "epoch": epoch,
                "top1": value if value == value else None,
                "char_loss": 3 - value if value == value else None,
            }
        )
        with open(run / "metrics.jsonl", "a") as record:
            record.write(_line("eval", history[-1]))
        if behaviour != "nan":
            (run / "state.json.tmp").write_text(json.dumps(history))
            os.replace(run / "state.json.tmp", run / "state.json")
    summary = {"finished": True, "history": history, "evaluation": history[-1], "wall_s": 1.0}
    (run / "summary.json").write_text(json.dumps(summary))
    return 0


def _line(split: str, values: dict) -> str:
    return json.dumps({"split": split, **values}) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
