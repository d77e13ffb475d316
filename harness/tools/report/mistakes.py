"""Errors of a model: its confusion matrix, or its metrics by label or column, and the validation rows it was most wrong
about: wrong labels with the highest scores, or numbers with the largest errors.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from harness.errors import require_regular_file
from harness.runs import layout
from harness.runs.files import read_text
from harness.tools.report import tables
from harness.tools.report.formatting import NOTHING, count, number, percent
from harness.tools.report.images import image_finder
from harness.tools.report.run_set import ReportedRun
from harness.tools.report.tables import Cell, ReportTable

MAX_SHOWN = 24  # mistakes, or rows of a table
_BEST_LABELS = [f"label_{place}" for place in range(1, 6)]  # of many classes, predictions.csv has only the five best


@dataclass(frozen=True)
class Confusion:
    """``counts[label][prediction]``. ``of_best``: of the best weights, like the list of mistakes; otherwise of the best
    evaluation so far."""

    classes: list[str]
    counts: list[list[int]]
    of_best: bool = False


@dataclass(frozen=True)
class Mistake:
    """A validation row, by its id or its text. ``score``: the probability of the wrong prediction, or the error of a
    number; ``image``: a data URI, or empty."""

    row: str
    label: str
    prediction: str
    score: float
    image: str
    is_number: bool = False
    is_text: bool = False

    @property
    def shown(self) -> str:
        """The score in words."""
        if self.is_number:
            return f"off by {number(abs(self.score))}"
        return percent(self.score) if self.score else ""


@dataclass(frozen=True)
class Mistakes:
    """The most confident mistakes in predictions.csv, the number of all mistakes, and those of the rows with
    and without a prediction."""

    shown: list[Mistake] = field(default_factory=list)
    number: int = 0
    num_rows: int = 0
    num_unread: int = 0


def confusion(run: ReportedRun) -> Confusion | None:
    """Counted from ``predictions.csv``, which the best weights wrote at the end of the run; before that, the matrix of
    the best evaluation so far. None if ``confusion.csv``, which lists the classes, does not exist or is not a square of
    counts."""
    try:
        header, *lines = csv.reader(io.StringIO(read_text(run.record.path / layout.CONFUSION), newline=""))
        counts = [[int(cell) for cell in line[1:]] for line in lines]
    except (OSError, ValueError, csv.Error):  # the last for NUL characters, before Python 3.11
        return None
    classes = header[1:]
    square = len(counts) == len(classes) and all(len(line) == len(classes) for line in counts)
    if not square or not classes:
        return None
    best = _counted(read_predictions(run.record.path / layout.PREDICTIONS), classes)
    return Confusion(classes, counts if best is None else best, best is not None)


def _counted(table: pa.Table | None, classes: list[str]) -> list[list[int]] | None:
    """Return the confusion matrix of ``table``; None if it has no rows, or other classes."""
    if table is None:
        return None
    complete = table.filter(pc.and_(pc.is_valid(table["label"]), pc.is_valid(table["prediction"])))
    true, predicted = (pc.index_in(complete[name], pa.array(classes)) for name in ("label", "prediction"))
    if not len(complete) or true.null_count or predicted.null_count:
        return None
    cells = true.to_numpy().astype(np.int64) * len(classes) + predicted.to_numpy()
    counts: list[list[int]] = np.bincount(cells, minlength=len(classes) ** 2).reshape(len(classes), -1).tolist()
    return counts


def most_confident(run: ReportedRun, with_images: bool = True) -> Mistakes:
    """Return the mistakes of ``predictions.csv``; none without labels. Of numbers, every row is a mistake, and the
    largest errors come first."""
    table = read_predictions(run.record.path / layout.PREDICTIONS)
    if table is None:
        return Mistakes()
    read = table.filter(pc.is_valid(table["prediction"]))
    wrong = read.filter(pc.not_equal(read["prediction"], read["label"]))
    separator = str(run.settings.get("task.labels.separator") or "")
    scores = _errors(wrong) if "error" in wrong.column_names else _scores(wrong, separator)
    order = np.argsort(-np.abs(scores), kind="stable")[:MAX_SHOWN]
    find = image_finder(run) if with_images else lambda name: ""
    columns = [column for column in _text_columns(run) if column in wrong.column_names]
    mistakes = []
    for row, score in zip(wrong.take(pa.array(order)).to_pylist(), scores[order].tolist(), strict=True):
        name = str(row.get("id", ""))
        texts = [str(row[column]) for column in columns if row[column] is not None]
        mistake = Mistake(
            row=" / ".join(texts) or name,
            label=_rounded(row["label"]) if "error" in row else str(row["label"]),
            prediction=_rounded(row["prediction"]) if "error" in row else str(row["prediction"]),
            score=score,
            image=find(name),
            is_number="error" in row,
            is_text=bool(columns),
        )
        mistakes.append(mistake)
    return Mistakes(mistakes, len(wrong), len(read), len(table) - len(read))


def _rounded(text: Any) -> str:
    try:
        return number(float(text), 6)
    except (TypeError, ValueError):
        return str(text)


def _text_columns(run: ReportedRun) -> list[str]:
    """Return the columns of predictions.csv that hold the texts of a row, as ``known`` of text_csv names them."""
    of_task = run.settings.get("task.text_column") or "text"
    names = map(str, of_task if isinstance(of_task, list) else [of_task])
    return [f"text_{name}" if name in ("id", "prediction", "label") else name for name in names]


def read_predictions(path: Path) -> pa.Table | None:
    """Return the table at ``path`` with ids, predictions and labels as text; None if it is missing or has other
    columns. A row whose input could not be read has no prediction."""
    table = read_table(path)
    if table is None or not {"prediction", "label"} <= set(table.column_names):
        return None
    scores = next((table[name] for name in table.column_names if name.startswith("score")), None)
    if scores is not None:  # a row with several labels may have none of them, and is then empty, but has scores
        for name in ("prediction", "label"):
            filled = pc.if_else(pc.is_valid(scores), pc.fill_null(table[name], ""), table[name])
            table = table.set_column(table.column_names.index(name), name, filled)
    return table


def read_table(path: Path) -> pa.Table | None:
    """Return the table at ``path``, a predictions.csv of any task; None if it is missing. A class may be named "NA" or
    "null"."""
    options = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(("id", "prediction", "label", *_BEST_LABELS), pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    lines = pyarrow.csv.ParseOptions(newlines_in_values=True)  # texts may have line breaks
    try:
        require_regular_file(path)
        return pyarrow.csv.read_csv(path, parse_options=lines, convert_options=options)
    except (OSError, pa.ArrowInvalid):
        return None


def by_class(matrix: Confusion) -> ReportTable:
    """Return precision, recall and F1 of each class of a matrix."""
    counts = np.array(matrix.counts)
    right, rows, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):  # a class without rows, or that is never predicted, has no share
        shares = np.stack([2 * right / (rows + predicted), right / predicted, right / rows], axis=1)
    wrong = counts - np.diag(right)
    lines = []
    for index in np.argsort(shares[:, 0], kind="stable").tolist():  # NaN comes last
        mistaken_for = int(wrong[index].argmax())
        most_often = f"{matrix.classes[mistaken_for]} ({wrong[index, mistaken_for]})" if wrong[index].any() else NOTHING
        metrics = [tables.number(float(share), number) for share in shares[index]]
        lines.append([Cell(matrix.classes[index]), *metrics, tables.number(int(rows[index]), count), Cell(most_often)])
    return _worst("class", ["F1", "precision", "recall", "rows", "most often taken for"], lines)


def by_name(run: ReportedRun) -> ReportTable | None:
    """Return the metrics of each label or column of the newest evaluation; None if there are none."""
    evaluation = run.record.summary.get("evaluation")
    for key, title, worst in (("by_label", "label", "f1"), ("by_column", "column", "r2")):
        metrics = evaluation.get(key) if isinstance(evaluation, dict) else None
        if not (isinstance(metrics, dict) and metrics and all(isinstance(values, dict) for values in metrics.values())):
            continue
        names = list(next(iter(metrics.values())))
        numbers = {name: [_real(values.get(metric)) for metric in names] for name, values in metrics.items()}
        column = names.index(worst) if worst in names else 0
        order = sorted(numbers, key=lambda name: _nan_last(numbers[name][column]))
        rows = [[Cell(name), *(tables.number(value, number) for value in numbers[name])] for name in order]
        return _worst(title, names, rows)
    return None


def _worst(title: str, names: list[str], rows: list[list[Cell]]) -> ReportTable:
    which = f"the {MAX_SHOWN} worst of {len(rows)}" if len(rows) > MAX_SHOWN else "the worst first"
    return ReportTable(f"By {title}, {which}", [title, *names], rows[:MAX_SHOWN])


def _real(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _errors(table: pa.Table) -> np.ndarray:
    """Return the error of each number; 0 if it is not one."""
    if not pa.types.is_floating(table.schema.field("error").type):
        return np.zeros(len(table))
    return np.nan_to_num(table["error"].to_numpy().astype(float))


def _scores(wrong: pa.Table, separator: str) -> np.ndarray:
    """Return the probability of each prediction; 0 if the table has none. With a ``separator``, rows have several
    labels: the largest probability of a label that is wrong, or that a missing label was given of being absent."""
    if "score" in wrong.column_names:
        columns = ["score"]
    else:
        columns = [name for name in wrong.column_names if name.startswith("score_")]
    numbers = [name for name in columns if pa.types.is_floating(wrong.schema.field(name).type)]
    if not numbers or not len(wrong):
        return np.zeros(len(wrong))
    scores = np.nan_to_num(np.stack([wrong[name].to_numpy().astype(float) for name in numbers]))
    if separator and numbers != ["score"]:
        labels = [set(text.split(separator)) for text in wrong["label"].to_pylist()]
        true = [[label in each for label, each in zip(_scored(wrong, name), labels, strict=True)] for name in numbers]
        scores = np.where(true, 1 - scores, scores)
    best: np.ndarray = scores.max(axis=0)
    return best


def _scored(wrong: pa.Table, column: str) -> list[str]:
    """Return the label that each row's number in ``column`` is of: score_cat of cat, score_1 of that row's label_1."""
    name = column.removeprefix("score_")
    if f"label_{name}" in wrong.column_names:
        return [str(label) for label in wrong[f"label_{name}"].to_pylist()]
    return [name] * len(wrong)
