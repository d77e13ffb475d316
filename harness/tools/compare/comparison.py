"""The comparison of two runs, or of two groups of runs that differ only by seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.config import seals
from harness.errors import ConfigError
from harness.runs import layout
from harness.runs.reader import Record, find
from harness.tools.compare import equality, results, settings
from harness.tools.compare.equality import Equality
from harness.tools.compare.results import Evaluations, Metric, PairedPredictions, Spread, Throughput
from harness.tools.compare.settings import SettingsComparison


@dataclass(frozen=True)
class Side:
    """A run, or runs that differ only by seed. ``problems``: incomplete files, and runs that are left out."""

    path: Path
    runs: list[Record]
    problems: list[str]

    @property
    def seeds(self) -> list[Any]:
        return [seed(run) for run in self.runs]


@dataclass(frozen=True)
class Comparison:
    """``equality``, ``metrics``, ``throughput`` and ``predictions`` are of two single runs; ``by_seed`` and ``spreads``
    ({"best" or "final": metrics}) of two groups."""

    one: Side
    other: Side
    settings: SettingsComparison
    equality: Equality | None
    evaluations: tuple[Evaluations, Evaluations]
    throughput: tuple[Throughput, Throughput]
    metrics: list[Metric]
    predictions: PairedPredictions | None
    why_no_predictions: str
    by_seed: dict[Any, Equality]
    spreads: dict[str, list[Spread]]

    @property
    def same(self) -> bool:
        """True if both sides are complete and bitwise equal."""
        if self.equality:
            return self.equality.verdict == "equal"
        matched = set(self.one.seeds) == set(self.other.seeds) == set(self.by_seed)
        return matched and all(equal.verdict == "equal" for equal in self.by_seed.values())


def seed(record: Record) -> Any:
    return settings.with_defaults(record.config).get("seed")


def side(path: Path) -> Side:
    """The run at ``path``, or the finished runs of a folder. Raises ConfigError if those differ by more than seed,
    or if a file with a seal is damaged."""
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
    first, seen = runs[0], {seed(runs[0]): runs[0]}
    for run in runs[1:]:
        keys = [key for key in settings.config_differences(first, run)[0] if key != "seed"]
        if first.ranks != run.ranks:
            keys.append("number of ranks")
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            raise ConfigError(
                f"{first.path.name} and {run.path.name} differ in more than their seed: {', '.join(keys[:5])}{more}",
                where=str(path),
                hint="give two of its runs, or a folder whose runs differ only in seed",
            )
        if seed(run) in seen:
            raise ConfigError(
                f"{seen[seed(run)].path.name} and {run.path.name} have the same seed, {seed(run)}",
                where=str(path),
                hint="keep only one of them in this folder, so that no seed counts twice",
            )
        seen[seed(run)] = run


def _earlier_predictions(*runs: Record) -> str:
    """Why predictions.csv is not of the best weights: a run writes it at its end, and may have been resumed since."""
    early = [
        label
        for label, run in zip("AB", runs, strict=True)
        if run.state != "finished" and (run.path / layout.PREDICTIONS).is_file()
    ]
    return f"{' and '.join(early)} resumed after writing predictions.csv" if early else ""


def compare(one: Side, other: Side, trust: bool = False) -> Comparison:
    """Compare two runs; or two groups: their runs of equal seed, and their metrics over all seeds. ``trust``: import
    checkpoint formats that a run of someone else names."""
    mine, theirs = ([results.evaluations(run) for run in side.runs] for side in (one, other))
    first, second = one.runs[0], other.runs[0]
    differences = settings.compare(first, second)
    evaluations, throughput = (mine[0], theirs[0]), (results.throughput(first), results.throughput(second))
    if len(one.runs) == len(other.runs) == 1:
        early = _earlier_predictions(first, second)
        predictions, why = (None, early) if early else results.paired_predictions(first.path, second.path)
        return Comparison(
            one, other, differences, equality.compare(first, second, trust), evaluations, throughput,
            results.metrics(*evaluations), predictions, why, {}, {},
        )  # fmt: skip
    partners = dict(zip(other.seeds, other.runs, strict=True))
    by_seed = {
        name: equality.compare(run, partners[name], trust)
        for name, run in zip(one.seeds, one.runs, strict=True)
        if name in partners
    }
    spreads = {of: results.spreads(mine, theirs, best=of == "best") for of in ("best", "final")}
    return Comparison(one, other, differences, None, evaluations, throughput, [], None, "", by_seed, spreads)


def as_json(found: Comparison) -> dict[str, Any]:
    """``found`` as plain data for ``--json``."""

    def plain(side: Side) -> dict[str, Any]:
        runs = [
            {"path": str(run.path), "name": run.name, "state": run.state, "seed": seed(run),
             "world_size": run.world_size}
            for run in side.runs
        ]  # fmt: skip
        return {"path": str(side.path), "runs": runs, "problems": side.problems}

    pair = found.equality
    return {
        "same": found.same,
        "one": plain(found.one),
        "other": plain(found.other),
        "settings": asdict(found.settings),
        "equality": asdict(pair) if pair else None,
        "evaluations": [asdict(evaluation) for evaluation in found.evaluations] if pair else None,
        "throughput": [asdict(throughput) for throughput in found.throughput] if pair else None,
        "metrics": [asdict(metric) for metric in found.metrics],
        "predictions": asdict(found.predictions) if found.predictions else None,
        "why_no_predictions": found.why_no_predictions,
        "by_seed": {str(name): asdict(equal) for name, equal in found.by_seed.items()},
        "spreads": {
            of: [{**asdict(spread), "difference": spread.difference} for spread in spreads]
            for of, spreads in found.spreads.items()
        },
    }
