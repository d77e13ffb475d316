"""Counts each step of a run, and ends the windows, the steps of one log line.

The device must not run out of work. So what only a GPU knows, whether it skipped a step and the numbers of a line, the
host learns while the next backward pass is queued: before the next update, which needs the learning rate and the moving
average, and waiting for no later work. Step 1 ends a window, and step 2 does not:

    on a CPU           backward 1, update 1, count 1, line; backward 2, update 2, count 2
    on a GPU, fused O1 queue backward 1, update 1, backward 2; count 1, line; queue update 2, backward 3; count 2
    on a GPU, others   queue backward 1, update 1; count 1, queue backward 2; line; queue update 2; count 2
"""

from __future__ import annotations

import time

from torch import Tensor

from harness.data.rank_data import MicroBatch
from harness.training import run_log
from harness.training.measuring.meter import Reading, StepRows
from harness.training.reproducibility import determinism
from harness.training.run import Run

Losses = list[tuple[Tensor, MicroBatch]]  # of the micro-batches of a step


def record_step(run: Run, losses: Losses, skip: bool | Tensor) -> None:
    """Add the losses, on the device, and leave the step to ``catch_up``. ``skip``: whether it is skipped; a
    tensor where only the device knows, not 0 if so."""
    first_rank = run.ranks.own.start
    step_rows = StepRows([], [0] * len(run.ranks.own), [[] for _ in run.ranks.own])
    for loss, micro in losses:
        if micro.num_rows:  # otherwise it only kept this rank in step
            step_rows.rows.append(micro.rows)
            step_rows.num_rows[micro.rank - first_rank] += micro.num_rows
            step_rows.bad[micro.rank - first_rank] += micro.batch.bad[: micro.num_rows]  # without padding rows
            # A loss that is NaN makes the sum NaN and fails the run, which on_nan=skip prevents.
            if run.config.train.on_nan == "stop" or skip is not True:
                run.meter.add_loss(loss, micro.num_rows, skip, micro.rank - first_rank)
    run.uncounted = step_rows, Reading({"skip": skip}) if isinstance(skip, Tensor) else skip
    if not isinstance(skip, Tensor):
        catch_up(run)


def end_window(run: Run) -> None:
    """End the steps of a log line, which ``catch_up`` writes: on a GPU, that of the next step. Collective."""
    collect_waits(run)
    run.meter.end_window(run.precision.next_scale())
    if run.runtime.device.type != "cuda":
        catch_up(run)


def collect_waits(run: Run) -> None:
    """Move the time that the loader made this rank wait, and that loading took, to the meter."""
    waited_s, spent_s = run.train_data.loader.take_times()
    run.meter.wait_s += waited_s
    run.meter.costs.add(spent_s)
    run.meter.costs.add({"tracker": run.tracker.take_cpu_s()})


def catch_up(run: Run) -> None:
    """Count the last step, and write the log line of a window that has ended, if that is not done. Collective."""
    if run.uncounted is not None:
        (step_rows, skip), run.uncounted = run.uncounted, None
        skipped = skip if isinstance(skip, bool) else skip.values()["skip"] != 0
        if run.ema and not skipped:
            run.ema.update(run.precision.master_params(run.optimizer))
        run.state.add_step(skipped)
        run.meter.count(step_rows, skipped)
        for rows in step_rows.rows:
            run.coverage.add(rows, skipped)
    if run.meter.ended:
        write_line(run)
        run.meter.timer.start()  # the line is not part of a step


def write_line(run: Run) -> None:
    """Count and check what was measured since the last log line, and write the next. Collective."""
    run.this_start.num_threads = determinism.warn_of_threads(run.this_start.num_threads, run.runtime.device)
    run.meter.tick()
    start = time.perf_counter()
    window = run.meter.reduce(run.ranks)
    run.state.add_window(window)
    run.health.loss(window.total, window.steps, run.state, run.writer.complete)
    run_log.log_train(run, window)
    run.meter.costs.add({"log": time.perf_counter() - start})


def check_losses(run: Run) -> None:
    """Check the losses since the last log line, before a checkpoint of a model that has diverged. Collective."""
    losses = run.ranks.sum([loss.detach().clone().reshape(1) for loss in run.meter.losses])  # may overwrite them
    run.health.loss(losses.item(), run.meter.steps, run.state, run.writer.complete)
