"""Measures the time from a command to its first training step, by phase, and that of commands which need no torch.

    python -m benchmarks.start [--rounds 7]

Every command is a new process, with all files in the page cache. They take turns, in another order each round. The
reference is the time until ``import torch`` is done in a new Python, plus that of opening the data once more.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOAL, GOAL_CHECK_S = 1.3, 0.5
LIMIT_S = 120.0  # of any command
REFERENCE = "import torch"
OPEN = "opening the data"
TORCH = "import os, torch, time; print(time.monotonic(), flush=True); os._exit(0)"
OPENED = """
import sys, time
from pathlib import Path
from harness.config import loader
config = loader.load(sys.argv[1], sys.argv[2:])
cache = Path(config.data.cache_dir)
config.task.open(0, cache)
start = time.monotonic()
config.task.open(0, cache)
print(time.monotonic() - start)
"""
# (module, function, whether the phase ends before or after the call, phase), in the order in which they end
PHASES = [
    ("harness.training.run_start", "open_runtime", "before", "configuration"),
    ("harness.training.main", "run_rank", "before", "meeting of the ranks"),
    ("harness.training.run_start", "prepare_folder", "after", "run folder"),
    ("harness.training.rows.opening", "open_task", "after", "opening the data"),
    ("harness.training.build", "build_model", "after", "building the model"),
    ("harness.training.build", "build", "after", "optimizer, amp, loaders"),
    ("harness.training.description", "announce", "after", "provenance"),
    ("harness.training.loop", "step", "before", "first batch"),
    ("harness.training.loop", "step", "after", "first step"),
]
HEADER = ["command", "seconds", "quartiles", "ratio", "quartiles", "ratio of processor time", "goal", "reached"]
IMPORTS = ["Python", "imports", *(phase for *_, phase in PHASES)]


def observe(file: str, words: list[str]) -> None:
    """Run ``harness train WORDS`` and append to ``file`` when its phases ended. It ends after a step."""
    from harness import cli
    from harness.training import train_command

    ends = {"Python": time.monotonic()}
    look = train_command._checked_config

    def marked(function: Callable[..., Any], when: str, phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                ends.setdefault(phase, time.monotonic())
            result = function(*args, **kwargs)
            if when == "after":
                ends.setdefault(phase, time.monotonic())
            if phase == PHASES[-1][-1]:
                with open(file, "a") as out:
                    out.write(json.dumps(ends) + "\n")
                args[0].runtime.barrier()  # a rank that ends would disturb the others
                os._exit(0)
            return result

        return call

    def looked(arguments: Any) -> Any:
        config = look(arguments)
        owners = {module: importlib.import_module(module) for module, *_ in PHASES}  # as the caller does next
        ends["imports"] = time.monotonic()
        for module, name, when, phase in PHASES:
            owner = owners[module]
            setattr(owner, name, marked(getattr(owner, name), when, phase))
        return config

    train_command._checked_config = looked
    cli.command(["train", *words])


def observer(folder: Path, marks: Path) -> Path:
    """A program for ``launch.python``: ranks that are started with it are observed."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m benchmarks.start --observe {marks} "$@"\n')
    program.chmod(0o755)
    return program


def first_step(words: list[str], folder: Path, num_ranks: int) -> dict[str, float]:
    """{phase: seconds} of the slowest rank, up to its first step."""
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    start = time.monotonic()
    if words[0] == "train":
        command = [sys.executable, "-m", "benchmarks.start", "--observe", str(marks), *words[1:]]
    else:
        command = [sys.executable, "-m", "harness", *words, f"launch.python={observer(folder, marks)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    ranks = [json.loads(line) for line in marks.read_text().splitlines()] if marks.exists() else []
    if len(ranks) != num_ranks:
        raise RuntimeError(f"{len(ranks)} of {num_ranks} ranks took a step:\n{done.stderr}")
    last = max(ranks, key=lambda ends: ends[IMPORTS[-1]])
    spent, before = {}, start
    for phase in IMPORTS:
        if phase in last:
            spent[phase], before = last[phase] - before, last[phase]
    return spent


def processor_s() -> float:
    """Seconds on a core of all commands that have ended, which another load of the machine does not change."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def until_printed(code: str, *words: str) -> float:
    command = [sys.executable, "-c", code, *words]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S).stdout)


def whole(words: list[str]) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "harness", *words], capture_output=True, timeout=LIMIT_S)
    return time.monotonic() - start


def shown(values: list[float]) -> list[str]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--config", default="configs/digits.yaml")
    parser.add_argument("--observe", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.observe:
        observe(arguments.observe[0], arguments.observe[1:])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        write(*measure(Path(name), arguments.config, arguments.rounds), arguments)


def measure(
    folder: Path, config: str, rounds: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[float]], list[float], list[dict[str, float]]]:
    """({run: the phases of each round}, {command without torch: seconds}, seconds of the reference, {run: ratio of
    processor time to that of the reference} of each round)."""
    subprocess.run([sys.executable, "-m", "harness", "data", "digits", str(folder / "data")], check=True)
    given = [f"task.train_csv={folder}/data/train.csv", f"task.eval_csv={folder}/data/eval.csv"]
    given += [f"task.root={folder}/data", f"data.cache_dir={folder}/cache"]
    words = ["-c", config, *given, f"output={folder}/runs", "checkpoint.resume=never"]
    runs = {"train": (["train", *words], 1)}
    runs |= {f"launch, {n} rank{'s' * (n > 1)}": (["launch", "--nproc", str(n), *words], n) for n in (1, 2, 8)}
    light = {"check, with a typo": ["check", *words, "trian.epochs=1"]}
    light |= {"launch, with a typo": ["launch", *words, "trian.epochs=1"]}
    light |= {"launch --help": ["launch", "--help"], "launch --dry-run": ["launch", *words, "--dry-run"]}
    phases: dict[str, list[dict[str, float]]] = {run: [] for run in runs}
    seconds: dict[str, list[float]] = {command: [] for command in light}
    reference, busy = [], []
    for index in range(rounds + 1):  # the first fills the caches
        start, before = time.monotonic(), processor_s()
        torch_s = until_printed(TORCH) - start
        used_s = processor_s() - before
        opening_s = until_printed(OPENED, config, *given)
        order = list(runs)
        found, used = {}, {}
        for run in order[index % 4 :] + order[: index % 4]:
            before = processor_s()
            found[run] = first_step(runs[run][0], folder, runs[run][1])
            used[run] = (processor_s() - before) / (used_s + opening_s)
        if index:
            reference.append(torch_s + opening_s)
            busy.append(used)
            for run in runs:
                phases[run].append(found[run])
            for command in light:
                seconds[command].append(whole(light[command]))
    return phases, seconds, reference, busy


def write(
    phases: dict[str, list[dict[str, float]]],
    seconds: dict[str, list[float]],
    reference: list[float],
    busy: list[dict[str, float]],
    arguments: Any,
) -> None:
    from benchmarks import machine

    rows = [["import torch, and opening the data", *shown(reference), "1", "", "1", "", ""]]
    for run, rounds in phases.items():
        totals = [sum(each.values()) for each in rounds]
        ratios = [total / other for total, other in zip(totals, reference, strict=True)]
        reached = "yes" if statistics.median(ratios) <= GOAL else "no"
        processor = f"{statistics.median(used[run] for used in busy):.2f}"
        rows.append([run, *shown(totals), *shown(ratios), processor, f"{GOAL}", reached])
    for command, values in seconds.items():
        reached = "yes" if statistics.median(values) <= GOAL_CHECK_S else "no"
        rows.append([command, *shown(values), "", "", "", f"{GOAL_CHECK_S} s", reached])
    parts = []
    for phase in IMPORTS:
        medians = [statistics.median(each.get(phase, 0.0) for each in rounds) for rounds in phases.values()]
        parts.append([phase, *(f"{1000 * seconds:.0f}" for seconds in medians)])
    text = f"""Time from the command to the end of the slowest rank's first step, for `{arguments.config}`, and time of
commands that end before torch is needed. {arguments.rounds} rounds, a new process per command, one thread per rank;
medians and quartiles. The load average was {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: under load, compare
processor times.

{machine.table(HEADER, rows)}

Milliseconds by phase, medians. The ranks of a launch share {os.cpu_count()} cores.

{machine.table(["phase", *phases], parts)}"""
    machine.write("start", "From the command to the first step", text)


if __name__ == "__main__":
    main()
