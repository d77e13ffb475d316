"""Checks of what the methods of a task return: errors of its sums, its report and its columns of predictions; doubts
about a loss that is a sum or mixes rows, a metric that is a mean, not a sum, and rows that differ in each reading."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from harness.config import plugins
from harness.config.schema import TaskSection
from harness.data.batch import Batch, Dataset, described
from harness.errors import HarnessError, OwnCodeError, first_line, place_of, plural
from harness.training.evaluation.prediction_files import RowFiles
from harness.training.evaluation.sums import Pairs, Report, Rows, Sums, is_number
from harness.training.task import BaseTask, OpenedTask, wrong_return

_PAIRS = "return a (sum, count) for each metric that the task declares: {}"
_NUMBERS = "return a dictionary with a number for each metric that the task declares: {}"


def doubt_of_mean(section: TaskSection, task: OpenedTask, outputs: Tensor, targets: Tensor) -> str:
    """Return, in words, that the loss is twice as large for the same rows twice, or, of the user's own, that it is not
    the mean of those of two halves; empty otherwise. Draws from no stream of the CPU."""
    arguments = outputs, targets
    if not all(isinstance(part, Tensor) and part.dim() and len(part) == len(outputs) for part in arguments):
        return ""
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=()):
        few = [part[:4].float() if part.is_floating_point() else part[:4] for part in arguments]

        def loss(*parts: slice) -> float:
            return task.loss(*(torch.cat([part[each] for each in parts]) for part in few)).item()

        rows, every = len(few[0]), slice(None)
        once, twice, where = loss(every), loss(every, every), loss_place(section, task)
        if once and abs(twice / once - 2) < 1e-3:
            return (
                f"{where}: loss() is {once:.4g} for {plural(rows, 'row')} and {twice:.4g} for the same rows twice, so "
                "it is a sum; return the mean over the rows, or the learning rate depends on the size of the batch"
            )
        half = rows // 2
        if not half or not _is_own_loss(section, task):
            return ""
        halves = (half * loss(slice(half)) + (rows - half) * loss(slice(half, None))) / rows
        if abs(halves - once) > 1e-4 * abs(once) and loss(every) == once:  # not one that draws or counts
            shapes = [tuple(part.shape) for part in few]
            alike = shapes[0] != shapes[1] and few[0].numel() == few[1].numel()
            cause = f", perhaps by a broadcast of shapes {shapes[0]} and {shapes[1]}" if alike else ""
            return (
                f"{where}: loss() mixes rows{cause}: it is {once:.4g} for {rows} rows, and {halves:.4g} as the mean "
                "over two halves; contrastive, weighted and masked losses do this on purpose"
            )
    return ""


def doubt_of_sums(task: OpenedTask, outputs: Tensor, targets: Tensor) -> str:
    """Return, in words, that ``evaluate`` of the user's own returns a mean with a count of rows, which is then divided
    twice; empty otherwise."""
    where, batch = place_of(type(task), "evaluate"), (outputs, targets)
    if not where or not all(isinstance(part, Tensor) and part.dim() and len(part) == len(outputs) for part in batch):
        return ""
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=()):
        once, twice = task.evaluate(*batch), task.evaluate(*(torch.cat([part, part]) for part in batch))
        for name in (name for name, pair in once.items() if isinstance(pair, tuple)):
            (total, count), (more, rows) = (map(float, pairs[name]) for pairs in (once, twice))
            if total and rows == 2 * count and abs(more / total - 1) < 1e-3:
                return (
                    f"{where}: evaluate() returns {total:.4g} as the sum of {name!r} over {count:g} rows, and the same "
                    "for these rows twice, so it is a mean; return the sum over the rows"
                )
    return ""


def doubt_of_rows(dataset: Dataset, batch: Batch, again: Batch) -> str:
    """Return, in words, that ``dataset`` gave other values in ``again`` than in ``batch`` for the same rows of the same
    epoch; empty otherwise."""
    for name in ("inputs", "targets"):
        one, other = getattr(batch, name), getattr(again, name)
        if one.shape != other.shape or not ((one == other) | (one != one)).all():
            where = place_of(type(dataset), "batch") or f"the dataset {type(dataset).__name__}"
            return (
                f"{where}: batch() returns other {name} when it is called again for the same rows and epoch, so no "
                "other number of ranks or loader workers gives the same run; draw from "
                "numpy.random.default_rng(row_seed(seed, epoch, row)) or inside seeded_torch(row_seed(seed, epoch, "
                "row)), and nothing where epoch is None"
            )
    return ""


def _is_own_loss(section: TaskSection, task: OpenedTask) -> bool:
    """Return True unless the harness made the loss, which may weight classes."""
    method = getattr(type(task), "loss", None)
    return "." in getattr(section, "loss_name", "") or not getattr(method, "__module__", "").startswith("harness.")


def loss_place(section: TaskSection, task: OpenedTask) -> str:
    """Return where the loss of ``task`` is defined: FILE:LINE of the user's own, or its name."""
    name = getattr(section, "loss_name", "")
    if "." in name:
        return place_of(plugins.import_own("loss", name, "task.loss.name")) or name
    return place_of(type(task), "loss") or f"the loss of the task {section.name}"


def column(task: OpenedTask, method: str, name: str, values: object, num_rows: int) -> pa.Array:
    """Return the column ``name`` of what ``method`` of ``task`` returned. Raises TrainingError, with the place of the
    method, unless it has a value for each row."""
    try:
        array = pa.array(values.cpu().numpy() if isinstance(values, Tensor) else values)
    except pa.ArrowInvalid as error:
        problem = f"{described(values)} for {name!r}: {first_line(error)}"
    else:
        if len(array) == num_rows:
            return array
        problem = f"{plural(len(array), 'value')} of {name!r} for {plural(num_rows, 'row')}"
    raise wrong_return(task, method, problem, "return one value for each row")


def require_columns(
    task: OpenedTask, method: str, argument: object, rows: np.ndarray, known: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return what ``method`` of ``task`` returns for ``argument``. Raises TrainingError, with the place of the method,
    unless that can be written to a table of predictions for ``rows``, whose ``known`` columns may name files."""
    columns: Mapping[str, Any] = getattr(task, method)(argument)
    if not isinstance(columns, Mapping):
        raise wrong_return(task, method, described(columns), "return {name of a column: one value for each row}")
    for name, values in columns.items():
        if not isinstance(values, RowFiles):
            column(task, method, name, values, len(rows))
            continue
        try:
            values.encoded(name, rows.tolist(), known)
        except HarnessError as error:
            raise OwnCodeError(error.message, where=place_of(type(task), method), hint=error.hint) from None
    return columns


def add_pairs(sums: Sums, task: OpenedTask, outputs: Tensor, targets: Tensor) -> None:
    """Add to ``sums`` what the task's ``evaluate`` returns. Raises TrainingError if that is not pairs."""
    pairs: object = task.evaluate(outputs, targets)
    if wrong := _wrong(pairs, sums):
        hint = "return {name: (sum, count)}: a tensor, and one or a number, each added up over the rows of the batch"
        raise wrong_return(task, "evaluate", wrong, hint)
    sums.add(cast(Pairs, pairs))


def _wrong(pairs: object, sums: Sums) -> str:
    """Return what in ``pairs`` cannot be added to ``sums``, in words; empty if nothing."""
    if not isinstance(pairs, Mapping):
        return described(pairs)
    for name, pair in pairs.items():
        match pair:
            case Rows():
                continue
            case Tensor(), Tensor() | int() | float() | np.number():
                pass
            case _:
                return f"{described(pair)} for {name!r}"
        for new, previous in zip(pair, sums.pairs.get(name, ()), strict=False):
            if isinstance(new, Tensor) and new.numel() != previous.numel():
                return f"{described(new)} for {name!r}, after one of shape {tuple(previous.shape)} for another batch"
    return ""


def numbers(task: OpenedTask, sums: Sums, names: Collection[str]) -> Report:
    """Return the task's report on ``sums``, with a number for each of the metrics ``names``. Raises TrainingError."""
    report = report_of(task, sums, names)
    return {**report, **{name: require_number(task, report, name, names) for name in names}}


def report_of(task: OpenedTask, sums: Sums, names: Collection[str]) -> Report:
    """Return the task's report on ``sums``. Raises TrainingError if it is no dictionary."""
    try:
        report: Report = task.report(sums)
    except OwnCodeError as error:  # of Sums.ratio, which does not know the task
        raise error if error.where else wrong_return(task, "evaluate", error.message, error.hint) from None
    if not isinstance(report, Mapping):
        raise wrong_return(task, "report", described(report), _NUMBERS.format(", ".join(names)))
    return report


def require_number(task: OpenedTask, report: Report, name: str, names: Collection[str]) -> float:
    """Return the metric ``name`` of the task's report. Raises TrainingError, which lists the declared ``names``, if
    that is missing or no number."""
    value = report.get(name)
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if is_number(value):
        return value
    returned = f"{value!r:.80} for metric {name!r}" if name in report else describe_missing(name, report)
    if name not in report and type(task).report is BaseTask.report:
        raise wrong_return(task, "evaluate", returned, _PAIRS.format(", ".join(names)))
    raise wrong_return(task, "report", returned, _NUMBERS.format(", ".join(names)))


def describe_missing(name: str, report: Report) -> str:
    """Return, in words, that ``report`` lacks the metric ``name``."""
    return f"no metric {name!r}, only {', '.join(map(repr, report)) or 'an empty dictionary'}"
