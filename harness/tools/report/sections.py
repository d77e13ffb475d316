"""The sections of a report that have figures or tables, and the reasons why others are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.errors import plural
from harness.runs import layout, ownership
from harness.tools.report import figures, formatting, images, mistakes, tables
from harness.tools.report.curves import CurveLine
from harness.tools.report.figures import Chart
from harness.tools.report.mistakes import Mistake
from harness.tools.report.run_set import RunSet
from harness.tools.report.tables import ReportTable


@dataclass(frozen=True)
class ReportSection:
    """A section: notes above its figure, and a table below."""

    key: str
    title: str
    notes: list[str]
    chart: Chart | None = None
    table: ReportTable | None = None
    mistakes: list[Mistake] = field(default_factory=list)
    images: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    """(row, [(what, image as a data URI)])."""


def choose(runs: RunSet, lines: Sequence[CurveLine]) -> tuple[list[Chart], list[ReportSection], list[str]]:
    """Return (charts of the learning curves, the sections after them, reasons why others are left out).

    The curves' charts have no ``data``: the page draws them from the lines, along the axis that the reader chooses.
    """
    curves, left_out = _curves(lines)
    sections = [_speed_up(runs, left_out), _seeds(runs), _time(lines, left_out), _mistakes(runs, left_out)]
    sections.append(_predicted_images(runs))
    return curves, [section for section in sections if section], left_out


def _curves(lines: Sequence[CurveLine]) -> tuple[list[Chart], list[str]]:
    left_out: list[str] = []
    curves = []
    amount = plural(len(lines), "line")
    if any(line.first.history.validation.values for line in lines):
        curves.append(Chart("validation", "Validation", f"Validation metrics during training, {amount}."))
    elif lines:
        left_out.append("Validation curves: no run has an evaluation yet.")
    if any(len(line.first.history.train) for line in lines):
        summary = f"Loss of training and validation, learning rate or loss scale, {amount}."
        curves.append(Chart("training", "Loss and learning rate", summary))
    return curves, left_out


def _speed_up(runs: RunSet, left_out: list[str]) -> ReportSection | None:
    table = tables.speed_up(runs)
    if not table.rows:
        left_out.append("Speed-up: no two finished runs differ only in their number of ranks.")
        return None
    notes = [
        "Compares runs with the same settings, global batch and kind of device, and different numbers of ranks. Speed "
        "is in rows per second of training, excluding evaluations. The ideal is proportional to the number of ranks."
    ]
    return ReportSection("speed", "Speed-up", notes, table=table)


def _seeds(runs: RunSet) -> ReportSection | None:
    table = tables.seeds(runs)
    if not table.rows:
        return None
    notes = [f"Runs that differ only by seed: {formatting.metric(runs.metric)}, ± sample standard deviation."]
    return ReportSection("seeds", "Seeds", notes, table=table)


def _time(lines: Sequence[CurveLine], left_out: list[str]) -> ReportSection | None:
    chart = figures.where_time_went(lines)
    if chart is None:
        left_out.append("Where the time went: the logs have no times.")
        return None
    notes = ["Shares of the training time over all ranks, excluding evaluations. harness explain says what to change."]
    return ReportSection("time", "Training time", notes, chart)


def _mistakes(runs: RunSet, left_out: list[str]) -> ReportSection | None:
    ways = ((run, mistakes.confusion(run), mistakes.by_name(run)) for run in runs.ranked)
    run, matrix, table = next((each for each in ways if each[1] or each[2]), (None, None, None))
    if run is None:
        left_out.append("Mistakes: no run has a confusion matrix, or metrics by label or column.")
        return None
    allowed = runs.trust or ownership.is_own(run.record.path)
    wrong = mistakes.most_confident(run, with_images=allowed)
    if wrong.shown and not allowed:
        left_out.append(
            "Images of mistakes: you did not start this run on this machine, so its files may point to any image on "
            "this disk. To show the images, add --trust."
        )
    best = "its best weights" + ("" if run.record.state == "finished" else " as of the last time it finished")
    if matrix and matrix.of_best:
        origin = f"All below is of {best}."
    else:
        evaluation = f"its {'best evaluation so far' if matrix else 'newest evaluation'}"
        origin = f"The metrics are from {evaluation}" + (f", the list of {best}." if wrong.num_rows else ".")
    notes = [f"Run: {run.label}. {origin}"]
    if wrong.num_rows and not (table and table.header[0] == "column"):
        share = f"{formatting.count(wrong.number)} of {formatting.count(wrong.num_rows)}"
        notes.append(f"Wrong predictions: {share} validation rows.")
    if wrong.num_unread:
        notes.append(f"Not counted: {plural(wrong.num_unread, 'validation row')} that could not be read.")
    chart = figures.confusion(matrix, run.label) if matrix else None
    if matrix and not table:
        table = mistakes.by_class(matrix)
    return ReportSection("mistakes", "Mistakes", notes, chart, table, wrong.shown)


def _predicted_images(runs: RunSet) -> ReportSection | None:
    for run in (run for run in runs.ranked if (run.record.path / layout.PREDICTED).is_dir()):
        table = mistakes.read_table(run.record.path / layout.PREDICTIONS)
        find = images.image_finder(run) if runs.trust or ownership.is_own(run.record.path) else lambda name: ""
        if shown := images.predicted(run, table, find) if table is not None else []:
            notes = [f"Run: {run.label}. Rows spread over the validation data, predicted with its best weights."]
            return ReportSection("predictions", "Predicted images", notes, images=shown)
    return None
