"""The runs of a report side by side: the deciding metric, the best run, the settings that vary, repeats by seed."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.config.recipe import in_recipe
from harness.config.trees import flatten
from harness.errors import plural
from harness.runs import layout, reader
from harness.runs.reader import Record
from harness.tools.report import formatting, history
from harness.tools.report.history import Direction, History

_MAX_IN_LABEL = 4  # settings in a run's label; runs that differ in more are named by their folders
_MAX_LABEL = 60  # characters
LENGTH = ("train.epochs", "train.max_steps")  # may change on resume, but not between runs that are compared
_SMALLER_IS_BETTER = re.compile(r"loss|nll|perplexity|error|entropy|(^|_)(mae|mse|rmse|wer|cer|bpc)(_|$)", re.I)


@dataclass(frozen=True)
class ReportedRun:
    """A run of the report. ``label``: unique in it. ``settings``: the flat configuration. ``recipe``: equal text for
    runs that differ only by seed and world size. ``best``: the best value of the deciding metric."""

    record: Record
    label: str
    path: str
    settings: dict[str, Any]
    recipe: str
    history: History
    best: float | None

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None if it is unknown or changed at a resume."""
        return self.record.world_size

    @property
    def ranks(self) -> str:
        """The ranks in words, such as ``2 ranks`` or ``1, then 2 ranks``; empty if unknown."""
        return formatting.ranks(self.record.world_size_text) if self.record.world_size_text else ""

    @property
    def place(self) -> str:
        """The trial, such as ``trial 3``, or the run folder."""
        return f"trial {self.record.trial.number}" if self.record.trial else self.path

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    def at_best(self, axis: str) -> float | None:
        """Return the position of the best evaluation on an axis."""
        improvements = self.history.improvements
        return float(improvements.at[axis][-1]) if len(improvements) else None


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one recipe and world size, which differ by seed or not at all. The mean is over the finished ones.
    Repeats of a seed count once, with their mean. The spread is the sample standard deviation over seeds."""

    runs: list[ReportedRun]

    @property
    def finished(self) -> list[ReportedRun]:
        return [run for run in self.runs if run.record.state == "finished"]

    @cached_property
    def by_seed(self) -> dict[str, float]:
        bests: dict[str, list[float]] = {}
        for run in self.finished:
            if run.best is not None:
                bests.setdefault(str(run.seed), []).append(run.best)
        return {seed: statistics.fmean(values) for seed, values in sorted(bests.items())}

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def size(self) -> str:
        """The runs that the mean is over, as in ``size_of``."""
        return size_of([run for run in self.finished if run.best is not None])

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def size_of(runs: Sequence[ReportedRun]) -> str:
    """Return ``3 seeds``, ``2 repeats`` of one seed, or ``2 seeds, 3 runs``."""
    seeds = len({str(run.seed) for run in runs})
    if seeds == len(runs):
        return plural(seeds, "seed")
    return f"{seeds} seeds, {len(runs)} runs" if seeds > 1 else plural(len(runs), "repeat")


@dataclass(frozen=True)
class RunSet:
    """All runs of a report. ``varied``: dotted keys of the settings in which they differ. ``trust``: show images also
    of runs that are not this user's own. ``failed_starts``: left out of all else."""

    title: str
    runs: list[ReportedRun]
    metric: str | None
    direction: Direction
    varied: list[str]
    trust: bool = False
    failed_starts: Sequence[Record] = ()

    @cached_property
    def ranked(self) -> list[ReportedRun]:
        """The best run first; runs without an evaluation last. Of runs whose best values look equal in the report, the
        one that reached it sooner comes first: a difference beyond the digits shown means nothing."""
        sign = -1.0 if self.direction == "max" else 1.0

        def order(run: ReportedRun) -> tuple[bool, float, float]:
            rounded = float(f"{run.best or 0.0:.{formatting.BEST_DIGITS}g}")
            seconds = run.at_best("seconds")
            return run.best is None, sign * rounded, math.inf if seconds is None else seconds

        return sorted(self.runs, key=order)

    @property
    def best(self) -> ReportedRun | None:
        return next((run for run in self.ranked if run.best is not None), None)

    @cached_property
    def seed_groups(self) -> list[SeedGroup]:
        """All runs, the group with the best run first."""
        groups: dict[tuple[str, str], list[ReportedRun]] = {}
        for run in self.ranked:
            groups.setdefault((run.recipe, run.record.world_size_text), []).append(run)
        return [SeedGroup(runs) for runs in groups.values()]

    def describe(self, run: ReportedRun, without: Sequence[str] = ("seed",)) -> str:
        """Return the varied settings of ``run``; its label if that is too long or others look equal, its name if
        nothing is varied."""
        keys = [key for key in self.varied if key not in without]
        text = describe(run.settings, keys)
        if "…" in text and any(
            text == describe(other.settings, keys)
            and any(other.settings.get(key) != run.settings.get(key) for key in keys)
            for other in self.runs
        ):
            return run.label
        return text or (run.label if keys else _title([run.record]))


def build(records: Sequence[Record], metric: str | None = None, trust: bool = False) -> RunSet:
    """Read the histories of ``records``, several at once. Failed starts are set apart, unless there is nothing else."""
    trained = [record for record in records if not is_failed_start(record)]
    failed_starts = [record for record in records if is_failed_start(record)] if trained else []
    records = trained or records
    metric = metric or deciding_metric(records)
    direction = direction_of(metric, records)
    flat = [flatten(record.config) or (dict(record.trial.params) if record.trial else {}) for record in records]
    varied = varied_settings(records, flat)
    labels = _labels(records, flat, varied)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # arrow reads without the GIL
        histories = list(pool.map(lambda record: history.read(record, metric, direction), records))
    runs = [
        ReportedRun(record, label, formatting.path(record.path), settings, recipe(record, settings), past, _best(past))
        for record, settings, label, past in zip(records, flat, labels, histories, strict=True)
    ]
    return RunSet(_title(records), runs, metric, direction, varied, trust, failed_starts)


def is_failed_start(record: Record) -> bool:
    """Return True for a run that failed before its first step, because of a typo, for example. A trial of a sweep
    never counts: its settings matter."""
    log = record.path / layout.METRICS
    logged = log.is_file() and log.stat().st_size > 0
    return record.state == "failed" and not (record.trial or record.failure.get("step") or record.summary or logged)


def _best(past: History) -> float | None:
    return float(past.improvements.values["value"][-1]) if len(past.improvements) else None


def _title(records: Sequence[Record]) -> str:
    """Return the first three names; the number of the other runs, or of all runs if these share their names."""
    names = [record.sweep.name if record.sweep else record.name for record in records]
    listed = list(dict.fromkeys(names))[:3]
    if num_others := sum(name not in listed for name in names):
        return f"{', '.join(listed)} and {plural(num_others, 'more run')}"
    swept = all(record.sweep for record in records)
    return ", ".join(listed) + (f" ({len(names)} runs)" if len(listed) < len(names) and not swept else "")


# The metric that decides


def deciding_metric(records: Sequence[Record]) -> str | None:
    """Return the metric of the sweep, or the one that most runs chose their best weights by."""
    of_sweeps = Counter(record.sweep.metric for record in records if record.sweep and record.sweep.metric)
    votes = of_sweeps or Counter(name for record in records for name in _own_metrics(record))
    return votes.most_common(1)[0][0] if votes else None


def _own_metrics(record: Record) -> list[str]:
    best_names = [str(name) for name in reader.section(record.summary, "best") if name != "step"]
    configured = reader.section(record.config, "checkpoint").get("best_metric")
    return best_names[:1] or ([configured] if isinstance(configured, str) else [])


def direction_of(metric: str | None, records: Sequence[Record]) -> Direction:
    """Return the better direction: that of the sweep, or else as the runs chose their best evaluation, or by name."""
    for record in records:
        if record.sweep and record.sweep.direction and record.sweep.metric == metric:
            return record.sweep.direction
    votes: Counter[Direction] = Counter()
    for record in records:
        best, past = record.summary.get("best"), record.summary.get("history")
        if isinstance(best, dict) and isinstance(past, list):
            values = [entry.get(metric) for entry in past if isinstance(entry, dict)]
            numbers = [value for value in values if isinstance(value, int | float)]
            if len(set(numbers)) > 1 and best.get(metric) in (max(numbers), min(numbers)):
                votes["max" if best[metric] == max(numbers) else "min"] += 1
    if votes:
        return votes.most_common(1)[0][0]
    return "min" if _SMALLER_IS_BETTER.search(metric or "") else "max"


# What differs


def global_batch(settings: dict[str, Any], world: int | None) -> int | None:
    global_rows, share = settings.get("batch.global"), settings.get("batch.per_rank")
    if isinstance(global_rows, int):
        return global_rows
    return share * world if isinstance(share, int) and world else None


def recipe(record: Record, settings: dict[str, Any]) -> str:
    """Return equal text for comparable runs: everything that matters to training and the kind of device, except seed
    and world size. Batches count over all ranks."""
    if not settings:
        return str(record.path)
    recipe_settings = {key: value for key, value in settings.items() if _is_recipe(key, settings) and key != "seed"}
    if global_rows := global_batch(settings, record.world_size):
        recipe_settings["batch.global"], recipe_settings["batch.per_rank"] = global_rows, None
    recipe_settings["devices"] = sorted(set(devices(record)))
    recipe_settings["lengths"] = {key: values for key, values in record.lengths.items() if len(values) > 1}
    return json.dumps(recipe_settings, sort_keys=True, default=str)


def devices(record: Record) -> list[str]:
    """Return the kind of device of each rank of each start, such as "cpu" or "NVIDIA H100"."""
    return [rank["name"] for start in record.provenance for rank in reader.ranks(start)]


def _is_recipe(key: str, settings: Mapping[str, Any]) -> bool:
    return key in LENGTH or in_recipe(key, settings.get("task.name"))


def varied_settings(records: Sequence[Record], flat: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys for which the runs have different values; those that a sweep searched come first."""
    searched = list(dict.fromkeys(key for record in records if record.trial for key in record.trial.params))
    recorded = [settings for settings in flat if settings]
    keys = dict.fromkeys([*searched, *(key for settings in recorded for key in settings)])
    return [
        key for key in keys
        if len({str(settings[key]) for settings in recorded if key in settings and _is_recipe(key, settings)}) > 1
    ]  # fmt: skip


def describe(settings: dict[str, Any], keys: Iterable[str]) -> str:
    """Return ``keys`` with values, as in "lr 0.004 · batch 1024", without the last if it is long; empty if they are
    many."""
    parts = [f"{formatting.key(key)} {formatting.setting(settings.get(key), 4)}" for key in keys]
    if len(parts) > _MAX_IN_LABEL:
        return ""
    text = " · ".join(parts)
    if len(text) <= _MAX_LABEL or len(parts) == 1:
        return text
    return f"{text[: _MAX_LABEL - 1].rpartition(' · ')[0] or parts[0]} · …"


def _labels(records: Sequence[Record], flat: Sequence[dict[str, Any]], varied: list[str]) -> list[str]:
    """Return a short unique name for each run: its own, if no two have the same and none is of a sweep, or else its
    settings, the number of ranks if that differs, its folder."""
    names_differ = len({record.name for record in records if not record.sweep}) == len(records)
    worlds = {record.world_size_text for record in records}
    labels = []
    for record, settings in zip(records, flat, strict=True):
        label = describe(settings, varied) if settings and not names_differ else ""
        if label and len(worlds) > 1 and record.world_size_text:
            label += f" · {formatting.ranks(record.world_size_text)}"
        labels.append(label or _name(record))
    for distinction in (_name, lambda record: formatting.path(record.path)):
        counts = Counter(labels)
        for index, record in enumerate(records):
            if counts[label := labels[index]] > 1:
                labels[index] = distinction(record) if label == _name(record) else f"{label} ({distinction(record)})"
    return labels


def _name(record: Record) -> str:
    return f"{record.sweep.name}/{record.path.name}" if record.sweep else record.name
