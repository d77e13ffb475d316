"""The sections of the page that have figures: which there are, what is said above them, and why others are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.report import charts_ranks, charts_runs, charts_settings, mistakes, table, words
from harness.report.charts import Chart
from harness.report.lines import Line
from harness.report.mistakes import Mistake
from harness.report.scaling import Ladder, Target
from harness.report.study import Run, Study

MAX_SWING = 1.25  # of a run's pace, above which its speed is said to be rough
_NUMBERS_A_LINE = 12  # evaluations of a line in the table behind the curves


@dataclass(frozen=True)
class Group:
    """A section of figures: sentences above them, and a table below that is always seen."""

    key: str
    title: str
    charts: list[Chart]
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    caption: str = ""
    mistakes: list[Mistake] = field(default_factory=list)


def choose(
    study: Study, target: Target | None, ladders: Sequence[Ladder], drawn: Sequence[Line]
) -> tuple[list[Chart], list[Group], list[str]]:
    """(figures of the drawn lines, the sections after them, why others are left out)."""
    curves, left_out = _curves(study, drawn)
    groups = [
        _time_to_target(study, target, ladders, left_out),
        _speed_up(ladders, left_out),
        _seeds(study),
        _settings(study, left_out),
        _time(drawn, left_out),
        _mistakes(study, left_out),
    ]
    return curves, [group for group in groups if group], left_out


def _curves(study: Study, drawn: Sequence[Line]) -> tuple[list[Chart], list[str]]:
    """The figures whose lines the page draws, and what is left out of them."""
    left_out: list[str] = []
    curves = []
    what = words.plural(len(drawn), "line")
    if any(len(line.first.history.held_out) for line in drawn):
        header, rows = _evaluations(study, drawn)
        summary = f"Held-out metrics along training, {what}; the numbers are in the table below."
        curves.append(Chart("held-out", "On held-out rows", summary, [], {}, header, rows, height=360))
    elif drawn:
        left_out.append("Held-out curves: no run was evaluated yet.")
    if any(len(line.first.history.train) for line in drawn):
        header, rows = _training(drawn)
        summary = f"Loss or learning rate in training, {what}; the numbers are in the table below."
        curves.append(Chart("training", "In training", summary, [], {}, header, rows, height=360))
    if any(_scale_moved(line.first) for line in drawn):
        header = ["run", "least loss scale", "largest loss scale", "skipped steps", "steps"]
        rows = [
            [line.label, *(words.count(side) for side in run.history.loss_scales or (None, None)),
             words.count(run.history.skipped), words.count(run.history.steps)]
            for line in drawn for run in line.repeats.runs
        ]  # fmt: skip
        summary = f"The loss scale along training, {what}; skipped steps are in the table below."
        curves.append(Chart("scale", "Loss scale and skipped steps", summary, [], {}, header, rows, height=300))
    elif drawn:
        scales = {line.first.history.loss_scales[0] for line in drawn if line.first.history.loss_scales}
        told = (
            f"it stayed at {', '.join(words.count(scale) for scale in sorted(scales))}" if scales else "none was used"
        )
        left_out.append(f"Loss scale: {told}, and no step was skipped.")
    return curves, left_out


def _scale_moved(run: Run) -> bool:
    scales = run.history.loss_scales
    return bool(run.history.skipped) or (scales is not None and scales[0] != scales[1])


def _evaluations(study: Study, drawn: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    names = metrics(study, drawn)
    rows = []
    for line in drawn:
        curve = line.first.history.held_out
        for place in _spread(len(curve)):
            at = [words.number(curve.at["epoch"][place]), words.count(curve.at["samples"][place])]
            at.append(words.number(curve.at["seconds"][place]))
            values = [curve.values[name][place] if name in curve.values else None for name in names]
            rows.append([line.label, *at, *(words.number(value, 5) for value in values)])
    return ["run", "epoch", "samples", "seconds", *names], rows


def _training(drawn: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for line in drawn:
        curve = line.first.history.train
        for place in _spread(len(curve)):
            at = [words.number(curve.at["epoch"][place]), words.count(curve.at["samples"][place])]
            at += [words.number(curve.at["seconds"][place]), words.number(curve.values["loss"][place], 5)]
            rows.append([line.label, *at, words.number(curve.values["lr"][place])])
    return ["run", "epoch", "samples", "seconds", "loss", "learning rate"], rows


def _spread(num_points: int) -> list[int]:
    """Some places among so many, evenly, with the last."""
    if num_points <= _NUMBERS_A_LINE:
        return list(range(num_points))
    return sorted({round(place * (num_points - 1) / (_NUMBERS_A_LINE - 1)) for place in range(_NUMBERS_A_LINE)})


def metrics(study: Study, drawn: Sequence[Line]) -> list[str]:
    """Held-out metrics, the deciding one first."""
    names = dict.fromkeys(name for line in drawn for name in line.first.history.held_out.values)
    return sorted(names, key=lambda name: name != study.metric)


def undrawn(study: Study, drawn: Sequence[Line]) -> str:
    hidden = len(study.runs) - sum(len(line.repeats.runs) for line in drawn)
    if not hidden or not drawn:
        return ""
    return f"{words.plural(hidden, 'other run')} {'is' if hidden == 1 else 'are'} in the table of all runs."


def _time_to_target(
    study: Study, target: Target | None, ladders: Sequence[Ladder], left_out: list[str]
) -> Group | None:
    if len(study.runs) == 1:
        return None  # a single bar; the time is beside the best value
    chart = charts_ranks.time_to_target(study, target, ladders) if target else None
    if target is None or chart is None:
        left_out.append(
            f"Time to a target: no run reached {words.number(target.value)}." if target
            else "Time to a target: no run was evaluated."
        )  # fmt: skip
        return None
    notes = [
        f"By the clock, evaluations and checkpoints included, until the first evaluation that had "
        f"{words.metric(study.metric)} {'≥' if study.direction == 'max' else '≤'} {words.number(target.value)} "
        f"({target.why}; another one: --target). Nothing is interpolated."
    ]
    return Group("target", "Time to target", [chart], notes)


def _speed_up(ladders: Sequence[Ladder], left_out: list[str]) -> Group | None:
    figures = charts_ranks.speed_up(ladders)
    if not figures:
        left_out.append("Speed-up: no two finished runs differ in their number of ranks alone.")
        return None
    notes = [
        "Compared are runs alike in every setting that matters to training, in their global batch and in the kind of "
        "device, and different in the number of ranks. Rows a second of training, evaluations left out; the ideal is "
        "as many times faster as there are more ranks."
    ]
    if not all(ladder.same_batches for ladder in ladders):
        notes.append(
            "Some of them did not use data.shard: global: their batches hold other rows at each number of ranks, so "
            "their curves differ by chance besides."
        )
    restless = [run.place for ladder in ladders for point in ladder.points for run in point.runs
                if (run.history.swing or 1.0) > MAX_SWING]  # fmt: skip
    if restless:
        shown = ", ".join(restless[:6]) + (f" and {len(restless) - 6} more" if len(restless) > 6 else "")
        notes.append(
            f"The machine was not quiet: the pace of {shown} swung in training (the fastest tenth of the record is "
            f"more than {MAX_SWING:g} times as fast as the whole). Take speed-ups with them as rough."
        )
    header, rows = table.scaling_rows(ladders)
    return Group("speed", "Speed-up", figures, notes, header, rows, "What was compared with what")


def _seeds(study: Study) -> Group | None:
    header, rows = table.seeds_rows(study)
    if not rows:
        return None
    notes = [
        f"Runs that differ in their seed alone: {words.metric(study.metric)}, spread as sample standard deviation."
    ]
    return Group("seeds", "Over seeds", [], notes, header, rows, "Best values over seeds")


def _settings(study: Study, left_out: list[str]) -> Group | None:
    figures = [*charts_settings.heat_maps(study), *charts_settings.slices(study)]
    if not figures:
        if len(study.runs) > 1:
            left_out.append("Batch × learning rate: the runs do not vary both.")
        return None
    return Group("settings", "Settings", figures)


def _time(drawn: Sequence[Line], left_out: list[str]) -> Group | None:
    chart = charts_runs.where_time_went(drawn)
    if chart is None:
        left_out.append("Where the time went: the records do not tell.")
        return None
    notes = ["Shares of training time over all ranks, without evaluations."]
    if "rest" in {phase for line in drawn for phase in line.first.history.shares}:
        notes.append("Runs of earlier versions tell only how long they waited for data.")
    return Group("time", "Time", [chart], notes)


def _mistakes(study: Study, left_out: list[str]) -> Group | None:
    run, found = next(((run, made) for run in study.ranked if (made := mistakes.confusion(run))), (None, None))
    if run is None or found is None:
        left_out.append("Mistakes: no run has a confusion matrix.")
        return None
    chart = charts_runs.confusion(found, run.label)
    shown, wrong, num_rows = mistakes.worst(run)
    notes = [f"Of {run.label}. The matrix is of its newest evaluation, the list of its best weights."]
    if num_rows:
        notes.append(f"{words.count(wrong)} of {words.count(num_rows)} held-out rows are guessed wrong.")
    header, rows = (
        ["label", "prediction", "rows"],
        [[label, prediction, str(n)] for label, prediction, n in found.pairs],
    )
    caption = "Confused most often"
    return Group("mistakes", "Mistakes", [chart] if chart else [], notes, header if rows else [], rows, caption, shown)
