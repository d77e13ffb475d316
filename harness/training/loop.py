"""The loop: train, epoch, step. Everything else is a part that these three call."""

from __future__ import annotations

import logging
import math

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from harness.data.loader import MicroBatch
from harness.training.evaluate import evaluate, prepare
from harness.training.run import Run
from harness.training.step_timer import end_with_local_work

log = logging.getLogger("harness")


def train(run: Run) -> bool:
    """Train from ``run.state`` to the end; False if it was stopped before, with a checkpoint to go on from.

    A checkpoint comes before its evaluation, so a crash there costs nothing: the evaluation is still owed after a
    resume. Collective, like all that it calls; every verdict is made of reduced numbers.
    """
    while not run.stop.settle():
        if run.evaluation_due():
            evaluation(run)
        elif run.finished():
            return True
        else:
            epoch(run)
            run.save()
    run.save()  # if it was stopped before the first step; else there is one
    return False


def epoch(run: Run) -> None:
    """Train to the end of the present epoch, or until a stop is agreed."""
    state, config, data = run.state, run.config, run.train_data
    run.parallel.model.train()
    run.meter.resume_clock()
    left = data.steps_left(state.segments)
    run.progress.start(state.epoch, config.train.epochs, data.steps_per_epoch() - left, data.steps_per_epoch())
    lr = run.schedule.lr(state.applied)
    for group in data.groups(state.epoch, state.segments):
        lr = run.schedule.set_lr(run.optimizer, state.applied)
        step(run, group)
        data.advance(state.segments)
        left -= 1
        run.progress.step()
        if state.step % config.train.log_every == 0:
            run.log_train(lr)
        if left and config.checkpoint.every_steps and state.step % config.checkpoint.every_steps == 0:
            run.save()
        if run.stop.agreed() or state.step == config.train.max_steps:
            break
    run.progress.stop()
    if left == 0:
        if run.meter.steps:
            run.log_train(lr)
        run.log_coverage()
        state.next_epoch()


def step(run: Run, group: list[MicroBatch]) -> None:
    """One optimizer step over the micro-batches of ``group``, or its skip, on all ranks alike.

    Gradients cross ranks once, in the last backward. The overflow verdict is read after that, from gradients that are
    the same everywhere, so it needs no message of its own.
    """
    train, precision, clock = run.config.train, run.precision, run.meter.clock
    losses = []
    clock.start()
    for index, micro in enumerate(group):
        last = index == len(group) - 1
        with run.parallel.reduce_when(last, counts=micro.num_rows > 0):
            outputs = run.parallel.model(prepare(run, micro.batch.inputs))
            loss = run.task.loss(outputs, micro.batch.targets)
            weighted = loss if micro.weight == 1.0 else loss * micro.weight
            clock.end("forward")
            with precision.scale_loss(weighted, run.optimizer, delay_unscale=not last) as scaled:
                if exchange := last and run.parallel.exchanges:
                    end_with_local_work(clock, scaled)
                scaled.backward()
                clock.end("reduce" if exchange else "backward")
        losses.append((loss, micro))
    skip = precision.skips(run.optimizer)
    if train.clip_norm is not None or train.on_nan == "skip":
        norm = clip_grad_norm_(precision.master_params(run.optimizer), train.clip_norm or math.inf)
        if train.on_nan == "skip" and not skip and not norm.isfinite():  # the host waits here, as documented
            skip = True
            run.optimizer.zero_grad(set_to_none=True)
    run.optimizer.step()  # does nothing after an overflow, or without gradients
    run.optimizer.zero_grad(set_to_none=True)
    if run.ema and not skip:
        run.ema.update(precision.master_params(run.optimizer))
    clock.end("optimizer")
    count(run, losses, skip)


def count(run: Run, losses: list[tuple[Tensor, MicroBatch]], skip: bool) -> None:
    """Book a step: what was applied or skipped, the rows used, and the loss, which stays on the device."""
    meter = run.meter
    meter.steps += 1
    run.state.book(skip)
    for loss, micro in losses:
        batch = micro.batch
        meter.bad += min(len(batch.bad), micro.num_rows)  # a row that only fills up is not counted
        if micro.num_rows:
            run.coverage.add(batch.rows)
            if not skip:
                meter.add_loss(loss, micro.num_rows)


def evaluation(run: Run) -> None:
    """Evaluate, log, and keep the weights if they are the best so far."""
    state, name = run.state, run.config.best_metric
    run.progress.stop()
    found = evaluate(run)
    if found is None:
        return  # stopped; the evaluation is owed and comes first after a resume
    state.evaluated = state.step
    plain = {key: value for key, value in found.items() if isinstance(value, int | float)}
    run.tracker.log("eval", {"step": state.step, "epoch": state.epoch, **plain, "wall_s": run.wall_s()})
    state.history.append(
        {"step": state.step, "epoch": state.epoch, **{key: plain[key] for key in run.config.task.metrics}}
    )
    value = found[name]
    rises = run.config.task.metrics[name] == "max"
    better = math.isfinite(value) and (state.best is None or (value > state.best if rises else value < state.best))
    if better:
        state.best, state.best_step, state.since_best = value, state.step, 0
        run.keep_best()
    else:
        state.since_best += 1
    run.report(found)
    shown = "  ".join(f"{key} {plain[key]:.4f}" for key in run.config.task.metrics)
    where = f"step {state.step}" if state.in_epoch else f"epoch {state.epoch}"
    log.info(
        "%s: %s  (%d of %d rows)%s",
        where,
        shown,
        found["rows_used"],
        found["rows"],
        "  best" if better else "",
    )
