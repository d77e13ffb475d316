"""The lines and files in which a run says how training goes: training and epoch entries, and summary.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress

from harness.data.batch import Dataset, row_namer
from harness.errors import plural
from harness.runs import layout
from harness.runs.files import read_sealed
from harness.training.evaluation.sums import Report, is_number
from harness.training.measuring.meter import Window
from harness.training.run import Run

log = logging.getLogger("harness")


def log_train(run: Run, window: Window) -> None:
    """Write a training entry; its loss is the mean over the rows of all ranks in the steps applied since the last."""
    state, lr = run.state, run.lr
    rows_per_s = window.rows / window.time_s if window.time_s else None
    which = f"step {state.step}" if window.steps == 1 else f"steps {state.step - window.steps + 1}-{state.step}"
    run.loss_text = f"loss {window.loss:.4f} ({which})" if math.isfinite(window.loss) else ""
    run.tracker.log(
        "train",
        {"step": state.step, "epoch": state.epoch + 1, "loss": window.loss, "lr": lr, **_group_rates(run),
         "grad_norm": window.norm, "loss_scale": window.scale, "skipped": state.skipped, "samples": state.rows,
         "samples_skipped": state.rows_skipped, "samples_per_s": rows_per_s,
         **unreadable(run.task.train, window.bad_rows), "memory_mib": run.meter.peak_mib(), "data_wait": window.waited,
         **{f"time_{phase}": round(share, 6) for phase, share in window.shares.items()}, "cost": window.cost,
         "wall_s": run.wall_s()},
    )  # fmt: skip
    all_skipped = f"skipped: all of {which}, loss scale {window.scale:g}"
    loss_text = run.loss_text if window.rows > window.rows_skipped else all_skipped
    run.progress.show(f"{loss_text}  lr {lr:.3g}  {rows_per_s or 0.0:.0f} rows/s")


def _group_rates(run: Run) -> dict[str, float]:
    """Return the learning rates of the groups that have their own, numbered as in the log at the start."""
    groups = run.optimizer.param_groups
    return {f"lr_group_{n}": group["lr"] for n, group in enumerate(groups) if group.get("lr_scale", 1.0) != 1.0}


def log_coverage(run: Run) -> None:
    """Write how many distinct rows the epoch used over all ranks, and how many updated the weights. Collective."""
    state, rows = run.state, run.coverage.num_rows
    name = row_namer(run.task.train)
    covered = run.coverage.covered(run.runtime, name)
    run.tracker.log(
        "epoch",
        {"step": state.step, "epoch": state.epoch + 1, "rows_used": covered.used, "rows_updated": covered.updated,
         "rows": rows, "rows_repeated": covered.repeated, "steps_skipped": state.epoch_skipped,
         "bad_rows": state.bad_rows},
    )  # fmt: skip
    mean = state.epoch_loss / state.epoch_rows if state.epoch_rows else math.nan
    loss = f"mean loss {mean:.4f}  " if math.isfinite(mean) else ""
    text = f"{loss}{covered.used} of {rows} rows used"
    if state.epoch_skipped:
        steps = plural(state.epoch_skipped, "step")
        cause = "because of overflow" + (" or NaN" if run.config.train.on_nan != "stop" else "")
        text += f"; {covered.updated} of them updated the weights, "
        text += f"and {covered.skipped} belonged to {steps} skipped {cause}"
    if covered.repeated:
        text += f"; {plural(covered.repeated, 'more use')} of rows that were used before"
    unused = ""
    if covered.missing and run.config.data.tail == "use":
        more = ", ..." if rows - covered.used > len(covered.missing) else ""
        unused = f"; rows not used{', counted from 0' if name is str else ''}: {', '.join(covered.missing)}{more}"
    if (covered.used, unused) != run.this_start.unused_told:  # not the same rows in each epoch
        text += unused
        if state.bad_rows:
            text += f"; unreadable rows, which metrics.jsonl names, replaced {plural(state.bad_rows, 'time')} so far"
    run.this_start.unused_told = covered.used, unused
    log.info("%s  end of the epoch: %s", position(run, state.epoch + 1), text)


def epoch_of(run: Run, epoch: int) -> str:
    """Return which ``epoch`` of how many, from 1, as log lines begin."""
    return f"epoch {epoch}/{run.config.train.epochs or -(-run.sizes.total_steps // run.train_data.steps_per_epoch())}"


def position(run: Run, epoch: int) -> str:
    """Return ``epoch_of``, and which step of how many."""
    return f"{epoch_of(run, epoch)}  step {run.state.step}/{run.sizes.total_steps}"


def total_s(run: Run) -> float:
    """Return the seconds of the run until its last evaluation, as summary.json and the commands that read it say."""
    with suppress(OSError, ValueError, KeyError):
        return float(read_sealed(run.folder.path / layout.SUMMARY)["wall_s"])
    return run.wall_s()


def log_evaluation(run: Run, report: Report, took_s: float) -> dict[str, float]:
    """Write an evaluation entry; return the metrics of ``report``."""
    numbers = {key: value for key, value in report.items() if is_number(value)}
    unread = {key: value for key, value in report.items() if key == "unreadable"}
    waited_s, spent_s = run.eval_data.loader.take_times()
    run.meter.costs.add({"cpu": spent_s.get("cpu", 0.0)})
    cost = {"evaluation": took_s, "data": waited_s}
    run.tracker.log(
        "eval",
        {"step": run.state.step, "epoch": run.state.epoch, **numbers, **unread, "cost": cost, "wall_s": run.wall_s()},
    )
    return {key: numbers[key] for key in run.config.task.metrics}


def show_evaluation(run: Run, report: Report, metrics: Mapping[str, float], better: bool) -> None:
    """Log the ``metrics`` of ``report``, and whether they are ``better`` than before."""
    state, name = run.state, run.config.best_metric
    best = "not finite" if state.best is None else f"best: {state.best:.4f} at step {state.best_step}"
    best = "best so far" if better else best
    values = "  ".join(f"{key} {number:.4f}{f' ({best})' if key == name else ''}" for key, number in metrics.items())
    rows = f"{report['rows_used']} of {report['rows']} rows"
    log.info("%s  validation on %s: %s", position(run, state.epoch + state.in_epoch), rows, values)


def write_summary(run: Run, evaluation: Report) -> None:
    """Write summary.json of the newest evaluation, and its confusion matrix if it is the best so far, as
    predictions.csv will be. Collective."""
    state = run.state
    with run.runtime.together("writing the summary"):
        if run.runtime.rank == 0:
            if state.best_step in (0, state.step):  # 0: no value was finite
                run.folder.confusion(evaluation)
            run.folder.summary(
                {"name": run.config.name, "finished": run.finished(), "ended_early": run.ended_early() or None,
                 "epoch": state.epoch, "step": state.step,
                 "evaluation": {name: value for name, value in evaluation.items() if name != "confusion"},
                 "best": {run.config.best_metric: state.best, "step": state.best_step}, "history": state.history,
                 "samples": state.rows, "samples_skipped": state.rows_skipped, "skipped": state.skipped,
                 "bad_rows": state.bad_rows,
                 "wall_s": run.wall_s(), "world_size": run.ranks.num, "amp": run.precision.backend}
            )  # fmt: skip
            run.folder.publish()


def unreadable(dataset: Dataset, rows: Iterable[int]) -> dict[str, list[str]]:
    """Return the field of metrics.jsonl that names the ``rows`` of ``dataset`` that could not be read; none without.
    Equal runs write the same: no place of a table on this machine."""
    name = getattr(dataset, "row_key", row_namer(dataset))  # of images
    return {"unreadable": names} if (names := list(map(name, rows))) else {}
