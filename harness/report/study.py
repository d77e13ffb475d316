"""The runs of a report side by side: which metric decides, what sets them apart, who is the best, what repeats what."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.config.schema import NOT_THE_RECIPE, flatten
from harness.report import history, words
from harness.report.history import Direction, History
from harness.runs.reader import Record

MAX_APART = 4  # settings that a run is named by; runs that differ in more are named by their folders
LENGTH = ("train.epochs", "train.max_steps")  # a resumed run may be longer; a compared one may not
_SHORT = {
    "batch.global": "batch",
    "batch.per_rank": "batch a rank",
    "optimizer.lr": "lr",
    "optimizer.name": "optimizer",
    "optimizer.weight_decay": "weight decay",
    "model.name": "model",
    "precision.opt_level": "level",
    "parallel.strategy": "strategy",
    "schedule.name": "schedule",
    "task.name": "task",
    "train.epochs": "epochs",
}
_SMALLER_IS_BETTER = re.compile(r"loss|nll|perplexity|error|entropy|(^|_)(mae|mse|rmse|wer|cer|bpc)(_|$)", re.I)


@dataclass(frozen=True)
class Run:
    """A run as the report has it. ``settings``: the flat configuration; ``recipe``: the same text for runs that differ
    in seed and world size alone; ``label``: unique in the report; ``best``: of the deciding metric."""

    record: Record
    label: str
    path: str
    settings: dict[str, Any]
    recipe: str
    history: History
    best: float | None

    @property
    def world(self) -> int | None:
        return self.record.world_size

    @property
    def place(self) -> str:
        """Where it is, in a word or two."""
        return f"trial {self.record.trial.number}" if self.record.trial else self.path

    @property
    def batch(self) -> int | None:
        """Rows of an optimizer step over all ranks."""
        return global_batch(self.settings, self.world)

    @property
    def lr(self) -> float | None:
        rate = self.settings.get("optimizer.lr")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    def at_best(self, axis: str) -> float | None:
        """Where on an axis the best evaluation was."""
        gains = self.history.gains
        return float(gains.at[axis][-1]) if len(gains) else None


@dataclass(frozen=True)
class Repeats:
    """Runs of one recipe at one world size: they differ in their seed alone. The best values have a mean and a spread
    (the sample standard deviation, from two runs on)."""

    runs: list[Run]

    @cached_property
    def values(self) -> list[float]:
        return [run.best for run in self.runs if run.best is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Study:
    """``apart``: the settings, as dotted keys, in which runs differ."""

    title: str
    runs: list[Run]
    metric: str | None
    direction: Direction
    apart: list[str]

    @cached_property
    def ranked(self) -> list[Run]:
        """The best first; runs that were never evaluated last."""
        sign = -1.0 if self.direction == "max" else 1.0
        return sorted(self.runs, key=lambda run: (run.best is None, sign * (run.best or 0.0)))

    @property
    def best(self) -> Run | None:
        return next((run for run in self.ranked if run.best is not None), None)

    @cached_property
    def repeats(self) -> list[Repeats]:
        """All runs, those that repeat each other together, the best first."""
        found: dict[tuple[str, int | None], list[Run]] = {}
        for run in self.ranked:
            found.setdefault((run.recipe, run.world), []).append(run)
        return [Repeats(runs) for runs in found.values()]

    def setting(self, run: Run, without: Sequence[str] = ("seed",)) -> str:
        """What sets ``run`` apart, in words; its label where that would be too long, its name where nothing does."""
        keys = [key for key in self.apart if key not in without]
        return describe(run.settings, keys) or (run.label if keys else _title([run.record]))


def build(records: Sequence[Record], metric: str | None = None) -> Study:
    """The study of ``records``: reads all their histories, several at once."""
    metric = metric or deciding_metric(records)
    direction = direction_of(metric, records)
    flat = [flatten(record.config) or (dict(record.trial.params) if record.trial else {}) for record in records]
    apart = settings_apart(records, flat)
    labels = _labels(records, flat, apart)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # reading is arrow's work, which lets other threads run
        histories = list(pool.map(lambda record: history.read(record, metric, direction), records))
    runs = [
        Run(record, label, shown(record.path), settings, recipe(record, settings), past, _best(past))
        for record, settings, label, past in zip(records, flat, labels, histories, strict=True)
    ]
    return Study(_title(records), runs, metric, direction, apart)


def _best(past: History) -> float | None:
    return float(past.gains.values["value"][-1]) if len(past.gains) else None


def _title(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(record.sweep.name if record.sweep else record.name for record in records))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# The metric that decides


def deciding_metric(records: Sequence[Record]) -> str | None:
    """The metric that a sweep or most of the runs are judged by."""
    told: Counter[str] = Counter(
        name for record in records if (name := record.sweep.metric if record.sweep else None)
    ) or Counter(name for record in records for name in _own_metrics(record))
    return told.most_common(1)[0][0] if told else None


def _own_metrics(record: Record) -> list[str]:
    best = record.summary.get("best")
    named = [str(name) for name in best if name != "step"] if isinstance(best, dict) else []
    configured = record.config.get("checkpoint")
    if not named and isinstance(configured, dict) and isinstance(configured.get("best_metric"), str):
        named = [configured["best_metric"]]
    return named[:1]


def direction_of(metric: str | None, records: Sequence[Record]) -> Direction:
    """Which way is better: as a sweep says, else as the runs themselves chose their best, else by the metric's name."""
    for record in records:
        if record.sweep and record.sweep.direction and record.sweep.metric == metric:
            return record.sweep.direction
    votes: Counter[Direction] = Counter()
    for record in records:
        best, past = record.summary.get("best"), record.summary.get("history")
        if isinstance(best, dict) and isinstance(past, list):
            values = [entry.get(metric) for entry in past if isinstance(entry, dict)]
            known = [value for value in values if isinstance(value, int | float)]
            if len(set(known)) > 1 and best.get(metric) in (max(known), min(known)):
                votes["max" if best[metric] == max(known) else "min"] += 1
    if votes:
        return votes.most_common(1)[0][0]
    return "min" if _SMALLER_IS_BETTER.search(metric or "") else "max"


# What sets runs apart


def global_batch(settings: dict[str, Any], world: int | None) -> int | None:
    whole, share = settings.get("batch.global"), settings.get("batch.per_rank")
    if isinstance(whole, int):
        return whole
    return share * world if isinstance(share, int) and world else None


def recipe(record: Record, settings: dict[str, Any]) -> str:
    """The same text for runs that are comparable: alike in all that is trained and on what kind of device, but for the
    seed and the world size. Batches count over all ranks."""
    if not settings:
        return str(record.path)
    kept = {key: value for key, value in settings.items() if _is_recipe(key) and key != "seed"}
    kept["batch.global"], kept["batch.per_rank"] = global_batch(settings, record.world_size), None
    kept["devices"] = sorted(set(devices(record)))
    return json.dumps(kept, sort_keys=True, default=str)


def devices(record: Record) -> list[str]:
    """The kind of device of each rank of the newest start: "cpu", "NVIDIA H100", …"""
    ranks = record.provenance[-1].get("ranks") if record.provenance else None
    kinds = [re.search(r"\((.*)\)\s*$", str(rank)) for rank in ranks] if isinstance(ranks, list) else []
    return [kind.group(1) for kind in kinds if kind]


def _is_recipe(key: str) -> bool:
    return key in LENGTH or not (key in NOT_THE_RECIPE or key.split(".")[0] in NOT_THE_RECIPE)


def settings_apart(records: Sequence[Record], flat: Sequence[dict[str, Any]]) -> list[str]:
    """Keys of which the runs have different values; those that a sweep has searched first."""
    searched = list(dict.fromkeys(key for record in records if record.trial for key in record.trial.params))
    known = [settings for settings in flat if settings]
    keys = dict.fromkeys([*searched, *(key for settings in known for key in settings)])
    return [
        key for key in keys
        if _is_recipe(key) and len({str(settings[key]) for settings in known if key in settings}) > 1
    ]  # fmt: skip


def short(key: str) -> str:
    """A setting's name where there is little room."""
    return _SHORT.get(key, key)


def describe(settings: dict[str, Any], keys: Iterable[str]) -> str:
    """ "lr 0.004 · batch 1024"; empty where that would be long."""
    parts = [f"{short(key)} {_text(settings.get(key))}" for key in keys]
    return " · ".join(parts) if len(parts) <= MAX_APART else ""


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shown(path: Path) -> str:
    """``path`` as one would type it here."""
    inside = os.path.relpath(path)
    return str(path) if inside.startswith("..") else inside


def _name(record: Record) -> str:
    return f"{record.sweep.name}/{record.path.name}" if record.sweep else record.name


def _labels(records: Sequence[Record], flat: Sequence[dict[str, Any]], apart: list[str]) -> list[str]:
    """A short name for each run that no other has: its settings, the number of ranks where that differs, the folder."""
    worlds = {record.world_size for record in records}
    labels = []
    for record, settings in zip(records, flat, strict=True):
        told = describe(settings, apart) if settings and (record.sweep or len(apart) <= MAX_APART) else ""
        if told and len(worlds) > 1 and record.world_size:
            told += f" · {words.plural(record.world_size, 'rank')}"
        labels.append(told or _name(record))
    for distinction in (_name, lambda record: shown(record.path)):
        seen = Counter(labels)
        for place, record in enumerate(records):
            if seen[label := labels[place]] > 1:
                labels[place] = distinction(record) if label == _name(record) else f"{label} ({distinction(record)})"
    return labels
