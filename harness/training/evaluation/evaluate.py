"""Evaluation over all ranks, which counts every row once on any number of them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from itertools import chain
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from harness.config.schema import Config
from harness.data.batch import Dataset, described
from harness.data.loader import StoppedWaiting
from harness.errors import DataError, HarnessError, OwnCodeError, TrainingError, users_line
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.sums import Pairs, Report, Rows, Sums, is_number, reduced
from harness.training.evaluation.task_checks import doubt_of_mean, doubt_of_sums, require_columns
from harness.training.reproducibility import rng
from harness.training.run import Run
from harness.training.run_log import unreadable
from harness.training.task import BaseTask, OpenedTask, SupportsPredictions, wrong_return

log = logging.getLogger("harness")


def evaluate(run: Run) -> Report | None:
    """Return the metrics of the current weights (their moving average, if there is one) over all evaluation rows.

    None if the ranks agreed to stop. Collective: every rank checks for a stop equally often, however many
    batches it has, and the ranks communicate again only in the reduction. If the weights are sharded, every rank also
    calls the model equally often, at the end with a row that does not count.
    """
    run.ranks.average_buffers()  # without this, each rank would evaluate a different model
    data, module, ranks = run.eval_data, run.parallel.eval_model, run.ranks
    sums = {rank: Sums() for rank in ranks.own}
    rows, bad = 0, list[int]()
    module.eval()
    turns = data.turns()
    start = time.perf_counter()
    run.progress.open("validation", "batch", 0, data.num_turns())
    try:
        with run.compiling("the evaluation"), torch.no_grad(), run.averaged():
            for _ in range(data.num_turns()):
                if run.stop.poll():
                    return None
                rank, batch = next(turns)
                bad += batch.bad if batch is not None else ()
                if batch is None or not len(batch):  # this rank has no more rows, or could not read any
                    if run.parallel.sharded:
                        module(prepare(run, run.train_data.any_inputs()))
                else:
                    rows += len(batch)
                    ranks.activate(rank)
                    outputs = module(prepare(run, batch.inputs))
                    add_pairs(sums[rank], run.task, outputs, batch.targets)
                run.progress.step()
    except StoppedWaiting:
        return None
    finally:
        run.progress.stop()
        module.train()
        ranks.activate(ranks.own.start)
    return _whole_report(run, [*sums.values()], rows, bad, start)


def _whole_report(run: Run, sums: list[Sums], rows: int, bad: list[int], start: float) -> Report:
    """Return the report on ``sums``, one for each rank of this process, over all ranks. ``rows``: how many this process
    has evaluated since ``start``, ``bad``: those that it could not read. Collective."""
    data = run.eval_data
    try:
        total = reduced(sums, run.ranks)
    except OwnCodeError as error:  # of shapes, which does not know the task
        raise wrong_return(run.task, "evaluate", error.message, error.hint) from None
    counted, unread = run.runtime.sum_on_host(torch.tensor([rows, len(bad)])).tolist()
    if not counted:
        raise DataError(
            f"no validation row could be read (of {data.num_rows})",
            where="task",
            hint="check the paths of the validation data; task.on_bad_row=stop shows the first unreadable file",
        )
    bad_rows = sorted(chain(*run.runtime.gather(bad))) if unread else []  # by all ranks or none
    metrics = {**report(run, total), "rows_used": counted, "rows": data.num_rows, "bad_rows": unread}
    metrics |= unreadable(run.task.eval, bad_rows)
    return {**metrics, "samples_per_s": counted / (time.perf_counter() - start)}


def try_evaluation(run: Run) -> None:
    """Try a task or a loss of the user's own on the first validation batch of each rank: without this, a fault ends the
    run after its first epoch, and a loss that is a sum trains. Collective.

    It leaves random streams, buffers, and the task as they were, with the losses and metrics that ``_copy`` copies. A
    loss of another kind that counts its calls has counted these, too.

    Left out in a resume, where it is not cheap (a compiled model), and where all ranks must take part (sharded
    weights). A batch may have too few rows for a metric, so one that is missing, unless it seems to have another name,
    and errors that ``report`` raises, are only warned of.
    """
    config = run.config
    is_own = "." in config.task.name or "." in getattr(config.task, "loss_name", "")
    if not is_own or run.state.step or run.parallel.sharded or config.model.compile:
        return
    with run.runtime.together("trying an evaluation"), _without_a_trace(run), torch.no_grad():
        try:
            task = _copy(run)
        except Exception:
            return  # a loss of the user's own that cannot be copied, and may count
        with run.runtime.limited("reading a batch of the dataset"):
            batch = run.eval_data.first()
        if batch is None or not len(batch):
            return
        sums, outputs = Sums(), run.parallel.eval_model.eval()(prepare(run, batch.inputs))
        add_pairs(sums, task, outputs, batch.targets)
        if isinstance(task, SupportsPredictions):  # known() may open a file, which is not for loader workers
            require_columns(task, "predictions", outputs, batch.rows)
        rows = outputs, batch.targets
        for doubt in filter(None, (doubt_of_mean(config.task, task, *rows), doubt_of_sums(task, *rows))):
            log.warning("%s", doubt)
        try:
            numbers(task, sums.on_cpu(), config.task.metrics, complete=False)
        except Exception as error:
            if isinstance(error, TrainingError) and error.__cause__ is None:  # of what was returned, wrong for any rows
                raise
            where, text = users_line(error), f"{type(error).__name__}: {error}"
            problem = error if isinstance(error, HarnessError) else f"{where}: {text}" if where else text
            log.warning("report() of the task fails on the first validation batch, and perhaps on all: %s", problem)


def _copy(run: Run) -> OpenedTask:
    """Return a copy of the task whose losses and metrics are copies, too, if it has them itself: they may count. Its
    data, and the model if it has that, are the same."""
    task, models = run.task, (run.module, run.parallel.eval_model)
    modules = (module for model in models for module in model.modules())
    shared = {id(part): part for part in (task.train, task.eval, *modules)}
    copied = copy.copy(task)
    for name, part in vars(copied).items():
        if isinstance(part, nn.Module | Objective):
            object.__setattr__(copied, name, copy.deepcopy(part, shared))
    return copied


@contextmanager
def _without_a_trace(run: Run) -> Iterator[None]:
    """Context that leaves the random streams, and the buffers and the mode of the model, as they were."""
    module, devices = run.parallel.eval_model, run.parallel.devices()
    streams = rng.get_state(*devices)
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, before in buffers:
            owner._buffers[name] = buffer.copy_(before)
        module.train()
        rng.set_state(streams, *devices)


def report(run: Run, total: Sums) -> Report:
    """Return the task's report on the reduced sums, with rank 0's numbers on every rank: the loop decides by them, and
    a metric may sample rows, or round differently on another processor. Collective; an error on any rank is raised on
    all."""
    with run.runtime.together("computing the metrics"):
        metrics = numbers(run.task, total, run.config.task.metrics)
    return {**metrics, **run.runtime.from_first({key: value for key, value in metrics.items() if is_number(value)})}


def add_pairs(sums: Sums, task: OpenedTask, outputs: torch.Tensor, targets: torch.Tensor) -> None:
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
            case torch.Tensor(), torch.Tensor() | int() | float() | np.number():
                pass
            case _:
                return f"{described(pair)} for {name!r}"
        for new, previous in zip(pair, sums.pairs.get(name, ()), strict=False):
            if isinstance(new, torch.Tensor) and new.numel() != previous.numel():
                return f"{described(new)} for {name!r}, after one of shape {tuple(previous.shape)} for another batch"
    return ""


def numbers(task: OpenedTask, sums: Sums, names: Iterable[str], complete: bool = True) -> Report:
    """Return the task's report on ``sums``, with a number for each of the metrics ``names``. Raises TrainingError.
    ``complete``: of all rows; of a batch, a metric may be missing, if no other name is there that is not declared."""
    try:
        report: Report = task.report(sums)
    except OwnCodeError as error:  # of Sums.ratio, which does not know the task
        raise error if error.where else wrong_return(task, "evaluate", error.message, error.hint) from None
    hint = f"return a dictionary with a number for each metric that the task declares: {', '.join(names)}"
    if not isinstance(report, Mapping):
        raise wrong_return(task, "report", described(report), hint)
    for name in names:
        value = report.get(name)
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            value = value.item()
        if not is_number(value):
            returned = f"{value!r:.80} for metric {name!r}"
            if name not in report:
                returned = f"no metric {name!r}, only {', '.join(map(repr, report)) or 'an empty dictionary'}"
                if not complete and report and report.keys() <= set(names):
                    log.warning("the first validation batch has %s; if all have none, the evaluation fails", returned)
                    continue
                if type(task).report is BaseTask.report:
                    declared = f"return a (sum, count) for each metric that the task declares: {', '.join(names)}"
                    raise wrong_return(task, "evaluate", returned, declared)
            raise wrong_return(task, "report", returned, hint)
        report = {**report, name: value}
    return report


class HasTask(Protocol):
    """The attributes of a run that ``prepare`` needs."""

    @property
    def config(self) -> Config: ...

    @property
    def task(self) -> OpenedTask: ...


def laid_out(dataset: Dataset, config: Config) -> Dataset:
    """Return ``dataset``; one of images delivers them in the memory format of the model's weights."""
    if config.model.channels_last and hasattr(dataset, "channels_last") and is_dataclass(dataset):
        return replace(dataset, channels_last=True)
    return dataset


def prepare(run: HasTask, inputs: torch.Tensor) -> torch.Tensor:
    """Turn the inputs of a batch into the model's input, in the memory format of its weights."""
    if not run.config.model.channels_last:
        return run.task.prepare(inputs)
    return _channels_last(run.task.prepare(_channels_last(inputs)))  # bytes are copied faster than floats


def _channels_last(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
