"""The comparison as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.errors import plural
from harness.runs import layout
from harness.runs.reader import Record
from harness.tools.compare.comparison import (
    Code,
    Differences,
    GroupComparison,
    PairedPredictions,
    RunComparison,
    SettingsComparison,
    Spread,
    Throughput,
)
from harness.tools.compare.significance import LEVEL
from harness.tools.report import formatting

VERDICTS = {
    "equal": "Bitwise equal: checkpoints, weights, {}.",
    "equal so far": "No log line or checkpoint that both runs have differs.",
    "different": "Not equal.",
}
_SHOWN_ELSEWHERE = ("name", "output", "launch")  # as paths, and as the ranks of the topology


def render(comparison: RunComparison | GroupComparison) -> str:
    """Sides, results, recipe, circumstances and equality, separated by empty lines."""
    settings = [_recipe(comparison.settings), _circumstances(comparison.settings)]
    if isinstance(comparison, RunComparison):
        parts = [_sides(comparison), _pair_results(comparison), *settings, _equality(comparison)]
    else:
        parts = [_sides(comparison), _group_results(comparison), *settings]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _sides(comparison: RunComparison | GroupComparison) -> Iterator[str]:
    for label, side in (("A", comparison.one), ("B", comparison.other)):
        if len(side.runs) == 1:
            yield f"{label}  {side.runs[0].path}  ({_state(side.runs[0])})"
        else:
            yield f"{label}  {side.path}  ({len(side.runs)} runs, seeds {', '.join(map(str, side.seeds))})"
        yield from (f"     {problem}" for problem in side.problems)


def _state(record: Record) -> str:
    return record.state + (f", {formatting.ranks(record.world_size_text)}" if record.world_size_text else "")


# Equality


def _equality(comparison: RunComparison) -> Iterator[str]:
    equality = comparison.equality
    predicts = (comparison.one.runs[0].path / layout.PREDICTIONS).is_file()
    contents = "log and predictions" if predicts else "log; neither run has predictions"
    since = f" They differ from step {equality.step} on." if equality.step is not None else ""
    yield VERDICTS[equality.verdict].format(contents) + since
    yield from (f"  {line}" for line in equality.lines)
    yield from _world_sizes(comparison)


def _world_sizes(comparison: RunComparison) -> Iterator[str]:
    """The reasons why runs with different numbers of ranks differ."""
    ranks_a, ranks_b = comparison.one.runs[0].world_size_text, comparison.other.runs[0].world_size_text
    if comparison.equality.verdict != "different" or not ranks_a or not ranks_b or ranks_a == ranks_b:
        return
    parallel = [side.runs[0].config.get("parallel") for side in (comparison.one, comparison.other)]
    logical = [isinstance(section, dict) and section.get("logical_ranks") for section in parallel]
    if logical[0] and logical[0] == logical[1]:
        yield f"  With parallel.logical_ranks={logical[0]}, the number of processes does not explain it. A value that"
        yield "  your code logs from one process may, or another kind of machine, code or data."
        return
    yield (
        f"  On {ranks_a} and on {formatting.ranks(ranks_b)}, sums are computed in different orders, which changes the "
        "last digits."
    )
    yield "  Each rank has its own random stream and batch norm statistics: with dropout or batch norm, more differs."
    shards = [side.runs[0].config.get("data") for side in (comparison.one, comparison.other)]
    if any(not isinstance(data, dict) or data.get("shard") != "global" for data in shards):
        yield "  The batches hold different rows, too; data.shard=global makes them equal for any number of ranks."


# Settings


def _recipe(settings: SettingsComparison) -> Iterator[str]:
    """The settings that change what is trained."""
    yield from settings.missing
    if not settings.recipe:
        yield "Recipe: cannot be compared" if settings.recipe is None else "Recipe: equal"
        return
    yield "Recipe"
    yield from formatting.table(
        [("", "A", "B"), *((key, *map(formatting.short, pair)) for key, pair in settings.recipe.items())], "  "
    )


def _circumstances(settings: SettingsComparison) -> Iterator[str]:
    yield "Circumstances"
    others = settings.other
    if others is not None:
        others = {key: pair for key, pair in others.items() if key.split(".")[0] not in _SHOWN_ELSEWHERE}
    rows: list[Sequence[str]] = [("", "", "A", "B")]
    rows += _differences("other settings", others)
    rows += _differences("packages", settings.packages)
    rows += _differences("topology", settings.topology)
    yield from formatting.table(rows, "  ")
    if settings.code:
        yield f"  code: {_code(settings.code)}"


def _differences(title: str, differences: Differences | None) -> Iterator[Sequence[str]]:
    if not differences:
        yield title, "cannot be compared" if differences is None else "equal", "", ""
    for number, (key, pair) in enumerate((differences or {}).items()):
        yield title if not number else "", key, *map(formatting.short, pair)


def _code(code: Code) -> str:
    names = [", then ".join(commit[:12] if commit else "no repository" for commit in side) for side in code.commits]
    if code.same:
        return f"the same commit, {names[0]}"
    if code.same is False:
        dirty = [" with uncommitted changes" if changed else "" for changed in code.changed]
        own = [f"{name} {' -> '.join(map(formatting.short, pair))}" for name, pair in (code.sources or {}).items()]
        differ = f"; your own modules differ: {', '.join(own)}" if own else ""
        return f"A {names[0]}{dirty[0]}; B {names[1]}{dirty[1]}{differ}"
    if not any(code.changed):
        if code.sources == {}:
            return "the digests of your own modules are equal; the runs were started outside a repository"
        return "unknown: the runs were started outside a repository"
    whose = "both" if all(code.changed) else "A" if code.changed[0] else "B"
    return f"the same commit, {names[0]}, but {whose} had uncommitted changes: the code may differ"


# Results


def _pair_results(comparison: RunComparison) -> Iterator[str]:
    yield "Results"
    evaluations_a, evaluations_b = comparison.evaluations
    missing = [label for label, run in (("A", evaluations_a), ("B", evaluations_b)) if not run.final]
    if missing:
        yield f"  no metrics to compare: {' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no evaluation"
    else:
        yield f"  newest evaluation (A: step {evaluations_a.step}, B: step {evaluations_b.step})"
        yield from _metrics((metric.name, metric.final) for metric in comparison.metrics)
        if evaluations_a.best_step is not None and evaluations_b.best_step is not None:
            yield f"  best evaluation (A: step {evaluations_a.best_step}, B: step {evaluations_b.best_step})"
            yield from _metrics((metric.name, metric.best) for metric in comparison.metrics)
    if comparison.predictions or not comparison.same:
        yield from _predictions(comparison.predictions, comparison.why_no_predictions)
    yield from _throughput(*comparison.throughput)
    yield (
        "  A single run on each side does not show how much the seed changes these numbers: compare folders with "
        "runs of several seeds."
    )


def _metrics(values: Iterable[tuple[str, tuple[float | None, float | None]]]) -> Iterator[str]:
    rows = [("", "A", "B", "B - A")]
    for name, (a, b) in values:
        gap = b - a if a is not None and b is not None else None
        rows.append((name, formatting.number(a, 6), formatting.number(b, 6), formatting.signed(gap)))
    yield from formatting.table(rows, "    ")


def _predictions(paired: PairedPredictions | None, reason: str) -> Iterator[str]:
    if paired is None:
        yield f"  predictions of the best weights cannot be compared: {reason}"
        return
    low, high = paired.interval
    yield (
        f"  predictions of the best weights, {plural(paired.rows, 'row')}: {paired.both} correct in both, "
        f"{paired.only_one} only in A, {paired.only_other} only in B, {paired.neither} in neither"
    )
    chance = ": these rows do not show a difference" if paired.p >= 1 - LEVEL else ""
    yield (
        f"    accuracy, B - A: {paired.difference:+.4f}, {LEVEL:.0%} interval {low:+.4f} to {high:+.4f}; "
        f"McNemar's exact test: p = {paired.p:.3g}{chance}"
    )


def _throughput(a: Throughput, b: Throughput) -> Iterator[str]:
    rows = (("total seconds", a.wall_s, b.wall_s), ("rows per second", a.rows_per_s, b.rows_per_s))
    yield "  time"
    cells = [(name, *map(formatting.number, values)) for name, *values in rows]
    yield from formatting.table([("", "A", "B"), *cells], "    ")


def _group_results(comparison: GroupComparison) -> Iterator[str]:
    yield f"Results over seeds (A: {len(comparison.one.runs)}, B: {len(comparison.other.runs)}): mean ± standard error"
    if not comparison.spreads["final"]:
        yield "  nothing to compare: no metric is in all of the runs"
    for title, spreads in comparison.spreads.items():
        if spreads:
            yield f"  {'newest' if title == 'final' else title} evaluation of each run"
            header = ("", "A", "B", "B - A", f"{LEVEL:.0%} interval (Welch)")
            yield from formatting.table([header, *map(_spread, spreads)], "    ")


def _spread(spread: Spread) -> Sequence[str]:
    means = [formatting.number(mean, 6) + (f" ± {error:.2g}" if error is not None else " (one seed)")
             for mean, error in zip(spread.means, spread.errors, strict=True)]  # fmt: skip
    interval = "{:+.4g} to {:+.4g}".format(*spread.interval) if spread.interval else "needs two seeds"
    return spread.name, *means, formatting.signed(spread.difference), interval
