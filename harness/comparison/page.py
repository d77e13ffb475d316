"""What was found, as text: calm, aligned, and with the numbers behind each word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.comparison.found import Found
from harness.comparison.results import Guesses, Metric, Spread
from harness.comparison.sameness import Sameness
from harness.comparison.settings import Differences, Settings
from harness.comparison.significance import LEVEL
from harness.records import Record

_WIDE = 48  # characters of a setting's value; longer ones are cut

VERDICTS = {
    "same": "Bitwise the same: weights, newest checkpoint and record.",
    "same so far": "Bitwise the same as far as both go; what is missing is said below.",
    "different": "Not the same.",
    "unknown": "Whether they are the same cannot be said: they left nothing that can be compared.",
}


def text(found: Found) -> str:
    """The whole page."""
    parts = [_sides(found), _verdict(found), _settings(found.settings)]
    parts += [_pair(found)] if found.pair else [_seeds(found)]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _sides(found: Found) -> Iterator[str]:
    for label, side in (("A", found.one), ("B", found.other)):
        if len(side.runs) == 1:
            yield f"{label}  {side.runs[0].path}  ({_about(side.runs[0])})"
        else:
            yield f"{label}  {side.path}  ({len(side.runs)} runs, seeds {', '.join(map(str, side.seeds))})"
        yield from (f"     {problem}" for problem in side.problems)


def _about(record: Record) -> str:
    world = record.world_size
    return record.state + (f", {world} rank{'s' if world != 1 else ''}" if world else "")


# Same or not


def _verdict(found: Found) -> Iterator[str]:
    if found.pair:
        yield from _sameness(found.pair)
        return
    if not found.by_seed:
        yield "Not the same: they have no seed in common."
    for seed, same in found.by_seed.items():
        parting = f" {_parting(same)}" if same.parting else ""
        yield f"seed {seed}: {VERDICTS[same.verdict]}{parting}"


def _sameness(same: Sameness) -> Iterator[str]:
    yield f"{VERDICTS[same.verdict]} {_parting(same) if same.parting else ''}".rstrip()
    yield f"  weights      {_weights(same)}"
    yield f"  checkpoints  {_checkpoints(same)}"
    yield from (f"               {problem}" for problem in same.checkpoints.refused)
    yield from (f"  {'record' if not number else '':<11}  {line}" for number, line in enumerate(_record(same)))
    one, other = same.world_sizes
    if same.verdict == "different" and one and other and one != other:
        yield f"  Over {one} and over {other} ranks sums are taken in another order: last digits differ in any case."


def _parting(same: Sameness) -> str:
    assert same.parting
    low, high = same.parting
    if low == high:
        return f"They part at step {low}."
    return f"They part between step {low} and step {high}." if low else f"They part within the first {high} steps."


def _weights(same: Sameness) -> str:
    weights = same.weights
    if weights.same is None:
        return f"not compared: {weights.why}"
    of = f", of step {weights.steps[0]}" if weights.steps[0] is not None else ""
    return f"the same{of}" if weights.first is None else f"{_first(weights.first)}{of}"


def _checkpoints(same: Sameness) -> str:
    found = same.checkpoints
    if not found.steps:
        newest = " and ".join("none" if step is None else f"step {step}" for step in found.newest)
        return f"not compared: none of the same step (the newest: {newest})"
    equal = f"the same at step{'s' if len(found.equal) > 1 else ''} {_list(found.equal)}" if found.equal else ""
    if found.first is None:
        return equal or "not compared"
    return f"{equal}{'; ' if equal else ''}at step {found.differs} {_first(found.first)}"


def _first(part: Any) -> str:
    if part.values is not None:
        return f"{part.name} differs first: {part.values[0]} and {part.values[1]}"
    return f"{part.name} differs first, " + (f"by up to {part.by:.3g}" if part.by is not None else "in shape")


def _record(same: Sameness) -> Iterator[str]:
    record = same.record
    if not record.compared:
        yield f"not compared: no lines of the same steps ({record.lines[0]} and {record.lines[1]} lines)"
        return
    yield f"{record.equal} of {record.compared} lines of the same steps are the same, times aside"
    alone = [f"{label} has {lines - record.compared} more" for label, lines in zip("AB", record.lines, strict=True)
             if lines > record.compared]  # fmt: skip
    if alone:
        ends = f"A goes to step {record.last_steps[0]}, B to step {record.last_steps[1]}"
        yield f"{', '.join(alone)} ({ends})"
    if record.first:
        start, end = record.first.steps
        about = f"step {end}" if start == end else f"steps {start} to {end}"
        yield f"the first that differs: {record.first.split}, {about}"
        for name, pair in record.first.fields.items():
            yield f"  {name}  {_short(pair[0])}  {_short(pair[1])}"
        if record.loss and record.loss[0]:
            yield f"the largest difference of the training loss: {record.loss[0]:.3g}, at step {record.loss[1]}"


# Settings


def _settings(settings: Settings) -> Iterator[str]:
    yield "What they were told"
    yield from (f"  {reason}" for reason in settings.unsaid)
    code = settings.code
    rows: list[Sequence[str]] = []
    for title, differences in (
        ("recipe", settings.recipe),
        ("other settings", settings.other),
        ("packages", settings.packages),
        ("topology", settings.topology),
    ):
        rows += _differences(title, differences)
    yield from (f"  {line}" for line in aligned([("", "", "A", "B"), *rows]))
    if code:
        yield f"  code: {_code(code.commits, code.changed, code.same)}"


def _differences(title: str, differences: Differences | None) -> Iterator[Sequence[str]]:
    if differences is None:
        yield title, "cannot be compared", "", ""
    elif not differences:
        yield title, "the same", "", ""
    for number, (key, pair) in enumerate((differences or {}).items()):
        yield title if not number else "", key, *map(_short, pair)


def _code(commits: Any, changed: Any, same: bool | None) -> str:
    names = [", then ".join(commit[:12] if commit else "no repository" for commit in side) for side in commits]
    marks = [f"{name}{' with changes that are not committed' if dirty else ''}"
             for name, dirty in zip(names, changed, strict=True)]  # fmt: skip
    if same:
        return f"the same commit, {names[0]}"
    if same is None and commits[0] == commits[1]:
        whose = "both" if all(changed) else "A" if changed[0] else "B" if changed[1] else ""
        why = f"{whose} with changes that are not committed" if whose else "neither says"
        return f"the same commit, {names[0]}, but {why}: the code may differ" if whose else f"unknown: {names[0]}"
    return f"A {marks[0]}; B {marks[1]}"


# Results


def _pair(found: Found) -> Iterator[str]:
    yield "What they came to"
    one, other = found.evaluations
    if not one.final or not other.final:
        missing = [label for label, run in (("A", one), ("B", other)) if not run.final]
        yield f"  cannot be compared: {' and '.join(missing)} left no evaluation"
        return
    steps = [f"newest evaluation (step {one.step} and step {other.step})", ""]
    if one.best_step is not None and other.best_step is not None:
        steps[1] = f"best evaluation (step {one.best_step} and step {other.best_step})"
    for title, of in zip(steps, ("final", "best"), strict=True):
        if title:
            yield f"  {title}"
            yield from (f"    {line}" for line in aligned([("", "A", "B", "B - A"), *_metrics(found.metrics, of)]))
    yield from _guesses(found.guesses, found.why_no_guesses)
    yield "  One run each: how far a seed alone moves these numbers is not known; folders of several seeds say it."


def _metrics(metrics: Sequence[Metric], of: str) -> Iterator[Sequence[str]]:
    for metric in metrics:
        one, other = getattr(metric, of)
        gap = f"{other - one:+.6g}" if one is not None and other is not None else ""
        yield metric.name, _number(one), _number(other), gap


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


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _short(value: Any) -> str:
    said = "null" if value is None else str(value)
    return said if len(said) <= _WIDE else f"{said[: _WIDE - 1]}…"


def _list(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
