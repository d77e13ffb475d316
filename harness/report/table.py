"""The table of all runs, and what else of a report is plain rows: for the page, for Markdown and for CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report import reproduce, words
from harness.report.scaling import Ladder, Target, reached
from harness.report.study import Run, Study, short

MAX_COLUMNS = 8  # of settings in which runs differ
MAX_ROWS = 50  # of a table in Markdown


@dataclass(frozen=True)
class Cell:
    """``order``: what it is sorted by; empty where nothing is known. ``state``: of a run, else empty."""

    text: str
    order: Any = None
    state: str = ""


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[Cell]]


def of_runs(study: Study, target: Target | None) -> Table:
    """A row a run, the best first."""
    apart = [key for key in study.apart if key in _told_of_all(study)][:MAX_COLUMNS]
    header = [
        "run",
        "state",
        "ranks",
        *(short(key) for key in apart),
        words.metric(study.metric),
        "best at epoch",
        "epochs",
    ]
    header += [f"to {words.number(target.value)}"] if target else []
    header += ["time", "rows/s", "skipped", "commit", "folder"]
    rows = []
    for run in study.ranked:
        past = run.history
        ends = past.held_out.at["epoch"]
        cells = [
            Cell(run.label),
            Cell(words.STATES[run.record.state], run.record.state, run.record.state),
            _number(run.world, words.count),
            *(_setting(run.settings.get(key)) for key in apart),
            _number(run.best, lambda value: words.number(value, 5)),
            _number(run.at_best("epoch"), words.number),
            _number(float(ends[-1]) if len(ends) else None, words.number),
        ]
        if target:
            at = reached(run, target.value, study.direction)
            cells.append(_number(at.seconds if at else None, words.duration))
        cells += [
            _number(past.wall_s, words.duration),
            _number(past.rows_per_s, words.count),
            _number(past.skipped, words.count),
            Cell(reproduce.commit(run)),
            Cell(run.path),
        ]
        rows.append(cells)
    return Table(header, rows)


def _told_of_all(study: Study) -> set[str]:
    """Settings that most runs have: those of one task alone say nothing of another's runs."""
    counts = Counter(key for run in study.runs for key in run.settings)
    return {key for key, count in counts.items() if 2 * count > len(study.runs)}


def _number(value: float | None, shown: Any) -> Cell:
    return Cell(shown(value), "" if value is None or value != value else value)


def _setting(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(words.setting(value), value)
    return Cell(words.setting(value))


def scaling_rows(ladders: Sequence[Ladder]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): each world size beside the smallest of its recipe, and which runs were compared."""
    header = ["recipe", "ranks", "rows/s", "speed-up", "efficiency", "to target", "sooner", "runs compared"]
    rows = []
    for ladder in ladders:
        base = ladder.points[0]
        for point in ladder.points:
            pair = ", ".join(run.place for run in point.runs)
            pair += "" if point is base else f" with {', '.join(run.place for run in base.runs)}"
            rows.append(
                [ladder.label, str(point.world), words.count(point.rows_per_s), words.times(point.speed_up),
                 words.percent(point.efficiency), words.duration(point.seconds), words.times(point.sooner), pair]
            )  # fmt: skip
    return header, rows


def seeds_rows(study: Study) -> tuple[list[str], list[list[str]]]:
    """(header, rows): recipes that were run with several seeds, with mean and spread."""
    header = ["recipe", "ranks", "seeds", "mean", "spread", "least", "largest"]
    rows = []
    for repeats in study.repeats:
        if len(repeats.values) > 1:
            run = repeats.runs[0]
            values = repeats.values
            numbers = [words.number(value, 5) for value in (repeats.mean, min(values), max(values))]
            seeds = ", ".join(sorted(str(run.seed) for run in repeats.runs))
            rows.append(
                [study.setting(run), str(run.world or words.NOTHING), seeds, numbers[0],
                 f"± {words.number(repeats.spread, 2)}", *numbers[1:]]
            )  # fmt: skip
    return header, rows


def states(runs: Sequence[Run]) -> str:
    """ "3 finished, 1 failed" """
    counts: Counter[str] = Counter(run.record.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in words.STATES if counts[state])


def trouble(run: Run) -> list[str]:
    """Why a run is not finished, and what of it is missing; empty where all is well."""
    failure, lines = run.record.failure, []
    if failure:
        reason = str(failure.get("message") or "").strip().splitlines()
        where = f"rank {failure.get('rank')} at step {failure.get('step')}"
        lines.append(f"{failure.get('error') or 'It failed'} ({where}): {reason[0] if reason else 'no message'}")
    elif run.record.trial and run.record.trial.error:
        lines.append(run.record.trial.error.strip().splitlines()[0])
    return [*lines, *run.record.problems]


def is_troubled(run: Run) -> bool:
    """Whether something is to be told of a run; that a sweep has pruned one, or not started it yet, is its plan."""
    return run.record.state not in ("finished", "pruned", "waiting") or bool(trouble(run))


# Other forms


def markdown(study: Study, target: Target | None, ladders: Sequence[Ladder]) -> str:
    """What a pull request needs: the best run, how to have it again, and the tables."""
    lines = [f"## {_cell(study.title)}", "", f"{words.plural(len(study.runs), 'run')}: {states(study.runs)}."]
    if best := study.best:
        metric = words.metric(study.metric)
        lines[-1] += (
            f" Best {metric}: **{words.number(best.best, 5)}** by `{_code(best.label)}` (`{_code(best.path)}`)."
        )
        lines += ["", "```bash", *reproduce.commands(best), "```"]
    table = of_runs(study, target)
    rows = [[cell.text for cell in row] for row in table.rows[:MAX_ROWS]]
    lines += ["", *_markdown(table.header, rows)]
    if len(table.rows) > MAX_ROWS:
        lines += ["", f"and {len(table.rows) - MAX_ROWS} more runs."]
    header, rows = seeds_rows(study)
    lines += ["", "### Over seeds", "", *_markdown(header, rows)] if rows else []
    header, rows = scaling_rows(ladders)
    lines += ["", "### More ranks", "", *_markdown(header, rows)] if rows else []
    bad = [(run, told) for run in study.runs if (told := trouble(run))][:MAX_ROWS]
    lines += ["", "### Not finished, or not whole", ""] if bad else []
    lines += [f"- `{_code(run.label)}` ({run.record.state}): {_cell('; '.join(told))}" for run, told in bad]
    return "\n".join(lines) + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(text) for text in line) + " |" for line in lines]


def _cell(text: str) -> str:
    """Text that stays in its cell and is not taken for markup."""
    for sign in ("\\", "|", "<", "`", "*", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def comma_separated(study: Study, target: Target | None) -> str:
    """A row a run with everything that is a number, unrounded; settings under their dotted keys."""
    metrics = list(dict.fromkeys(name for run in study.runs for name in run.history.last))
    rows = []
    for run in study.runs:
        past, trial = run.history, run.record.trial
        at = reached(run, target.value, study.direction) if target else None
        row: dict[str, Any] = {
            "run": run.path, "name": run.record.name, "state": run.record.state,
            "sweep": run.record.sweep.name if run.record.sweep else None, "trial": trial.number if trial else None,
            "world_size": run.world, "global_batch": run.batch, "seed": run.seed, "metric": study.metric,
            "best": run.best, "best_epoch": run.at_best("epoch"), "best_seconds": run.at_best("seconds"),
            "best_samples": run.at_best("samples"), "target": target.value if target else None,
            "seconds_to_target": at.seconds if at else None, "samples_to_target": at.samples if at else None,
            "steps": past.steps, "samples": past.samples, "skipped": past.skipped, "wall_s": past.wall_s,
            "train_s": past.train_s, "rows_per_s": past.rows_per_s, "commit": reproduce.commit(run),
            "problems": "; ".join(trouble(run)),
        }  # fmt: skip
        row |= {f"last_{name}": past.last.get(name) for name in metrics}
        row |= {f"time_{phase}": share for phase, share in past.shares.items()}
        row |= {key: run.settings.get(key) for key in study.apart if key != "seed"}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
