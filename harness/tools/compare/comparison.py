"""The comparison of two runs, or of two groups of runs that differ only by seed: settings, equality and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from harness.config import seals
from harness.config.recipe import recipe_difference
from harness.config.trees import differences, flatten
from harness.errors import ConfigError
from harness.runs import layout
from harness.runs.metrics_table import NOT_METRICS
from harness.runs.reader import Record, changes, find, over_starts, section
from harness.tools.compare import significance
from harness.tools.report import history
from harness.tools.report.mistakes import read_predictions
from harness.tools.report.reproduce import machine
from harness.tools.report.run_set import LENGTH

Pair = tuple[object, object]
Differences = dict[str, Pair]
Start = dict[str, Any]  # of a run, as provenance.json has it
Verdict = Literal["equal", "equal so far", "different"]
"""equal: every file is bitwise equal, times excluded · equal so far: one of the runs is incomplete, and no log line or
checkpoint that both have differs; its best weights may be of an earlier evaluation · different."""

_GUESSES = ("prediction", "label")
_TOPOLOGY = ("world_size", "ranks", "launched_by", "threads", "amp")


@dataclass(frozen=True)
class Code:
    """Git commits of the starts of each run, in order; None outside a repository. ``changed``: a start had uncommitted
    changes. ``same`` is None if that leaves the question open. ``sources``: digests of the user's own modules that
    differ, {module: (one, other)}, of those that both record; None without any."""

    commits: tuple[list[str | None], list[str | None]]
    changed: tuple[bool, bool]
    same: bool | None
    sources: Differences | None = None


@dataclass(frozen=True)
class SettingsComparison:
    """Only the differences, {dotted key: (one, other)}; None if a run does not record them (``missing``: why)."""

    recipe: Differences | None
    other: Differences | None
    code: Code | None
    packages: Differences | None
    topology: Differences | None
    missing: list[str]


@dataclass(frozen=True)
class Evaluations:
    """Metrics of the newest evaluation of a run, and of the best one, whose weights it kept; empty if there is none."""

    step: int | None
    final: dict[str, float]
    best_step: int | None
    best: dict[str, float]
    best_metric: str | None


@dataclass(frozen=True)
class Metric:
    """A metric of two runs, in the newest evaluation and in the best one."""

    name: str
    final: tuple[float | None, float | None]
    best: tuple[float | None, float | None]


@dataclass(frozen=True)
class Throughput:
    """None where the log has no value. ``rows_per_s``: in training, over all ranks."""

    wall_s: float | None
    rows_per_s: float | None


@dataclass(frozen=True)
class PairedPredictions:
    """Predictions of both runs' best weights for the same rows: how many rows both predict correctly, only A, only B,
    neither. ``interval``: of B's accuracy minus A's. ``p``: of McNemar's exact test."""

    rows: int
    both: int
    only_one: int
    only_other: int
    neither: int
    difference: float
    interval: tuple[float, float]
    p: float


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of two groups. Standard errors and the interval are None for a single seed."""

    name: str
    values: tuple[list[float], list[float]]
    means: tuple[float, float]
    errors: tuple[float | None, float | None]
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.means[1] - self.means[0]


@dataclass(frozen=True)
class Side:
    """A run, or runs that differ only by seed. ``problems``: incomplete files, and runs that are left out."""

    path: Path
    runs: list[Record]
    problems: list[str]

    @property
    def seeds(self) -> list[object]:
        return [seed(run) for run in self.runs]

    def as_json(self) -> dict[str, object]:
        runs = [
            {"path": str(run.path), "name": run.name, "state": run.state, "seed": seed(run),
             "world_size": run.world_size}
            for run in self.runs
        ]  # fmt: skip
        return {"path": str(self.path), "runs": runs, "problems": self.problems}


@dataclass(frozen=True)
class Equality:
    """``step``: the first at which a log line or a checkpoint differs, if one does. ``lines``: what differs."""

    verdict: Verdict
    step: int | None
    lines: list[str]


@dataclass(frozen=True)
class RunComparison:
    """Two runs. ``why_no_predictions`` says why ``predictions`` is None."""

    one: Side
    other: Side
    settings: SettingsComparison
    equality: Equality
    evaluations: tuple[Evaluations, Evaluations]
    throughput: tuple[Throughput, Throughput]
    metrics: list[Metric]
    predictions: PairedPredictions | None
    why_no_predictions: str

    @property
    def same(self) -> bool:
        """True if both runs are complete and bitwise equal."""
        return self.equality.verdict == "equal"

    def as_json(self) -> dict[str, object]:
        return {
            **_sides_and_settings(self),
            "equality": asdict(self.equality),
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "throughput": [asdict(throughput) for throughput in self.throughput],
            "metrics": [asdict(metric) for metric in self.metrics],
            "predictions": asdict(self.predictions) if self.predictions else None,
            "why_no_predictions": self.why_no_predictions,
        }


@dataclass(frozen=True)
class GroupComparison:
    """Two groups of runs that differ by seed. ``spreads``: {"best" or "final": metrics}."""

    one: Side
    other: Side
    settings: SettingsComparison
    spreads: dict[str, list[Spread]]
    same = False

    def as_json(self) -> dict[str, object]:
        return {
            **_sides_and_settings(self),
            "spreads": {
                of: [{**asdict(spread), "difference": spread.difference} for spread in spreads]
                for of, spreads in self.spreads.items()
            },
        }


def _sides_and_settings(comparison: RunComparison | GroupComparison) -> dict[str, object]:
    sides = {"one": comparison.one.as_json(), "other": comparison.other.as_json()}
    return {"same": comparison.same, **sides, "settings": asdict(comparison.settings)}


def seed(record: Record) -> object:
    return record.config.get("seed")


def side(path: Path) -> Side:
    """Return the run at ``path``, or the finished runs of a folder. Raises ConfigError if those differ by more than
    seed, or if a file with a seal is damaged."""
    records = find([path])
    for record in records:
        if damaged := next((problem for problem in record.problems if seals.DAMAGED in problem), ""):
            hint = "restore the file; if you edited it, remove the digest at its end"
            raise ConfigError(damaged, where=str(record.path), hint=hint)
    if len(records) == 1:
        return Side(path, records, list(records[0].problems))
    runs = [record for record in records if record.state == "finished"]
    problems = [f"{record.path.name} is left out: {record.state}" for record in records if record not in runs]
    problems += [f"{record.path.name}: {problem}" for record in runs for problem in record.problems]
    if not runs:
        raise ConfigError(
            f"none of its {len(records)} runs has finished", where=str(path), hint="give a single run folder instead"
        )
    _require_one_recipe(path, runs)
    return Side(path, runs, problems)


def _require_one_recipe(path: Path, runs: list[Record]) -> None:
    first, run_of_seed = runs[0], {seed(runs[0]): runs[0]}
    for run in runs[1:]:
        keys = [key for key in config_differences(first, run)[0] if key != "seed"]
        if first.world_size_text != run.world_size_text:
            keys.append("number of ranks")
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            raise ConfigError(
                f"{first.path.name} and {run.path.name} differ in more than their seed: {', '.join(keys[:5])}{more}",
                where=str(path),
                hint="give two of its runs, or a folder whose runs differ only in seed",
            )
        if seed(run) in run_of_seed:
            raise ConfigError(
                f"{run_of_seed[seed(run)].path.name} and {run.path.name} have the same seed, {seed(run)}",
                where=str(path),
                hint="keep only one of them in this folder, so that no seed counts twice",
            )
        run_of_seed[seed(run)] = run


def _earlier_predictions(*runs: Record) -> str:
    """Why predictions.csv is not of the best weights: a run writes it at its end, and may have been resumed since."""
    early = [
        label
        for label, run in zip("AB", runs, strict=True)
        if run.state != "finished" and (run.path / layout.PREDICTIONS).is_file()
    ]
    return f"{' and '.join(early)} resumed after writing predictions.csv" if early else ""


def compare(side_a: Side, side_b: Side, trust: bool = False) -> RunComparison | GroupComparison:
    """Compare two runs; or the metrics of two groups over their seeds. ``trust``: import checkpoint formats that a run
    of someone else names."""
    first, second = side_a.runs[0], side_b.runs[0]
    settings = compare_settings(first, second)
    if len(side_a.runs) > 1 or len(side_b.runs) > 1:
        evaluations_a, evaluations_b = ([evaluations(run) for run in side.runs] for side in (side_a, side_b))
        spreads_of = {of: spreads(evaluations_a, evaluations_b, best=of == "best") for of in ("best", "final")}
        return GroupComparison(side_a, side_b, settings, spreads_of)
    results = evaluations(first), evaluations(second)
    early = _earlier_predictions(first, second)
    predictions, reason = (None, early) if early else paired_predictions(first.path, second.path)
    return RunComparison(
        side_a,
        side_b,
        settings,
        equality=compare_files(first, second, trust),
        evaluations=results,
        throughput=(throughput(first), throughput(second)),
        metrics=metrics(*results),
        predictions=predictions,
        why_no_predictions=reason,
    )


def compare_files(run_a: Record, run_b: Record, trust: bool = False) -> Equality:
    """Compare checkpoints, weights, logs and predictions of two runs bit for bit."""
    from harness.runs import checkpoint
    from harness.tools.compare import exactness, first_difference  # both import torch, which takes seconds

    file_differences = exactness.differences(run_a.path, run_b.path, trust=trust)
    saved = [checkpoint.steps(run.path / layout.CHECKPOINTS).keys() for run in (run_a, run_b)]
    complete = run_a.state == run_b.state == "finished"
    if not complete:  # the last line may still be being written
        half = {_half_line(run.path / layout.METRICS) for run in (run_a, run_b)}
        file_differences = [item for item in file_differences if item.file not in half]
    first = first_difference.FirstDifference(file_differences, sorted(saved[0] & saved[1]))
    verdict: Verdict = "different"
    if first.step is None and not (file_differences and complete):
        verdict = "equal" if complete else "equal so far"
    return Equality(verdict, first.step, list(first.lines()))


def _half_line(path: Path) -> str:
    """Return the place of the last line of a log if it is incomplete; empty otherwise."""
    content = path.read_bytes() if path.is_file() else b""
    return f"{layout.METRICS}:{len(content.splitlines())}" if content and not content.endswith(b"\n") else ""


# Settings


def compare_settings(run_a: Record, run_b: Record) -> SettingsComparison:
    recipe, remaining = config_differences(run_a, run_b) if run_a.config and run_b.config else (None, None)
    missing = [
        f"{label} has no {name} that can be read"
        for label, record in (("A", run_a), ("B", run_b))
        for name, content in ((layout.CONFIG, record.config), (layout.PROVENANCE, record.provenance))
        if not content
    ]
    if not (run_a.provenance and run_b.provenance):
        return SettingsComparison(recipe, remaining, None, None, None, missing)
    starts = run_a.provenance, run_b.provenance
    packages = differences(*map(_packages, starts))
    topology = differences(*map(_topology, starts))
    return SettingsComparison(recipe, remaining, _code(*starts), packages, topology, missing)


def config_differences(run_a: Record, run_b: Record) -> tuple[Differences, Differences]:
    """Return (differences that change what is trained, and its length; differences that do not)."""
    changed = differences(*(flatten(run.config) | _lengths(run) for run in (run_a, run_b)))
    recipe = recipe_difference(run_a.config, run_b.config) | {key: changed[key] for key in LENGTH if key in changed}
    return recipe, {key: pair for key, pair in changed.items() if key not in recipe}


def _lengths(run: Record) -> dict[str, str]:
    """Return {key: "8 until step 120, then 12"} of the settings of the length that changed at a resume."""
    texts = {}
    for key, values in run.lengths.items():
        lengths = ["null" if value is None else str(value) for _, value in values]
        ends = [f" until step {step}, then " for step, _ in values[1:]]
        if ends:
            texts[key] = "".join(f"{value}{end}" for value, end in zip(lengths, [*ends, ""], strict=True))
    return texts


def _topology(starts: Sequence[Start]) -> dict[str, object]:
    described = [{**start, "ranks": machine(start)} for start in starts]
    return {key: over_starts(start.get(key) for start in described) for key in _TOPOLOGY}


def _packages(starts: Sequence[Start]) -> dict[str, object]:
    flat = [section(start, "packages") | {key: start.get(key) for key in ("python", "cuda")} for start in starts]
    names = dict.fromkeys(name for start in flat for name in start)
    return {name: over_starts(start.get(name) for start in flat) for name in names}


def _code(starts_a: Sequence[Start], starts_b: Sequence[Start]) -> Code:
    git = [[section(start, "git") for start in starts] for starts in (starts_a, starts_b)]
    commits = [changes((commit := start.get("commit")) and str(commit) for start in starts) for starts in git]
    changed = [any(bool(start.get("changed")) for start in starts) for starts in git]
    equal = commits[0] == commits[1]
    undecided = equal and (any(changed) or None in commits[0])
    digests = [[_sources(start) for start in starts] for starts in (starts_a, starts_b)]
    names = sorted(set.intersection(*({name for start in side for name in start} for side in digests)))
    module_digests = [{name: over_starts(start.get(name) for start in side) for name in names} for side in digests]
    sources = differences(*module_digests) if names else None
    same = False if sources else None if undecided else equal
    return Code((commits[0], commits[1]), (changed[0], changed[1]), same, sources)


def _sources(start: Start) -> dict[str, object]:
    """Return {module: digest} of the modules of the user's own parts."""
    folders = section(start, "own_code")
    return {name: digest for folder in folders for name, digest in section(section(folders, folder), "source").items()}


# Results


def throughput(record: Record) -> Throughput:
    past = history.read(record, None, "max")
    return Throughput(past.wall_s, past.rows_per_s)


def evaluations(record: Record) -> Evaluations:
    """Read the log, which exists while a run is still training; its summary names the best evaluation."""
    table = record.metrics()
    rows = table.filter(pc.equal(table["split"], "eval")).to_pylist()
    by_step = {row["step"]: _metrics(row) for row in rows if row["step"] is not None}
    best = section(record.summary, "best")
    last = max(by_step, default=None)
    metric = next((name for name in best if name != "step"), None)
    step = best.get("step") if metric and best[metric] is not None else None
    step = step if isinstance(step, int) else None
    return Evaluations(last, by_step.get(last, {}), step, by_step.get(step, {}), metric)


def _metrics(row: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def metrics(a: Evaluations, b: Evaluations) -> list[Metric]:
    """Every metric of either run in the order of the logs, the metric that selects the best weights first."""
    names = dict.fromkeys([*a.final, *b.final])
    order = sorted(names, key=lambda name: name not in (a.best_metric, b.best_metric))
    return [
        Metric(name, (a.final.get(name), b.final.get(name)), (a.best.get(name), b.best.get(name))) for name in order
    ]


def paired_predictions(folder_a: Path, folder_b: Path) -> tuple[PairedPredictions | None, str]:
    """Pair predictions.csv of two run folders row by row; or the reason why this is impossible."""
    tables = []
    for label, folder in (("A", folder_a), ("B", folder_b)):
        table = read_predictions(folder / layout.PREDICTIONS)
        if table is None or "id" not in table.column_names:
            return None, f"{label} has no predictions.csv with ids, predictions and labels"
        tables.append(table)
    if any("error" in table.column_names or _has_fractions(table) for table in tables):
        return None, "they are numbers, not classes; see the error metrics above"
    table_a, table_b = tables = [table.select(["id", "prediction", "label"]) for table in tables]
    if table_a.select(["id", "label"]) != table_b.select(["id", "label"]):
        if any(len(pc.unique(table["id"])) < len(table) for table in tables):
            return None, "their predictions.csv files contain different rows"
        table_a = table_a.join(table_b, ["id", "label"], right_suffix="_other", join_type="inner").combine_chunks()
    else:
        table_a = table_a.append_column("prediction_other", table_b["prediction"])
    table_a = table_a.drop_null()
    if not len(table_a):
        return None, "their predictions.csv files have no row in common"
    correct_a = pc.equal(table_a["prediction"], table_a["label"])
    correct_b = pc.equal(table_a["prediction_other"], table_a["label"])
    both, only_one, only_other = (
        pc.sum(pc.and_(*pair)).as_py()
        for pair in ((correct_a, correct_b), (correct_a, pc.invert(correct_b)), (pc.invert(correct_a), correct_b))
    )
    counts = both, only_one, only_other, len(table_a) - both - only_one - only_other
    interval, p = significance.paired_interval(*counts), significance.mcnemar(only_one, only_other)
    return PairedPredictions(len(table_a), *counts, (only_other - only_one) / len(table_a), interval, p), ""


def _has_fractions(table: pa.Table) -> bool:
    """Return True if predictions and labels are numbers and a prediction with a fraction is no label: those of a task
    of the user's own, which has no column of errors."""
    try:
        distinct = {name: {float(text) for text in pc.unique(table[name].drop_null()).to_pylist()} for name in _GUESSES}
    except ValueError:
        return False
    return any(not value.is_integer() and value not in distinct["label"] for value in distinct["prediction"])


def spreads(group_a: Sequence[Evaluations], group_b: Sequence[Evaluations], best: bool) -> list[Spread]:
    """Metrics that all runs of both groups have, over their seeds, of the best evaluations or of the newest."""
    groups = [[run.best if best else run.final for run in group] for group in (group_a, group_b)]
    names = [name for name in groups[0][0] if all(name in run for group in groups for run in group)]
    deciding = group_a[0].best_metric
    result = []
    for name in sorted(names, key=lambda name: name != deciding):
        values_a, values_b = ([run[name] for run in group] for group in groups)
        errors = significance.standard_error(values_a), significance.standard_error(values_b)
        means, interval = (fmean(values_a), fmean(values_b)), significance.welch(values_a, values_b)
        result.append(Spread(name, (values_a, values_b), means, errors, interval))
    return result
