"""Runs sweeps over a small experiment in processes of their own, with trials that take milliseconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.tools.sweep.slots import Machine
from tests.fixtures import settings, write_rows, write_yaml
from tests.ranks import start, wait_for

FAKE = Path(__file__).with_name("fake_trial.py")


def write_base(folder: Path, **sections: Any) -> Path:
    """Write ``base.yaml`` in ``folder``, with a few images."""
    if not (folder / "train.csv").exists():
        write_rows(folder, "train", 12)
        write_rows(folder, "eval", 6)
    return write_yaml(folder / "base.yaml", settings(folder, **{"train": {"epochs": 4}, **sections}))


def write_sweep(folder: Path, **content: Any) -> Path:
    """Write ``sweep.yaml`` over ``base.yaml``; ``set_`` stands for ``set``."""
    tree = {"name": "tried", "output": str(folder), "base": "base.yaml"}
    tree |= {key.rstrip("_"): value for key, value in content.items()}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def start_sweep(folder: Path, *words: str, cores: int = 2, gpus: tuple[str, ...] = (), fake: bool = True) -> Any:
    """Start ``harness sweep -c FOLDER/sweep.yaml WORDS`` on a machine of ``cores``; output goes to terminal.txt."""
    return start_command(folder, ["sweep", "-c", f"{folder}/sweep.yaml", *words], Machine(cores, gpus), fake)


def start_command(folder: Path, words: Sequence[str], machine: Machine, fake: bool = True) -> Any:
    """Start ``harness WORDS`` in ``folder`` with quick trials."""
    return start(_run_command, (str(folder), tuple(words), machine, fake))


def sweep(folder: Path, *words: str, timeout_s: float = 60, **machine: Any) -> int:
    """Run the sweep to its end; return its exit code."""
    return wait_for([start_sweep(folder, *words, **machine)], timeout_s)[0]


def _run_command(folder: str, words: tuple[str, ...], machine: Machine, fake: bool) -> None:
    os.chdir(folder)
    terminal = os.open(f"{folder}/terminal.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    from harness import cli
    from harness.tools.sweep import process, runner

    Machine.this = classmethod(lambda cls, visible: machine)  # type: ignore[method-assign,assignment]
    if fake:
        real = process.launch_command
        process.launch_command = lambda *args: [sys.executable, "-S", str(FAKE), *real(*args)[4:]]
        runner._POLL_S = 0.02
    raise SystemExit(cli.main(words))


def output(folder: Path) -> str:
    """The output of the sweeps in ``folder`` so far."""
    return (folder / "terminal.txt").read_text()


def table(folder: Path, name: str = "tried") -> list[dict[str, Any]]:
    """The trials of ``sweep.json``."""
    trials: list[dict[str, Any]] = json.loads((folder / name / "sweep.json").read_text())["trials"]
    return trials


def states(folder: Path) -> list[str]:
    return [trial["state"] for trial in table(folder)]


def trial_folder(folder: Path, number: int) -> Path:
    """The run folder of a trial."""
    return folder / "tried" / "trials" / f"{number:04d}"


def starts(folder: Path, number: int) -> int:
    """The number of times a trial was started."""
    return len((trial_folder(folder, number) / "starts.txt").read_text())
