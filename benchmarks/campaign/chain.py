"""Runs one chain: the uninterrupted run, the kills, the last start, and the verdict."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.campaign import plan, verdict
from benchmarks.campaign.plan import Chain
from benchmarks.campaign.start import End, start
from harness.audit.plan import HowKilled, PlannedKill
from harness.runs.files import write_atomically
from harness.tools.compare.exactness import differences

Result = dict[str, Any]
"""A chain's result as plain data: name, traits, kills, problems, wall_s."""


def run(chain: Chain, folder: Path, data: Path) -> Result:
    """Run ``chain`` in ``folder``, which is removed again unless there is a problem."""
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    runner = _Runner(chain, folder, data)
    try:
        runner.run()
    except Exception as error:  # of the campaign itself, or a run that cannot be read
        runner.problem("failed", f"{type(error).__name__}: {error}")
    if not runner.problems:
        shutil.rmtree(folder)
    return {
        "name": chain.name, "traits": chain.traits, "kills": runner.kills, "problems": runner.problems,
        "wall_s": round(time.monotonic() - started, 2),
    }  # fmt: skip


class _Runner:
    def __init__(self, chain: Chain, folder: Path, data: Path) -> None:
        self._chain, self._folder, self._data = chain, folder, data
        self.kills: list[dict[str, Any]] = []
        self.problems: list[dict[str, str]] = []

    def problem(self, kind: str, text: str) -> None:
        self.problems.append({"kind": kind, "text": text})

    def run(self) -> None:
        chain = self._chain
        unbroken, broken = self._config("unbroken"), self._config("broken")
        sizes = chain.sizes()
        whole = start(unbroken, "bare", next(sizes), None)
        if whole.hung or any(whole.codes):
            codes = whole.hung or f"exit codes {whole.codes}"
            self.problem("failed", f"the uninterrupted run: {codes}; see {unbroken.parent}/terminal.txt")
            return
        num_steps = sum(event["event"] == "step" for event in whole.events[0])  # without those skipped by a loss scaler
        last = _steps_done(self._place(unbroken.parent))
        is_hit = True
        for number, place in enumerate(plan.places(chain)):
            size = next(sizes)
            if is_hit or place in plan.OF_EVERY_START:
                done = _steps_done(self._place(broken.parent))
                kill, how = plan.kill(chain, number, place, size, whole.events, num_steps - done)
                is_hit = self._start(broken, size, place, kill, how, is_trained=done + kill.after >= last)
            if self.problems:
                return
        self._start(broken, next(sizes))
        self._compare(unbroken.parent, broken.parent)

    def _config(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._chain.config(folder, self._data), sort_keys=False))
        return path

    def _start(
        self, config: Path, size: int, place: str = "", kill: PlannedKill | None = None, how: HowKilled = "KILL",
        is_trained: bool = False,
    ) -> bool:  # fmt: skip
        """Start the run on ``size`` ranks, record the kill, and check its end; False if it ended before it could be
        killed. ``is_trained``: the run has made all of its steps before the kill."""
        end = start(config, self._chain.engine, size, kill, how)
        words = "the last start" if kill is None else "a start that ended before its kill"
        if end.killed and kill:
            operation = _operation(end, kill)
            words = (f"{how} to {kill.target} at {kill.place} {kill.number} ({operation}) after {kill.after} steps on "
                     f"rank {kill.rank}, kill {len(self.kills) + 1}")  # fmt: skip
            self.kills.append(
                {"signal": how, "target": kill.target, "place": place, "operation": operation, "rank": kill.rank,
                 "ranks at the kill": size, "codes": end.codes, "end_s": round(end.end_s, 3)}
            )  # fmt: skip
        if end.hung:
            self.problem("hang", f"{words}: {end.hung}")
        elif wrong := verdict.wrong_codes(
            self._chain, kill if end.killed else None, how, place, end.codes, is_trained
        ):  # fmt: skip
            self.problem("exit code", f"{words}: {wrong}")
        return end.killed is not None

    def _compare(self, unbroken: Path, broken: Path) -> None:
        runs = self._place(unbroken), self._place(broken)
        expected, found = map(verdict.digests, runs)
        different = verdict.wrong_bits(expected, found)
        places = differences(*runs)
        if different or places:
            self.problem("wrong bits", "; ".join([", ".join(different) or "equal digests", *map(str, places[:3])]))
        if strays := verdict.stray_files(unbroken, broken, self._chain):
            self.problem("stray file", ", ".join(strays))

    def _place(self, folder: Path) -> Path:
        return folder / ("url/run" if self._chain.at_url else "runs/run")


def _steps_done(run: Path) -> int:
    """The step of the newest checkpoint of a run."""
    newest = run / "checkpoints" / "latest"
    return int(newest.read_text().strip().rpartition("-")[2]) if newest.exists() else 0


def _operation(end: End, kill: PlannedKill) -> str:
    """What the kill interrupted."""
    assert end.killed is not None
    if kill.place != "operation":
        return kill.place
    operations = (event for event in end.events[kill.rank] if event["event"] == "operation")
    return next(event["name"] for event in operations if event["number"] == end.killed["number"])


def record(folder: Path, number: int, run_chain: Callable[[], Result]) -> None:
    """Run a chain and write its result, from which a campaign goes on."""
    write_atomically(result_path(folder, number), json.dumps(run_chain()) + "\n")


def result_path(folder: Path, number: int) -> Path:
    return folder / "results" / f"{number:05d}.json"
