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
from benchmarks.campaign.job import End, Job
from benchmarks.campaign.plan import Chain
from benchmarks.campaign.trigger import Kill
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
        whole = Job(unbroken, "bare", next(sizes), None).run()
        if not whole.done:
            self.problem(
                "failed", f"the uninterrupted run: {self._codes(None, whole)}; see {unbroken.parent}/terminal.txt"
            )
            return
        is_hit = True
        starts = [next(sizes) for _ in range(chain.num_kills)]
        for size, kill in plan.kills(chain, starts, whole.counts):
            if is_hit or kill.place in plan.OF_EVERY_START:
                is_hit = self._start(broken, size, kill)
            if self.problems:
                return
        self._start(broken, next(sizes), None)
        self._compare(unbroken.parent, broken.parent)

    def _config(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._chain.config(folder, self._data), sort_keys=False))
        return path

    def _start(self, config: Path, size: int, kill: Kill | None) -> bool:
        """Start the run on ``size`` ranks, record the kill, and check its end; False if it ended before it could be
        killed."""
        end = Job(config, self._chain.engine, size, kill).run()
        if end.fired and kill:
            self.kills.append(
                {"signal": kill.how, "target": kill.target, "place": kill.place, "operation": end.fired["fired"],
                 "rank": kill.rank, "ranks at the kill": size, "codes": end.codes, "end_s": round(end.end_s, 3)}
            )  # fmt: skip
        if end.hung:
            what = f"after {self._words(kill, end)}" if end.fired else "a start that nothing killed"
            self.problem("hang", f"{what}: still running: {'; '.join(end.hung)}")
        if wrong := verdict.wrong_codes(self._chain, kill, end):
            self.problem("exit code", f"{self._words(kill, end)}: {wrong}")
        return end.fired is not None

    def _words(self, kill: Kill | None, end: End) -> str:
        if kill is None or end.fired is None:
            return "the last start" if kill is None else "a start that ended before its kill"
        return (
            f"{kill.how} to {kill.target} at operation {kill.number} ({end.fired['fired']}) of {kill.place} "
            f"on rank {kill.rank}, kill {len(self.kills)}"
        )

    def _codes(self, kill: Kill | None, end: End) -> str:
        return verdict.wrong_codes(self._chain, kill, end) or "hung"

    def _compare(self, unbroken: Path, broken: Path) -> None:
        place = "url/run" if self._chain.at_url else "runs/run"
        expected, found = (verdict.digests(folder / place) for folder in (unbroken, broken))
        different = verdict.wrong_bits(expected, found)
        places = differences(unbroken / place, broken / place)
        if different or places:
            self.problem("wrong bits", "; ".join([", ".join(different) or "equal digests", *map(str, places[:3])]))
        if strays := verdict.stray_files(unbroken, broken, self._chain):
            self.problem("stray file", ", ".join(strays))


def record(folder: Path, number: int, run_chain: Callable[[], Result]) -> None:
    """Run a chain and write its result, from which a campaign goes on."""
    write_atomically(result_path(folder, number), json.dumps(run_chain()) + "\n")


def result_path(folder: Path, number: int) -> Path:
    return folder / "results" / f"{number:05d}.json"
