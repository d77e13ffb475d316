"""The result of a benchmark of strategies: tables, and where the time of a step went.

Every figure is a measurement or the difference of two. Of several rounds the fastest counts, because other work on a
machine only slows it down. The time of a step of a strategy on N processes consists of:

    ideal          a step of one process, divided: its time x rows per rank / its rows
    batch          one process alone with the rows of one rank, less the ideal: costs that do not shrink with the batch
    contention     N processes without communication, side by side, less one alone: shared cores, caches and memory
    overhead       the strategy without communication, less that: copies, hooks, work per bucket or block
    communication  the strategy, less that: communication, and waiting for the slowest rank
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness.errors import plural
from harness.runs.files import write_atomically

Figures = dict[str, Any]  # of one case in one round, see harness.tools.benchmark.case.measure
PARTS = ("ideal", "batch", "contention", "overhead", "communication")
_CAUSES = {
    "batch": "costs that do not shrink with the batch (one process alone takes this much longer for its rows)",
    "contention": "processes that share the machine (without communication they slow each other down by this much)",
    "overhead": "copies and hooks of the strategy (they add this much even without communication)",
    "communication": "communication and waiting for the slowest rank",
}


@dataclass(frozen=True)
class Bench:
    """``cases``: name, processes, rows (per process), communication, rounds (their figures)."""

    config: str
    model: str
    level: str
    steps: int
    threads: int
    cases: list[dict[str, Any]]
    left_out: dict[str, str]

    def find(self, name: str, processes: int, rows: int, communication: str) -> dict[str, Any]:
        wanted = {"name": name, "processes": processes, "rows": rows, "communication": communication}
        return next(case for case in self.cases if wanted.items() <= case.items())

    @property
    def single(self) -> dict[str, Any]:
        """One process with all rows: the baseline."""
        return self.cases[0]

    @property
    def distributed(self) -> list[dict[str, Any]]:
        """The strategies on several processes."""
        return [case for case in self.cases if case["communication"] == "real"]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The cases that a user chooses between."""
        rows = self.single["rows"]
        return [c for c in self.cases if c["communication"] == "real" or (c["processes"] == 1 and c["rows"] == rows)]


def best(case: dict[str, Any], key: str) -> float:
    """The smallest value of all rounds."""
    return float(min(figures[key] for figures in case["rounds"]))


def spread(case: dict[str, Any], key: str = "train_s") -> float:
    """The median round less the best: smaller differences are noise."""
    return float(statistics.median(figures[key] for figures in case["rounds"])) - best(case, key)


def speed(case: dict[str, Any], key: str) -> float:
    """Rows per second over all processes."""
    return best(case, "rows") / best(case, key)


def parts(bench: Bench, case: dict[str, Any], key: str = "train_s") -> dict[str, tuple[float, float]]:
    """{part of a step: (seconds, noise in seconds)}. The seconds add up to the step; noise can make a part negative."""
    rows, processes = case["rows"], case["processes"]
    share = rows / bench.single["rows"]
    cases = [
        bench.find("none", 1, rows, "none"),
        bench.find("none", processes, rows, "none"),
        bench.find(case["name"], processes, rows, "fake"),
        case,
    ]
    marks = [(best(bench.single, key) * share, spread(bench.single, key) * share)]
    marks += [(best(each, key), spread(each, key)) for each in cases]
    steps = zip(PARTS, [(0.0, 0.0), *marks[:-1]], marks, strict=True)
    return {name: (after[0] - before[0], after[1] + before[1]) for name, before, after in steps}


def write(bench: Bench, out: Path) -> list[Path]:
    """Write ``strategies.md`` and ``strategies.json``; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "strategies.md", out / "strategies.json"]
    write_atomically(written[0], page(bench))
    write_atomically(written[1], json.dumps({"machine": machine(), **asdict(bench)}, indent=1) + "\n")
    return written


def page(bench: Bench) -> str:
    rounds = len(bench.single["rounds"])
    lines = [
        f"# Strategies: {bench.config} ({bench.model}, {bench.level})",
        "",
        f"Machine: {machine()}. {plural(bench.threads, 'thread')} per process. Each case ran in fresh processes, in "
        f"{plural(rounds, 'round')} over all cases. Each time is the 10th percentile of "
        f"{plural(bench.steps, 'step')}, on the slowest rank, in the best round. Reading data is not measured.",
        *_warning(bench),
        "",
        "## Training",
        "",
        *_table(_training(bench)),
        "",
        "Peak memory excludes the interpreter and its libraries. State is weights, gradients and optimizer state. Both "
        "are per rank. ± is the difference between the median round and the best.",
        "",
        "## Inference (the same rows, no gradients)",
        "",
        *_table(_inference(bench)),
        "",
    ]
    if bench.distributed:
        lines += ["## Where the time of a training step goes, in ms", "", *_table(_breakdown(bench)), ""]
        lines += ["## Diagnosis", "", *(f"- {text}" for text in diagnosis(bench)), ""]
    lines += [f"Left out: {name}: {why}\n" for name, why in bench.left_out.items()]
    return "\n".join(lines)


def _warning(bench: Bench) -> Iterator[str]:
    """A warning if the rounds of a case differ a lot, or if there is only one."""
    if len(bench.single["rounds"]) == 1:
        yield from ("", "**One round only**: the noise is unknown; use --rounds 3.")
        return
    worst = max(bench.cases, key=lambda case: spread(case) / best(case, "train_s"))
    share = spread(worst) / best(worst, "train_s")
    if share > 0.1:
        yield ""
        yield (
            f"**The machine was busy**: the median round of {worst['name']} on {plural(worst['processes'], 'process')} "
            f"was {share:.0%} slower than its best. Smaller differences are not meaningful."
        )


def _table(rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def _training(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", "rows per step", "ms per step", "rows/s", "speed-up", "communication", "peak MiB",
             "state MiB"]]  # fmt: skip
    for case in bench.shown:
        share = parts(bench, case)["communication"][0] / best(case, "train_s") if case in bench.distributed else 0.0
        rows.append(
            [_label(case), str(case["processes"]), f"{best(case, 'rows'):.0f}",
             f"{best(case, 'train_s') * 1e3:.2f} ± {spread(case) * 1e3:.2f}", f"{speed(case, 'train_s'):.0f}",
             f"{speed(case, 'train_s') / speed(bench.single, 'train_s'):.2f}", f"{max(share, 0):.0%}",
             f"{best(case, 'peak_bytes') / 2**20:.0f}", f"{best(case, 'held_bytes') / 2**20:.1f}"]
        )  # fmt: skip
    return rows


def _label(case: dict[str, Any]) -> str:
    """The strategy; for dp also the devices, because without a second one it trains on one device."""
    return str(case["rounds"][0]["parallel"]) if case["name"] == "dp" else str(case["name"])


def _inference(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", "ms", "rows/s", "speed-up"]]
    for case in bench.shown:
        rows.append(
            [_label(case), str(case["processes"]), f"{best(case, 'forward_s') * 1e3:.2f}",
             f"{speed(case, 'forward_s'):.0f}", f"{speed(case, 'forward_s') / speed(bench.single, 'forward_s'):.2f}"]
        )  # fmt: skip
    return rows


def _breakdown(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", *PARTS, "step"]]
    for case in bench.distributed:
        took = [f"{value * 1e3:.2f}" for value, _ in parts(bench, case).values()]
        rows.append([case["name"], str(case["processes"]), *took, f"{best(case, 'train_s') * 1e3:.2f}"])
    return rows


def diagnosis(bench: Bench) -> list[str]:
    """Two sentences for each strategy on several processes: its speed-up, and the parts that keep it from N."""
    found = []
    for case in bench.distributed:
        where, step, count = parts(bench, case), best(case, "train_s"), case["processes"]
        gain = speed(case, "train_s") / speed(bench.single, "train_s")
        ideal = where["ideal"][0]
        text = (
            f"**{case['name']} on {count} processes** is {gain:.2f} times as fast as one: a step takes "
            f"{step * 1e3:.1f} ms instead of the ideal {ideal * 1e3:.1f} ms."
        )
        causes = sorted(((took, name) for name, (took, _) in where.items() if name != "ideal"), reverse=True)
        above = [(took, name) for took, name in causes if took > max(0.02 * step, where[name][1])]
        if step <= ideal or not above:
            found.append(f"{text} No part of the difference exceeds the noise between rounds.")
            continue
        shares = "; ".join(f"{took * 1e3:.1f} ms: {_CAUSES[name]}" for took, name in above[:2])
        parts_are = "parts of the difference are" if len(above) > 1 else "part of the difference is"
        unknown = step - ideal - sum(took for took, _ in above[:2])
        rest = "; the rest is within the noise between rounds" if unknown > (step - ideal) / 4 else ""
        found.append(f"{text} The largest {parts_are} {shares}{rest}.")
    return found


def machine() -> str:
    """Processor, cores, versions; no host name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    cpu = names[0] if names else platform.processor() or platform.machine()
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([*cards, cpu, plural(os.cpu_count() or 1, "core"), f"torch {torch.__version__}"])
