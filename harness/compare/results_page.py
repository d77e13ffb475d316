"""What two runs, or two groups of seeds, came to, as tables, with what may be chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.compare.columns import aligned, number
from harness.compare.found import Found
from harness.compare.pace import Pace
from harness.compare.results import Evaluations, Guesses, Metric, Spread
from harness.compare.significance import LEVEL


def lines(found: Found) -> Iterator[str]:
    return _pair(found) if found.pair else _seeds(found)


def _pair(found: Found) -> Iterator[str]:
    yield "What they came to"
    one, other = found.evaluations
    missing = [label for label, run in (("A", one), ("B", other)) if not run.final]
    if missing:
        yield f"  metrics cannot be compared: {' and '.join(missing)} left no evaluation"
    else:
        yield from _tables(found, one, other)
    yield from _guesses(found.guesses, found.why_no_guesses)
    yield from _paces(*found.paces)
    yield "  One run each: how far a seed alone moves these numbers is not known; folders of several seeds say it."


def _tables(found: Found, one: Evaluations, other: Evaluations) -> Iterator[str]:
    steps = [f"newest evaluation (step {one.step} and step {other.step})", ""]
    if one.best_step is not None and other.best_step is not None:
        steps[1] = f"best evaluation (step {one.best_step} and step {other.best_step})"
    for title, of in zip(steps, ("final", "best"), strict=True):
        if title:
            yield f"  {title}"
            yield from (f"    {line}" for line in aligned([("", "A", "B", "B - A"), *_metrics(found.metrics, of)]))


def _metrics(metrics: Sequence[Metric], of: str) -> Iterator[Sequence[str]]:
    for metric in metrics:
        one, other = getattr(metric, of)
        gap = f"{other - one:+.6g}" if one is not None and other is not None else ""
        yield metric.name, number(one), number(other), gap


def _paces(one: Pace, other: Pace) -> Iterator[str]:
    shared = [(name.replace("time_", "share: ", 1), one.shares[name], other.shares[name])
              for name in one.shares if name in other.shares]  # fmt: skip
    rows = [("seconds in all", one.wall_s, other.wall_s), ("rows a second", one.rows_per_s, other.rows_per_s), *shared]
    yield "  time"
    table = [(name, *(f"{value:.4g}" if value is not None else "-" for value in values)) for name, *values in rows]
    yield from (f"    {line}" for line in aligned([("", "A", "B"), *table]))


def _guesses(guesses: Guesses | None, why: str) -> Iterator[str]:
    if guesses is None:
        yield f"  row by row, the best models cannot be compared: {why}"
        return
    low, high = guesses.interval
    yield (
        f"  the best models on the {guesses.rows} rows of both: {guesses.both} right by both, "
        f"{guesses.only_one} by A alone, {guesses.only_other} by B alone, {guesses.neither} by neither"
    )
    yield (
        f"    accuracy, B - A: {guesses.difference:+.4f}, {LEVEL:.0%} interval {low:+.4f} to {high:+.4f}; "
        f"McNemar's exact test: p = {guesses.p:.3g}{_chance(guesses.p)}"
    )


def _chance(p: float) -> str:
    return ": these rows do not tell them apart" if p >= 1 - LEVEL else ""


def _seeds(found: Found) -> Iterator[str]:
    yield f"What they came to, over {len(found.one.runs)} and {len(found.other.runs)} seeds: mean ± standard error"
    if not found.spreads["final"]:
        yield "  cannot be compared: no metric that each of the runs has"
    for title, spreads in found.spreads.items():
        if spreads:
            yield f"  {'newest' if title == 'final' else title} evaluation of each"
            head = ("", "A", "B", "B - A", f"{LEVEL:.0%} interval (Welch)")
            yield from (f"    {line}" for line in aligned([head, *map(_spread, spreads)]))


def _spread(spread: Spread) -> Sequence[str]:
    means = [f"{mean:.6g}" + (f" ± {error:.2g}" if error is not None else " (one seed)")
             for mean, error in zip(spread.means, spread.errors, strict=True)]  # fmt: skip
    interval = "{:+.4g} to {:+.4g}".format(*spread.interval) if spread.interval else "not from one seed"
    return spread.name, *means, f"{spread.difference:+.6g}", interval
