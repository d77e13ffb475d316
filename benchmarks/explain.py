"""Scores ``harness explain``: slow runs with a planted cause, and healthy ones, each trained for a few seconds.

    python -m benchmarks.explain [--only CASE ...] [--out FOLDER]

A case is right if the cause that ``harness explain`` names, and what is asked of its text or settings, are those that
were planted. Other work on the machine is itself a cause of slowness: a case during which other programs used more
than a tenth of the cores is trained again, and if they still do, "other load" may be named before the planted cause.
How much they used is measured here, from /proc/stat, before anything is explained.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torchvision.io import write_jpeg

from benchmarks import machine
from benchmarks.explain_plants import STEP_OF_CHANGE

_ROOT = Path(__file__).parents[1]
_LIMIT_S = 120.0  # of a run
_QUIET = 0.1  # of the cores, for other programs during a run
_HEAVY = [{"RandAugment": {"num_ops": 8, "magnitude": 9}}, {"GaussianBlur": {"kernel_size": 15}}]


@dataclass(frozen=True)
class Case:
    """``expected``: the cause; None for a healthy run. ``text``: a pattern of the answer, exact to a log line.
    ``sets``: the key that it must change. ``changes`` to BASE; ``burners``: programs that each keep a core busy."""

    name: str
    expected: str | None
    plant: str = "none"
    changes: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    threads: int = 1
    text: str = ""
    sets: str = ""
    burners: int = 0
    data: str = "small"


BASE: dict[str, Any] = {
    "seed": 1, "model.name": "small_cnn", "model.args": {"width": 16}, "batch.global": 32, "optimizer.lr": 0.01,
    "precision.opt_level": "O0", "data.num_workers": 1, "train.epochs": 1000, "train.max_steps": 120,
    "train.log_every": 5, "train.evaluate_every": 1000, "schedule.warmup_epochs": 0, "runtime.device": "cpu",
}  # fmt: skip
_PLANTS = "benchmarks.explain_plants"
_MLP = {"model.name": "mlp", "model.args": None}  # which computes little
_EACH = {"train.log_every": 1}  # for runs of few steps

CASES = (
    Case("a slow disk", "reading", "slow disk", {**_MLP, **_EACH, "train.max_steps": 8}),
    Case("huge JPEGs", "decoding", changes={**_MLP, **_EACH, "train.max_steps": 12}, data="huge"),
    Case("heavy augmentation", "augmentation",
         changes={**_MLP, "train.max_steps": 60, "task.transforms": {"train": _HEAVY}}),
    Case("slow code of the dataset", "dataset code", "slow dataset", {**_MLP, **_EACH, "train.max_steps": 30}),
    Case("no loader process", "too few workers", "distant disk", {"data.num_workers": 0, "train.max_steps": 60},
         sets="data.num_workers"),
    Case("too few loader processes", "too few workers", "more distant disk", {"train.max_steps": 40},
         sets="data.num_workers"),
    Case("too many loader processes", "too many workers",
         changes={"data.num_workers": 24, "train.max_steps": 200, "task.transforms": {"train": _HEAVY}},
         sets="data.num_workers"),
    Case("too many threads", "too many threads", changes={"train.max_steps": 60}, threads=16, sets="launch.threads"),
    Case("one slow rank", "slow rank", "slow rank 1", {"train.max_steps": 80, "data.num_workers": 0}, 2,
         text="rank 1, which computes more slowly, from the start"),
    Case("one rank slow later", "slow rank", "slow rank 1 later", {"train.max_steps": 80, "data.num_workers": 0}, 2,
         text=f"rank 1, .*, since step ({STEP_OF_CHANGE - 5}|{STEP_OF_CHANGE}|{STEP_OF_CHANGE + 5})"),
    Case("the disk of one rank", "slow rank", "slow disk of rank 0",
         {**_MLP, **_EACH, "train.max_steps": 12}, 2, text="rank 0, which waits for its data"),
    Case("a huge all-reduce", "gradient volume",
         changes={"model.name": f"{_PLANTS}.WideEmbedding", "model.args": None, "train.max_steps": 20,
                  "train.log_every": 2}, ranks=2, sets="batch.global"),
    Case("a slow link", "slow link", "slow link", {"train.max_steps": 60, "data.num_workers": 0}, 2),
    Case("tiny batches", "tiny batches",
         changes={"model.name": f"{_PLANTS}.ManyLayers", "model.args": {"layers": 60}, "data.num_workers": 0,
                  "batch.global": 2, "train.max_steps": 400, "train.log_every": 25},
         sets="batch.global"),
    Case("many small operations", "small operations",
         changes={"model.name": f"{_PLANTS}.ManyLayers", "model.args": None}, sets="model.compile"),
    Case("too many micro-batches", "micro-batches",
         changes={"model.name": f"{_PLANTS}.ManyLayers", "model.args": {"layers": 20}, "batch.accumulate": 32,
                  "data.num_workers": 0, "train.max_steps": 40}, sets="batch.accumulate"),
    Case("evaluation too often", "frequent evaluation",
         changes={"train.evaluate_every": 1, "train.max_steps": 80}, data="small epochs", sets="train.evaluate_every"),
    Case("slow validation data", "slow evaluation", "slow disk of validation",
         {"train.evaluate_every": 1, "train.max_steps": 128}),
    Case("a checkpoint every step", "frequent checkpoints",
         changes={**_MLP, "checkpoint.every_steps": 1, "train.max_steps": 60}, sets="checkpoint.every_steps"),
    Case("a slow store", "slow checkpoints", "slow store", {"checkpoint.every_steps": 15, "train.max_steps": 60},
         sets="checkpoint.async_save"),
    Case("other load", "other load", burners=6, changes={"train.max_steps": 40}),
    Case("a slow disk for the log", "log lines", "slow log", {"train.log_every": 1, "train.max_steps": 80},
         sets="train.log_every"),
    Case("a tracker that draws", "trackers", sets="trackers",
         changes={"trackers": [f"{_PLANTS}.PictureTracker"], "train.max_steps": 60}),
    Case("healthy: CNN", None),
    Case("healthy: CNN without loader processes", None, changes={"data.num_workers": 0, "model.args": {"width": 48},
                                                               "train.max_steps": 40, "train.log_every": 2}),
    Case("healthy: CNN on 2 ranks", None, ranks=2,
         changes={"data.num_workers": 0, "model.args": {"width": 48}, "train.max_steps": 40, "train.log_every": 2}),
    Case("healthy: with validation, checkpoints and logs", None,
         changes={"train.evaluate_every": 2, "checkpoint.every_steps": 50, "train.max_steps": 192}),
    Case("healthy: ResNet-18", None,
         changes={"model.name": "resnet18", "model.args": None, "train.max_steps": 30, "train.log_every": 2}),
)  # fmt: skip


def write_table(folder: Path, name: str, rows: int, images: int, size: int) -> Path:
    """``name.csv`` with ``rows`` rows of ``images`` JPEGs of about ``size`` x ``size``."""
    places = folder / name
    places.mkdir(parents=True)
    rng = np.random.default_rng(rows)
    for number in range(images):
        coarse = rng.integers(0, 256, (3, -(-size // 4), -(-size // 4)), dtype=np.uint8)
        write_jpeg(torch.from_numpy(coarse.repeat(4, 1).repeat(4, 2)), str(places / f"{number}.jpg"))
    lines = [f"{name}/{row % images}.jpg,{row % 3}" for row in range(rows)]
    (folder / f"{name}.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return folder / f"{name}.csv"


def write_data(folder: Path) -> dict[str, dict[str, Any]]:
    """{kind of data: settings}."""
    eval_csv = write_table(folder, "eval", 96, 96, 32)
    tables = {
        "small": write_table(folder, "train", 2048, 256, 32),
        "small epochs": write_table(folder, "few", 64, 64, 32),
        "huge": write_table(folder, "huge", 512, 16, 1400),
    }
    return {
        kind: {"name": "image_csv", "train_csv": str(csv), "eval_csv": str(eval_csv), "root": str(folder),
               "color": "rgb", "image_size": [32, 32]}
        for kind, csv in tables.items()
    }  # fmt: skip


def write_config(folder: Path, case: Case, task: Mapping[str, Any]) -> Path:
    tree: dict[str, Any] = {"name": "run", "output": str(folder), "task": dict(task)}
    tree |= {"data": {"cache_dir": str(folder.parent / "cache")}}
    for key, value in (BASE | dict(case.changes)).items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    folder.mkdir(parents=True)
    path_of = folder / "config.yaml"
    path_of.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path_of


def train(case: Case, config: Path) -> None:
    """Train a case, each rank in a process of its own."""
    with ExitStack() as stack:
        for _ in range(case.burners):
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(burner.wait)
            stack.callback(burner.kill)
        command = [sys.executable, "-m", _PLANTS, case.plant, str(config)]
        port = str(20_000 + os.getpid() % 20_000)
        ranks = []
        for rank in range(case.ranks):
            environ = os.environ | {"OMP_NUM_THREADS": str(case.threads), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environ |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if case.ranks == 1:
                environ = {key: value for key, value in os.environ.items()} | {"OMP_NUM_THREADS": str(case.threads)}
            ranks.append(
                subprocess.Popen(command, cwd=_ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
            stack.callback(ranks[-1].kill)
        for process in ranks:
            _, errors = process.communicate(timeout=_LIMIT_S)
            if process.returncode:
                raise RuntimeError(f"{case.name}: exit code {process.returncode}\n{errors.decode()[-2000:]}")


def wait_for_quiet() -> None:
    """Wait at most 20 s for the other programs to pause."""
    until = time.perf_counter() + 20
    while time.perf_counter() < until:
        load = machine.OtherLoad()
        time.sleep(2)
        if load.share() < _QUIET:
            return


def ask(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "harness.cli", "explain", "--json", str(folder)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def answer(case: Case, found: Mapping[str, Any], disturbed: float) -> Mapping[str, Any]:
    """The answer to judge: the next one, if the first is that other programs disturb the run, and they did."""
    if found["cause"] == "other load" != case.expected and disturbed > _QUIET:
        return found["then"][0] if found["then"] else {"cause": None, "text": "", "set": {}}
    return found


def is_right(case: Case, judged: Mapping[str, Any]) -> bool:
    sets = not case.sets or case.sets in judged["set"]
    return judged["cause"] == case.expected and bool(re.search(case.text, judged["text"])) and sets


def run(case: Case, folder: Path, tasks: Mapping[str, Mapping[str, Any]], tries: int) -> tuple[dict[str, Any], float]:
    """(the answer, the share of the cores that other programs used meanwhile), on a machine as quiet as it gets."""
    for attempt in range(tries):
        config = write_config(
            folder / f"{case.name.replace(' ', '_').replace(':', '')}-{attempt}", case, tasks[case.data]
        )
        if tries > 1:
            wait_for_quiet()
        load = machine.OtherLoad()
        train(case, config)
        disturbed = load.share()
        if disturbed < _QUIET:
            break
    return ask(config.parent / "run"), disturbed


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases; prints and does not write the page")
    parser.add_argument("--tries", type=int, default=4, help="to find the machine quiet; 1 does not wait (default: 4)")
    parser.add_argument("--out", type=Path, help="folder to keep the runs in")
    arguments = parser.parse_args(words)
    rows, right = [], {True: 0, False: 0}
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        tasks = write_data(folder / "data")
        for case in cases:
            found, disturbed = run(case, folder, tasks, arguments.tries)
            judged = answer(case, found, disturbed)
            good = is_right(case, judged)
            right[case.expected is None] += good
            text = judged["text"].partition("/run ")[2]
            print(f"{'right' if good else 'WRONG'}  {case.name}: {text}", flush=True)
            if not good:
                print("   ", {name: round(share, 3) for name, share in found["shares"].items()}, flush=True)
                print("   ", {k: v for k, v in found["facts"].items() if k not in ("path", "spent")}, flush=True)
            named = judged["cause"] or "not slow"
            named = named if judged is found else f"other load, then {named if judged['cause'] else 'nothing'}"
            rows.append([case.name, case.expected or "not slow", named, "right" if good else "**wrong**",
                         f"{disturbed:.0%}", text])  # fmt: skip
    if not arguments.only:
        write(rows, right)


def write(rows: list[list[str]], right: Mapping[bool, int]) -> None:
    planted = sum(case.expected is not None for case in CASES)
    after = [row[1] for row in rows if row[2].startswith("other load, then") and row[3] == "right"]
    healthy = after.count("not slow")
    text = f"""{time.strftime("%Y-%m-%d")}: right in **{right[False]} of {planted}** planted causes and
**{right[True]} of {len(CASES) - planted}** healthy runs. In {len(after) - healthy} of the former and {healthy} of the
latter, the first answer was "other load", which was true, so the second answer was judged (see below).

{machine.table(["planted", "expected", "named", "", "other programs", "answer"], rows)}

Each is a training run of a few seconds, with the cause planted by `benchmarks/explain_plants.py` or by a setting.
"Other programs" is the share of the cores that programs outside this benchmark used, from /proc/stat. Above 10 %,
"other load" is a second, real cause: if it is named first, the second answer is judged. A healthy run is then right if
no other cause is named."""
    machine.write("explain", "Causes found by harness explain", text)


if __name__ == "__main__":
    main()
