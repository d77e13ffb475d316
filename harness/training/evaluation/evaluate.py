"""Evaluation over all ranks, which counts every row once on any number of them, and a trial of it on one batch."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from harness.data.loader import StoppedWaiting
from harness.errors import DataError, HarnessError, OwnCodeError, TrainingError, users_line
from harness.training.evaluation import task_checks
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.sums import Report, Sums, is_number, reduced
from harness.training.reproducibility import rng
from harness.training.run import Run
from harness.training.run_log import unreadable
from harness.training.task import OpenedTask, SupportsPredictions, prepare, wrong_return

log = logging.getLogger("harness")


def evaluate(run: Run) -> Report | None:
    """Return the metrics of the current weights (their moving average, if there is one) over all evaluation rows.

    None if the ranks agreed to stop. Collective: every rank checks for a stop equally often, however many
    batches it has, and the ranks communicate again only in the reduction. If the weights are sharded, every rank also
    calls the model equally often, at the end with a row that does not count.
    """
    run.ranks.average_buffers()  # without this, each rank would evaluate a different model
    data, ranks = run.eval_data, run.ranks
    module = run.parallel.eval_model
    sums = {rank: Sums() for rank in ranks.own}
    num_rows = 0
    bad_rows: list[int] = []
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
                bad_rows += batch.bad if batch is not None else ()
                if batch is None or not len(batch):  # this rank has no more rows, or could not read any
                    if run.parallel.holds_shard:
                        module(prepare(run, run.train_data.any_inputs()))
                else:
                    num_rows += len(batch)
                    ranks.activate(rank)
                    outputs = module(prepare(run, batch.inputs))
                    task_checks.add_pairs(sums[rank], run.task, outputs, batch.targets)
                run.progress.step()
    except StoppedWaiting:
        return None
    finally:
        run.progress.stop()
        module.train()
        ranks.activate(ranks.own.start)
    return _whole_report(run, [*sums.values()], num_rows, bad_rows, start)


def _whole_report(run: Run, sums: list[Sums], num_rows: int, bad_rows: list[int], start: float) -> Report:
    """Return the report on ``sums``, one for each rank of this process, over all ranks. ``num_rows``: how many this
    process has evaluated since ``start``; ``bad_rows``: those that it could not read. Collective."""
    data = run.eval_data
    try:
        total = reduced(sums, run.ranks)
    except OwnCodeError as error:  # of shapes, which does not know the task
        raise wrong_return(run.task, "evaluate", error.message, error.hint) from None
    counted, unread = run.runtime.sum_on_host(torch.tensor([num_rows, len(bad_rows)])).tolist()
    if not counted:
        raise DataError(
            f"no validation row could be read (of {data.num_rows})",
            where="task",
            hint="check the paths of the validation data; task.on_bad_row=stop shows the first unreadable file",
        )
    bad_of_all = sorted(chain(*run.runtime.gather(bad_rows))) if unread else []  # by all ranks or none
    metrics = {**report(run, total), "rows_used": counted, "rows": data.num_rows, "bad_rows": unread}
    metrics |= unreadable(run.task.eval, bad_of_all)
    return {**metrics, "samples_per_s": counted / (time.perf_counter() - start)}


def try_evaluation(run: Run) -> None:
    """Try a task or a loss of the user's own on the first validation batch of each rank: without this, a fault ends the
    run after its first epoch, and a loss that is a sum trains. Collective.

    It leaves random streams, buffers, and the task as they were, with the losses and metrics that ``_copy`` copies. A
    loss of another kind that counts its calls has counted these, too.

    Left out in a resume, where it is not cheap (a compiled model), and where all ranks must take part (sharded
    weights). A batch may have too few rows for a metric, so errors that ``report`` raises are only warned of.
    """
    config = run.config
    is_own = "." in config.task.name or "." in getattr(config.task, "loss_name", "")
    if not is_own or run.state.step or run.parallel.holds_shard or config.model.compile:
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
        sums = Sums()
        outputs = run.parallel.eval_model.eval()(prepare(run, batch.inputs))
        task_checks.add_pairs(sums, task, outputs, batch.targets)
        if isinstance(task, SupportsPredictions):  # known() may open a file, which is not for loader workers
            task_checks.require_columns(task, "predictions", outputs, batch.rows)
        doubt_of_mean = task_checks.doubt_of_mean(config.task, task, outputs, batch.targets)
        doubt_of_sums = task_checks.doubt_of_sums(task, outputs, batch.targets)
        for doubt in filter(None, (doubt_of_mean, doubt_of_sums)):
            log.warning("%s", doubt)
        try:
            _try_report(task, sums.on_cpu(), config.task.metrics)
        except Exception as error:
            if isinstance(error, TrainingError) and error.__cause__ is None:  # of what was returned, wrong for any rows
                raise
            where, text = users_line(error), f"{type(error).__name__}: {error}"
            problem = error if isinstance(error, HarnessError) else f"{where}: {text}" if where else text
            log.warning("report() of the task fails on the first validation batch, and perhaps on all: %s", problem)


def _try_report(task: OpenedTask, sums: Sums, names: Collection[str]) -> None:
    """Raise TrainingError for a report without a number for each of the metrics ``names``. One that is missing is only
    warned of, as all rows may have it, unless the report is empty or has a name that is not declared."""
    report = task_checks.report_of(task, sums, names)
    may_be_rare = bool(report) and report.keys() <= set(names)
    for name in names:
        if may_be_rare and name not in report:
            lack = task_checks.describe_missing(name, report)
            log.warning("the first validation batch has %s; if all have none, the evaluation fails", lack)
        else:
            task_checks.require_number(task, report, name, names)


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
        metrics = task_checks.numbers(run.task, total, run.config.task.metrics)
    return {**metrics, **run.runtime.from_first({key: value for key, value in metrics.items() if is_number(value)})}
