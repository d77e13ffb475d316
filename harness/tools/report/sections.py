"""The sections of a report that have figures, their notes, and the reasons why others are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.errors import plural
from harness.runs import ownership
from harness.tools.report import charts, formatting, mistakes, tables
from harness.tools.report.charts import Chart
from harness.tools.report.curves import CurveLine
from harness.tools.report.history import Curve
from harness.tools.report.mistakes import Confusion, Mistake
from harness.tools.report.run_set import ReportedRun, RunSet
from harness.tools.report.scaling import ScalingSeries, Target

_NUMBERS_PER_LINE = 12  # rows per line in the table behind the curves


@dataclass(frozen=True)
class ReportSection:
    """A section of figures: notes above them, and a table below."""

    key: str
    title: str
    charts: list[Chart]
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    caption: str = ""
    mistakes: list[Mistake] = field(default_factory=list)


def choose(
    runs: RunSet, target: Target | None, scaling: Sequence[ScalingSeries], lines: Sequence[CurveLine]
) -> tuple[list[Chart], list[ReportSection], list[str]]:
    """(charts of the learning curves, the sections after them, reasons why others are left out).

    The curves' charts have no ``data``: the page draws them from the lines, along the axis that the reader chooses.
    """
    curves, left_out = _curves(runs, lines)
    sections = [
        _time_to_target(runs, target, scaling, left_out),
        _speed_up(scaling, left_out),
        _seeds(runs),
        _time(lines, left_out),
        _mistakes(runs, left_out),
    ]
    return curves, [section for section in sections if section], left_out


def _curves(runs: RunSet, lines: Sequence[CurveLine]) -> tuple[list[Chart], list[str]]:
    left_out: list[str] = []
    curves = []
    amount = plural(len(lines), "line")
    if any(len(line.first.history.validation) for line in lines):
        header, rows = _numbers(lines, "validation", {name: name for name in metrics(runs, lines)})
        summary = f"Validation metrics during training, {amount}; the table below has the numbers."
        curves.append(Chart("validation", "Validation", summary, [], {}, header, rows, height=360))
    elif lines:
        left_out.append("Validation curves: no run has an evaluation yet.")
    if any(len(line.first.history.train) for line in lines):
        header, rows = _numbers(lines, "train", {"loss": "loss", "lr": "learning rate"})
        summary = f"Training loss or learning rate, {amount}; the table below has the numbers."
        curves.append(Chart("training", "Training", summary, [], {}, header, rows, height=360))
    if any(_scale_changed(line.first) for line in lines):
        header = ["run", "smallest loss scale", "largest loss scale", "skipped steps", "rows in skipped steps", "steps"]
        rows = [
            [line.label, *(formatting.count(side) for side in run.history.loss_scales or (None, None)),
             formatting.count(run.history.skipped), formatting.count(run.history.samples_skipped),
             formatting.count(run.history.steps)]
            for line in lines for run in line.group.runs
        ]  # fmt: skip
        summary = f"Loss scale during training, {amount}; the table below has the skipped steps."
        curves.append(Chart("scale", "Loss scale and skipped steps", summary, [], {}, header, rows, height=300))
    elif lines:
        scales = {line.first.history.loss_scales[0] for line in lines if line.first.history.loss_scales}
        constant = f"it stayed at {', '.join(formatting.count(scale) for scale in sorted(scales))}"
        left_out.append(f"Loss scale: {constant if scales else 'not used'}, and no step was skipped.")
    return curves, left_out


def _scale_changed(run: ReportedRun) -> bool:
    scales = run.history.loss_scales
    return bool(run.history.skipped) or (scales is not None and scales[0] != scales[1])


def _numbers(lines: Sequence[CurveLine], part: str, names: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): evenly spaced points of each line, with the last; ``names``: {value: column title}."""
    rows = []
    for line in lines:
        curve: Curve = getattr(line.first.history, part)
        last = len(curve) - 1
        count = min(len(curve), _NUMBERS_PER_LINE)
        for place in sorted({round(index * last / max(1, count - 1)) for index in range(count)}):
            at = [formatting.number(curve.at["epoch"][place]), formatting.count(curve.at["samples"][place])]
            values = [curve.values[name][place] if name in curve.values else None for name in names]
            numbers = [formatting.number(value, 5) for value in values]
            rows.append([line.label, *at, formatting.number(curve.at["seconds"][place]), *numbers])
    return ["run", "epoch", "samples", "seconds", *names.values()], rows


def metrics(runs: RunSet, lines: Sequence[CurveLine]) -> list[str]:
    """Validation metrics, the deciding one first."""
    names = dict.fromkeys(name for line in lines for name in line.first.history.validation.values)
    return sorted(names, key=lambda name: name != runs.metric)


def undrawn(runs: RunSet, lines: Sequence[CurveLine]) -> str:
    hidden = len(runs.runs) - sum(len(line.group.runs) for line in lines)
    if not hidden or not lines:
        return ""
    others = f"{plural(hidden, 'other run')} {'is' if hidden == 1 else 'are'}"
    return f"The figures show only the best {plural(len(lines), 'line')}; {others} in the table of all runs."


def _time_to_target(
    runs: RunSet, target: Target | None, scaling: Sequence[ScalingSeries], left_out: list[str]
) -> ReportSection | None:
    if len(runs.runs) == 1:
        return None  # the card at the top shows the single time
    chart = charts.time_to_target(runs, target, scaling) if target else None
    if target is None or chart is None:
        why = f"no run reached {formatting.number(target.value)}" if target else "no run has an evaluation"
        left_out.append(f"Time to target: {why}.")
        return None
    goal = f"{formatting.metric(runs.metric)} {formatting.at_least(runs.direction, target.value)}"
    notes = [
        f"Wall time, including evaluations and checkpoints, until the first evaluation with {goal} ({target.why}; "
        "--target sets another). Nothing is interpolated."
    ]
    return ReportSection("target", "Time to target", [chart], notes)


def _speed_up(scaling: Sequence[ScalingSeries], left_out: list[str]) -> ReportSection | None:
    figures = charts.speed_up(scaling)
    if not figures:
        left_out.append("Speed-up: no two finished runs differ only in their number of ranks.")
        return None
    notes = [
        "Compares runs with the same settings, global batch and kind of device, and different numbers of ranks. Speed "
        "is in rows per second of training, excluding evaluations. The ideal is proportional to the number of ranks."
    ]
    if not all(each.same_batches for each in scaling):
        notes.append(
            "Some of these runs do not use data.shard: global, so their batches hold different rows at each number of "
            "ranks, and their curves also differ by chance."
        )
    header, rows = tables.scaling_rows(scaling)
    return ReportSection("speed", "Speed-up", figures, notes, header, rows, "Compared runs")


def _seeds(runs: RunSet) -> ReportSection | None:
    header, rows = tables.seeds_rows(runs)
    if not rows:
        return None
    notes = [f"Runs that differ only by seed: {formatting.metric(runs.metric)}, ± sample standard deviation."]
    return ReportSection("seeds", "Seeds", [], notes, header, rows, "Best values over seeds")


def _time(lines: Sequence[CurveLine], left_out: list[str]) -> ReportSection | None:
    chart = charts.where_time_went(lines)
    if chart is None:
        left_out.append("Where the time went: the logs have no times.")
        return None
    return ReportSection(
        "time", "Time", [chart], ["Shares of the training time over all ranks, excluding evaluations."]
    )


def _mistakes(runs: RunSet, left_out: list[str]) -> ReportSection | None:
    ways = ((run, mistakes.confusion(run), *mistakes.by_name(run)) for run in runs.ranked)
    run, found, header, rows = next((each for each in ways if each[1] or each[2]), (None, None, [], []))
    if run is None:
        left_out.append("Mistakes: no run has a confusion matrix, or metrics by label or column.")
        return None
    chart = charts.confusion(found, run.label) if found else None
    allowed = runs.trust or ownership.is_own(run.record.path)
    shown, wrong, num_rows = mistakes.most_confident(run, with_images=allowed)
    if shown and not allowed:
        left_out.append(
            "Images of mistakes: you did not start this run on this machine, so its files may point to any image on "
            "this disk. To show the images, add --trust."
        )
    notes = [f"Run: {run.label}. {_origin(found, num_rows > 0, run.record.state == 'finished')}"]
    if num_rows and header[:1] != ["column"]:
        notes.append(f"Wrong predictions: {formatting.count(wrong)} of {formatting.count(num_rows)} validation rows.")
    caption = f"By {header[0]}, the worst first" if header else ""
    if found and not header:
        rows = [[true, predicted, str(count)] for true, predicted, count in found.pairs]
        header, caption = ["label", "prediction", "rows"] if rows else [], "Most frequent errors"
    return ReportSection("mistakes", "Mistakes", [chart] if chart else [], notes, header, rows, caption, shown)


def _origin(found: Confusion | None, is_listed: bool, is_finished: bool) -> str:
    """The weights behind the matrix or the metrics, and behind the list."""
    best = "its best weights" + ("" if is_finished else " as of the last time it finished")
    if found and found.of_best:
        return f"The matrix and the list are from {best}."
    what = "matrix is" if found else "metrics are"
    return f"The {what} from its newest evaluation" + (f", the list from {best}." if is_listed else ".")


def all_charts(sections: Sequence[ReportSection]) -> Iterator[Chart]:
    for section in sections:
        yield from section.charts
