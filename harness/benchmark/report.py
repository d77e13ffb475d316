"""What a benchmark of strategies found: where the time of a step went, in a table, a plot and two sentences each.

Every figure is a measurement or the difference of two; nothing is assumed. Of several rounds the fastest counts: what
else runs on a machine only ever slows it down. Of a step of a strategy on N processes:

    ideal       a step of one process, shared out: its time x rows of a rank / its rows
    batch       one process alone with a rank's rows, less the ideal: what does not shrink with the batch
    neighbours  N processes that do not talk, side by side, less one alone: they share cores, caches and memory
    bookkeeping the strategy with its messages left out, less that: copies, hooks, what is done per bucket or block
    messages    the strategy as it is, less that: communication, and waiting for the slowest rank
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

from harness.runs.files import write_atomically

Figures = dict[str, Any]  # of one case in one round, see bench_case.measure
PARTS = ("ideal", "batch", "neighbours", "bookkeeping", "messages")
_CAUSES = {
    "batch": "what does not shrink with the batch (one process alone takes that much longer than its share)",
    "neighbours": "sharing the machine (processes that do not talk slow each other by that much)",
    "bookkeeping": "the strategy's own copies and hooks (it takes that long with its messages left out)",
    "messages": "messages and waiting for the slowest rank (it vanishes when messages are left out)",
}


@dataclass(frozen=True)
class Bench:
    """``cases``: name, processes, rows (of a process), messages, rounds (their figures)."""

    config: str
    model: str
    level: str
    steps: int
    threads: int
    cases: list[dict[str, Any]]
    left_out: dict[str, str]

    def find(self, name: str, processes: int, rows: int, messages: str) -> dict[str, Any]:
        wanted = {"name": name, "processes": processes, "rows": rows, "messages": messages}
        return next(case for case in self.cases if wanted.items() <= case.items())

    @property
    def single(self) -> dict[str, Any]:
        """One process with all rows: what everything is compared with."""
        return self.cases[0]

    @property
    def gangs(self) -> list[dict[str, Any]]:
        """The strategies on several processes, as they are."""
        return [case for case in self.cases if case["messages"] == "real"]


def best(case: dict[str, Any], key: str) -> float:
    """The least of all rounds."""
    return float(min(figures[key] for figures in case["rounds"]))


def spread(case: dict[str, Any], key: str = "train_s") -> float:
    """How far the median round is from the best: what a difference must exceed to mean anything."""
    return float(statistics.median(figures[key] for figures in case["rounds"])) - best(case, key)


def speed(case: dict[str, Any], key: str) -> float:
    """Rows a second over all processes."""
    return best(case, "rows") / best(case, key)


def parts(bench: Bench, gang: dict[str, Any], key: str = "train_s") -> dict[str, tuple[float, float]]:
    """{where the time of a step of ``gang`` goes: (seconds, what of that may be noise)}.

    The seconds add up to the step; a part that is noise can be negative.
    """
    rows, processes = gang["rows"], gang["processes"]
    share = rows / bench.single["rows"]
    cases = [
        bench.find("none", 1, rows, "none"),
        bench.find("none", processes, rows, "none"),
        bench.find(gang["name"], processes, rows, "mute"),
        gang,
    ]
    marks = [(best(bench.single, key) * share, spread(bench.single, key) * share)]
    marks += [(best(case, key), spread(case, key)) for case in cases]
    steps = zip(PARTS, [(0.0, 0.0), *marks[:-1]], marks, strict=True)
    return {name: (after[0] - before[0], after[1] + before[1]) for name, before, after in steps}


def write(bench: Bench, out: Path) -> list[Path]:
    """``strategies.md``, ``strategies.json`` and, where matplotlib is installed, ``strategies.png``."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "strategies.md", out / "strategies.json"]
    picture = out / "strategies.png"
    if _plot(bench, picture):
        written.append(picture)
    write_atomically(written[0], page(bench, picture.name if picture in written else ""))
    write_atomically(written[1], json.dumps({"machine": machine(), **asdict(bench)}, indent=1) + "\n")
    return written


def page(bench: Bench, picture: str) -> str:
    rounds = len(bench.single["rounds"])
    lines = [
        f"# Strategies: {bench.config} ({bench.model}, {bench.level})",
        "",
        f"Machine: {machine()}. {bench.threads} thread(s) a process. Every case ran in fresh processes, in "
        f"{rounds} round(s) over all cases in turn: what the fastest tenth of {bench.steps} steps stay under, on the "
        "slowest rank, in the best round. Reading data is left out.",
        *_unrest(bench),
        "",
        "## Training",
        "",
        *_table(_training(bench)),
        "",
        "Peak memory is what a rank takes beyond the interpreter and its libraries; state is weights, gradients and "
        "optimizer state of a rank. ± is how far the median round is from the best.",
        "",
        "## Inference (the same rows, no gradients)",
        "",
        *_table(_inference(bench)),
        "",
    ]
    if bench.gangs:
        lines += ["## Where the time of a training step goes, in ms", "", *_table(_breakdown(bench)), ""]
        lines += ["## Diagnosis", "", *(f"- {text}" for text in diagnosis(bench)), ""]
    lines += ["## Answers", "", *(f"- {text}" for text in answers(bench)), ""]
    lines += [f"Left out: {name}: {why}\n" for name, why in bench.left_out.items()]
    lines += [f"![where the time goes]({picture})", ""] if picture else []
    return "\n".join(lines)


def _unrest(bench: Bench) -> Iterator[str]:
    """A warning where the rounds of a case differ much, or nobody can tell."""
    if len(bench.single["rounds"]) == 1:
        yield from ("", "**One round only**: how much of a difference is noise is not known; use --rounds 3.")
        return
    worst = max(bench.cases, key=lambda case: spread(case) / best(case, "train_s"))
    share = spread(worst) / best(worst, "train_s")
    if share > 0.1:
        yield ""
        yield (
            f"**The machine was not quiet**: the median round of {worst['name']} on {worst['processes']} process(es) "
            f"was {share:.0%} slower than its best. Differences of that size mean nothing."
        )


def _table(rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def _training(bench: Bench) -> list[list[str]]:
    head = [
        "strategy",
        "processes",
        "rows a step",
        "ms a step",
        "rows/s",
        "speed-up",
        "messages",
        "peak MiB",
        "state MiB",
    ]
    rows = [head]
    for case in _shown(bench):
        share = parts(bench, case)["messages"][0] / best(case, "train_s") if case in bench.gangs else 0.0
        rows.append(
            [case["name"], str(case["processes"]), f"{best(case, 'rows'):.0f}",
             f"{best(case, 'train_s') * 1e3:.2f} ± {spread(case) * 1e3:.2f}", f"{speed(case, 'train_s'):.0f}",
             f"{speed(case, 'train_s') / speed(bench.single, 'train_s'):.2f}", f"{max(share, 0):.0%}",
             f"{best(case, 'peak_bytes') / 2**20:.0f}", f"{best(case, 'held_bytes') / 2**20:.1f}"]
        )  # fmt: skip
    return rows


def _inference(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", "ms", "rows/s", "speed-up"]]
    for case in _shown(bench):
        rows.append(
            [case["name"], str(case["processes"]), f"{best(case, 'forward_s') * 1e3:.2f}",
             f"{speed(case, 'forward_s'):.0f}", f"{speed(case, 'forward_s') / speed(bench.single, 'forward_s'):.2f}"]
        )  # fmt: skip
    return rows


def _breakdown(bench: Bench) -> list[list[str]]:
    rows = [["strategy", "processes", *PARTS, "step"]]
    for gang in bench.gangs:
        took = [f"{value * 1e3:.2f}" for value, _ in parts(bench, gang).values()]
        rows.append([gang["name"], str(gang["processes"]), *took, f"{best(gang, 'train_s') * 1e3:.2f}"])
    return rows


def _shown(bench: Bench) -> Iterator[dict[str, Any]]:
    """What a user can choose: strategies as they are, and one process; not what is measured for comparison."""
    whole = bench.single["rows"]
    for case in bench.cases:
        if case["messages"] == "real" or (case["processes"] == 1 and case["rows"] == whole):
            yield case


def diagnosis(bench: Bench) -> list[str]:
    """Two sentences for each strategy on several processes: how far from N times as fast, and what took the time."""
    told = []
    for gang in bench.gangs:
        where, step, count = parts(bench, gang), best(gang, "train_s"), gang["processes"]
        gain = speed(gang, "train_s") / speed(bench.single, "train_s")
        ideal = where["ideal"][0]
        text = (
            f"**{gang['name']} on {count} processes** is {gain:.2f} times as fast as one: a step takes "
            f"{step * 1e3:.1f} ms, where {ideal * 1e3:.1f} ms would be {count} times as fast."
        )
        causes = sorted(((took, name) for name, (took, _) in where.items() if name != "ideal"), reverse=True)
        above = [(took, name) for took, name in causes if took > max(0.02 * step, where[name][1])]
        if step <= ideal or not above:
            told.append(f"{text} No part of the step stands out above the noise of the rounds.")
            continue
        shares = "; ".join(f"{took * 1e3:.1f} ms is {_CAUSES[name]}" for took, name in above[:2])
        unknown = step - ideal - sum(took for took, _ in above[:2])
        rest = "; the rest cannot be told from the noise of the rounds" if unknown > (step - ideal) / 4 else ""
        told.append(f"{text} What took the other {(step - ideal) * 1e3:.1f} ms: {shares}{rest}.")
    return told


def answers(bench: Bench) -> Iterator[str]:
    """To what people ask of a comparison like this, from the figures above and no others."""
    found = {(case["name"], case["processes"]): case for case in _shown(bench)}
    dp = next((case for (name, _), case in found.items() if name == "dp"), None)
    for count in sorted({case["processes"] for case in bench.gangs}):
        delayed, overlapped = found.get(("ddp delayed", count)), found.get(("ddp overlapped", count))
        sharded = found.get(("fsdp", count))
        replicas = min((c for c in (delayed, overlapped) if c), key=lambda c: best(c, "train_s"), default=None)
        if dp and replicas:
            on, ratio = dp["rounds"][0]["parallel"], speed(replicas, "train_s") / speed(dp, "train_s")
            than = f"{replicas['name']} on {count} processes gives {ratio:.2f} times the rows a second of {on}"
            alone = " DataParallel found no second device here: this is DDP against one device."
            yield f"Is DDP faster than DP? {than}.{alone if 'one device' in on else ''}"
        if delayed and overlapped:
            yield f"What does overlapping buy? {_difference(overlapped, delayed, count)}"
        if sharded and replicas:
            yield f"What does FSDP cost and save? {_price(sharded, replicas, count)}"


def _price(sharded: dict[str, Any], replicas: dict[str, Any], count: int) -> str:
    slower = best(sharded, "train_s") / best(replicas, "train_s")
    held, of_held = (best(case, "held_bytes") / 2**20 for case in (sharded, replicas))
    peak, of_peak = (best(case, "peak_bytes") / 2**20 for case in (sharded, replicas))
    return (
        f"On {count} processes a step takes {slower:.2f} times that of {replicas['name']}; a rank holds {held:.1f} MiB "
        f"of weights, gradients and optimizer state where that holds {of_held:.1f}, and at its peak takes {peak:.0f} "
        f"MiB where that takes {of_peak:.0f}, activations included."
    )


def _difference(one: dict[str, Any], other: dict[str, Any], count: int) -> str:
    gain, noise = best(other, "train_s") - best(one, "train_s"), spread(one) + spread(other)
    if abs(gain) <= noise:
        return (
            f"On {count} processes the two differ by {abs(gain) * 1e3:.1f} ms a step, less than the rounds of each do "
            f"(± {noise * 1e3:.1f} ms): nothing that can be told here."
        )
    better = "saves" if gain > 0 else "costs"
    return f"On {count} processes it {better} {abs(gain) * 1e3:.1f} ms of {best(other, 'train_s') * 1e3:.1f} a step."


def machine() -> str:
    """Processor, cores, versions; no host name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    cpu = names[0] if names else platform.processor() or platform.machine()
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([*cards, cpu, f"{os.cpu_count()} cores", f"torch {torch.__version__}"])


def _plot(bench: Bench, path: Path) -> bool:
    """Rows a second, and where a step goes; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    shown = list(_shown(bench))
    names = [f"{case['name']}\n{case['processes']} proc." for case in shown]
    left.bar(names, [speed(case, "train_s") for case in shown], color="#4878a8")
    for count in sorted({case["processes"] for case in shown}):
        left.axhline(speed(bench.single, "train_s") * count, color="gray", lw=0.8, ls=":")
    left.set(ylabel="training rows a second", title="Speed (dotted: whole multiples of one process)")
    colors = ("#4878a8", "#8cb8d8", "#e8b860", "#b888b8", "#c85050")
    labels = [f"{case['name']}\n{case['processes']} proc." for case in bench.gangs]
    bottoms = [0.0] * len(labels)
    for name, color in zip(PARTS, colors, strict=True):
        heights = [max(parts(bench, gang)[name][0], 0.0) * 1e3 for gang in bench.gangs]  # noise may be below zero
        right.bar(labels, heights, bottom=bottoms, color=color, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    right.plot(labels, [best(gang, "train_s") * 1e3 for gang in bench.gangs], "k_", ms=40)  # the whole step
    right.set(ylabel="ms a training step", title="Where the time of a step goes")
    if bench.gangs:
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return True
