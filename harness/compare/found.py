"""Everything that ``harness compare`` finds out of two runs, or of two groups of runs that differ by seed alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.compare import results, sameness, settings
from harness.compare.pace import Pace, pace
from harness.compare.results import Evaluations, Guesses, Metric, Spread
from harness.compare.sameness import Sameness
from harness.compare.settings import Settings
from harness.errors import ConfigError
from harness.report.study import LENGTH
from harness.runs.reader import Record, find


@dataclass(frozen=True)
class Side:
    """A run, or runs that differ by seed alone. ``problems``: what is missing or half-written, and who was left out."""

    path: Path
    runs: list[Record]
    problems: list[str]

    @property
    def seeds(self) -> list[Any]:
        return [seed(run) for run in self.runs]


@dataclass(frozen=True)
class Found:
    """``pair``, ``metrics``, ``paces`` and ``guesses``: of two single runs. ``by_seed`` and ``spreads``: of groups."""

    one: Side
    other: Side
    settings: Settings
    pair: Sameness | None
    metrics: list[Metric]
    evaluations: tuple[Evaluations, Evaluations]
    paces: tuple[Pace, Pace]
    guesses: Guesses | None
    why_no_guesses: str
    by_seed: dict[Any, Sameness]
    spreads: dict[str, list[Spread]]

    @property
    def same(self) -> bool:
        """Whether all of it is there in both, and bitwise the same."""
        if self.pair:
            return self.pair.verdict == "same"
        matched = set(self.one.seeds) == set(self.other.seeds) == set(self.by_seed)
        return matched and all(same.verdict == "same" for same in self.by_seed.values())


def seed(record: Record) -> Any:
    return settings.with_defaults(record.config).get("seed")


def side(path: Path) -> Side:
    """What ``path`` names: a run, or a folder of runs. Raises ConfigError where those differ by more than seed."""
    records = find([path])
    if len(records) == 1:
        return Side(path, records, list(records[0].problems))
    runs = [record for record in records if record.state == "finished"]
    problems = [f"{record.path.name} is left out: {record.state}" for record in records if record not in runs]
    problems += [f"{record.path.name}: {problem}" for record in runs for problem in record.problems]
    if not runs:
        raise ConfigError(
            f"none of its {len(records)} runs is finished", where=str(path), hint="name a run folder to look at one"
        )
    _differ_by_seed_alone(path, runs)
    return Side(path, runs, problems)


def _differ_by_seed_alone(path: Path, runs: list[Record]) -> None:
    first, seen = runs[0], {seed(runs[0]): runs[0]}
    for run in runs[1:]:
        recipe, rest = settings.config_differences(first, run)
        keys = [key for key in (*recipe, *rest) if key in LENGTH or key in recipe and key != "seed"]
        if first.world_size != run.world_size:
            keys.append("number of ranks")
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            raise ConfigError(
                f"{first.path.name} and {run.path.name} differ by more than their seed: {', '.join(keys[:5])}{more}",
                where=str(path),
                hint="name two runs of it, or a folder whose runs differ by seed alone",
            )
        if seed(run) in seen:
            raise ConfigError(
                f"{seen[seed(run)].path.name} and {run.path.name} are of one seed, {seed(run)}",
                where=str(path),
                hint="keep one of them there, so that no seed counts twice",
            )
        seen[seed(run)] = run


def compare(one: Side, other: Side) -> Found:
    """Compare two runs; or two groups: their runs of the same seed, and what they came to over all seeds."""
    mine, theirs = ([results.evaluations(run) for run in side.runs] for side in (one, other))
    told = settings.compare(one.runs[0], other.runs[0])
    paces = pace(one.runs[0]), pace(other.runs[0])
    if len(one.runs) == len(other.runs) == 1:
        pair = sameness.compare(one.runs[0], other.runs[0])
        guesses, why = results.guesses(one.runs[0].path, other.runs[0].path)
        metrics = results.metrics(mine[0], theirs[0])
        return Found(one, other, told, pair, metrics, (mine[0], theirs[0]), paces, guesses, why, {}, {})
    partners = dict(zip(other.seeds, other.runs, strict=True))
    by_seed = {
        name: sameness.compare(run, partners[name])
        for name, run in zip(one.seeds, one.runs, strict=True)
        if name in partners
    }
    spreads = {of: results.spreads(mine, theirs, best=of == "best") for of in ("best", "final")}
    return Found(one, other, told, None, [], (mine[0], theirs[0]), paces, None, "", by_seed, spreads)


def as_plain(found: Found) -> dict[str, Any]:
    """``found`` as JSON can hold it."""

    def plain(side: Side) -> dict[str, Any]:
        runs = [
            {
                "path": str(run.path),
                "name": run.name,
                "state": run.state,
                "seed": seed(run),
                "world_size": run.world_size,
            }
            for run in side.runs
        ]
        return {"path": str(side.path), "runs": runs, "problems": side.problems}

    return {
        "same": found.same,
        "one": plain(found.one),
        "other": plain(found.other),
        "settings": asdict(found.settings),
        "sameness": asdict(found.pair) if found.pair else None,
        "evaluations": [asdict(evaluation) for evaluation in found.evaluations] if found.pair else None,
        "paces": [asdict(pace) for pace in found.paces] if found.pair else None,
        "metrics": [asdict(metric) for metric in found.metrics],
        "guesses": asdict(found.guesses) if found.guesses else None,
        "why_no_guesses": found.why_no_guesses,
        "by_seed": {str(name): asdict(same) for name, same in found.by_seed.items()},
        "spreads": {
            of: [{**asdict(spread), "difference": spread.difference} for spread in spreads]
            for of, spreads in found.spreads.items()
        },
    }
