"""The command line of the campaign; see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.campaign import chain, page, plan, start
from harness.distributed import processes


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign, or one chain of it; return 1 if there was a problem."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="chains are started until this many kills have hit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="chains at a time")
    parser.add_argument(
        "--logical-ranks", action="store_true", help="chains with parallel.logical_ranks, on other numbers of ranks"
    )
    parser.add_argument(
        "--chain", metavar="SEED-NUMBER[-logical]", help="run one chain, print its result, and keep its folder"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/campaign"), help="for the state of a campaign")
    parser.add_argument("--no-page", action="store_true", help="do not write benchmarks/results/campaign.md")
    arguments = parser.parse_args(words)
    preload()
    if arguments.chain:
        seed, number, *logical = arguments.chain.split("-")
        return _one(arguments.folder.absolute() / "one", plan.chain(int(seed), int(number), bool(logical)))
    commit = _commit()
    folder = arguments.folder.absolute() / f"seed-{arguments.seed}{'-logical' * arguments.logical_ranks}-{commit}"
    started = time.monotonic()
    before = sum(result["wall_s"] for result in _results(folder))
    interrupted = _all(folder, arguments)
    results = _results(folder)
    if not results or interrupted:
        print(f"stopped after {len(results)} chains; the same command goes on", file=sys.stderr)
        return 130
    wall_s = time.monotonic() - started + before / arguments.jobs
    text = page.text(results, arguments.seed, commit, time.strftime("%Y-%m-%d"), wall_s, arguments.logical_ranks)
    if arguments.no_page:
        print(text)
    else:
        if arguments.logical_ranks:
            machine.write("same_bits", "Runs that are killed and resumed on other numbers of ranks", text)
        else:
            machine.write("campaign", "Runs that are killed and resumed", text)
    return int(any(result["problems"] for result in results))


def preload() -> None:
    """Import everything that a rank imports, so that a forked rank starts at once."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed.fsdp
    import torch.distributed.launch
    import torch.distributed.run
    import torchvision  # noqa: F401

    import harness.engines.local.engine
    import harness.inference.predict
    import harness.tasks.image_csv.task
    import harness.tasks.pet_names.task
    import harness.training.main
    import harness.training.model.built_in.char_gru
    import harness.training.model.built_in.small_cnn  # noqa: F401

    torch.set_num_threads(1)


def _one(folder: Path, planned: plan.Chain) -> int:
    data = _data(folder)
    result = chain.run(planned, folder / planned.name, data)
    print(json.dumps(result, indent=1))
    return int(bool(result["problems"]))


def _data(folder: Path) -> Path:
    data = folder / "data"
    if not (data / "names.txt").exists():  # the last file that is written
        plan.write_data(data)
    return data


def _all(folder: Path, arguments: argparse.Namespace) -> bool:
    """Run chains until enough kills have hit, some at a time; True if a signal ended it before."""
    num_kills, num_jobs = arguments.kills, arguments.jobs
    data = _data(folder)
    (folder / "results").mkdir(exist_ok=True)
    running: dict[int, int] = {}
    number = 0

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        while running or _kills(folder, number) < num_kills:
            while len(running) < num_jobs and _kills(folder, number) < num_kills:
                if not chain.result_path(folder, number).exists():
                    planned = plan.chain(arguments.seed, number, arguments.logical_ranks)
                    work = _recorded(folder, data, planned, number)
                    running[_forked(work)] = number
                number += 1
            if running:
                pid, status = os.wait()
                _print_result(folder, running.pop(pid), status)
    except KeyboardInterrupt:
        return True
    finally:
        for pid in running:
            for child in [*start.descendants(pid), pid]:
                processes.send(signal.SIGKILL, [child])
    return False


def _recorded(folder: Path, data: Path, planned: plan.Chain, number: int) -> Callable[[], None]:
    return lambda: chain.record(folder, number, lambda: chain.run(planned, folder / "chains" / planned.name, data))


def _forked(work: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def _print_result(folder: Path, number: int, status: int) -> None:
    """Print one line about a chain that ended."""
    path = chain.result_path(folder, number)
    if not path.exists():
        raise RuntimeError(f"chain {number} died: {os.waitstatus_to_exitcode(status)}")
    result = json.loads(path.read_text())
    traits = ", ".join(result["traits"][key] for key in ("engine", "level", "strategy", "ranks"))
    problems = "; ".join(f"{problem['kind']}: {problem['text']}" for problem in result["problems"]) or "exact"
    print(f"{result['name']} ({traits}): {len(result['kills'])} kills, {result['wall_s']} s: {problems}", flush=True)


def _results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]


def _kills(folder: Path, number: int) -> int:
    """How many kills the finished chains before ``number`` had."""
    paths = [path for path in (folder / "results").glob("*.json") if int(path.stem) < number]
    return sum(len(json.loads(path.read_text())["kills"]) for path in paths)


def _commit() -> str:
    """The commit of the working tree, with "-changed" if files differ from it."""

    def ask(*command: str) -> str:
        return subprocess.run(
            ["git", *command], capture_output=True, text=True, check=True, cwd=start.ROOT
        ).stdout.strip()

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", "harness", "benchmarks/*.py", "driver.py")
    return ask("rev-parse", "--short=9", "HEAD") + ("-changed" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
