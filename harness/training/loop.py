"""The training loop: train, epoch, step, evaluation.

``run.precision`` is amp's interface. ``run.meter`` adds up losses, rows and times without waiting, and makes the
numbers of a log line of them. A ``Reading`` is a number that the device has still to compute. Hooks are the user's own
code.
"""

from __future__ import annotations

import logging
import sys
import time

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from harness.data.loader import MicroBatch
from harness.training import determinism, run_log
from harness.training.checkpointing import keep_best, save
from harness.training.evaluation.evaluate import evaluate, prepare, try_evaluation
from harness.training.hooks import AFTER_EVALUATION, AFTER_STEP, BEFORE_TRAINING
from harness.training.meter import Reading, Used
from harness.training.mixing import mixed, mixed_loss
from harness.training.optimizer.optim import clear_gradients
from harness.training.run import Run
from harness.training.step_timer import end_backward_before_exchange
from harness.training.strategies.sharding import full
from harness.training.task import Report, require_loss

Losses = list[tuple[Tensor, MicroBatch]]  # of the micro-batches of a step

log = logging.getLogger("harness")


def train(run: Run) -> bool:
    """``begin``, then ``train_to_end``. Collective."""
    begin(run)
    return train_to_end(run)


def begin(run: Run) -> None:
    """Do what comes before the first step of a start, none of it training time. Collective."""
    run.meter.stop_clock()
    run.hooks.call(BEFORE_TRAINING, run)
    if run.state.step:
        save(run)  # if it resumed from another run, which it then no longer needs
        run.writer.wait()
    try_evaluation(run)


def train_to_end(run: Run) -> bool:
    """Train from ``run.state`` to the end; return False if stopped earlier, with a checkpoint to resume from.

    Collective, like everything it calls: all decisions come from reduced values. A step is saved before it is
    evaluated: after a crash in the evaluation, the resume starts with that evaluation.
    """
    while not run.stop.decide_now():
        if run.evaluation_due():
            evaluation(run)
        elif run.finished():
            run.writer.wait()
            run.health.result(run.state)
            return True
        else:
            epoch(run)
            save(run)
    save(run)  # if stopped before the first step; otherwise there is one
    run.writer.wait()
    return False


def epoch(run: Run) -> None:
    """Train to the end of the current epoch, to an evaluation in it, or until all ranks agree to stop. Collective."""
    state, data = run.state, run.train_data
    run.parallel.model.train()
    run.meter.restart_clock()
    left = data.steps_left(state.segments)
    run.progress.start(run_log.epoch_of(run, state.epoch + 1), state.step)
    run.lr = run.schedule.lr(state.applied, state.plateau.reductions)  # if these ranks have no step left (tail=drop)
    end = min(state.step + run.steps_to_evaluation(), run.config.train.max_steps or sys.maxsize)
    for number, group in enumerate(data.groups(state.epoch, state.segments), state.step + 1):
        left -= 1
        logs = number % run.sizes.log_every == 0
        data.advance(state.segments)  # before the step, whose hooks see the position; groups() has a copy of the list
        with run.compiling("the smaller last step" if left == 0 else "a full step"):
            step(run, group, measured=logs or number == end or left == 0)
        run.progress.step()
        run.first_look.poll()
        if logs:
            end_window(run)
        if run.stop.poll() or number == end or state.ended:
            break  # the save comes after the end of the window
        if left and run.sizes.save_every and number % run.sizes.save_every == 0:
            settle_last_step(run)
            save(run)
    settle_last_step(run)
    run.progress.stop()
    if run.meter.steps and (left == 0 or run.evaluation_due()):
        end_window(run)
        settle_last_step(run)
    run.meter.stop_clock()
    if left == 0 or run.finished():
        run.health.updates(state, run.writer.complete)
    if left == 0:
        run_log.log_coverage(run)
        run.coverage.clear()
        state.next_epoch()


def step(run: Run, group: list[MicroBatch], measured: bool = False) -> None:
    """Take one optimizer step over the micro-batches of ``group``, applied or skipped on all ranks alike. Collective.

    ``measured``: a log line with the gradient norm follows.

    ``skip`` is one of these:

        False                           the optimizer updates the weights
        True, after an overflow         the optimizer is called, but amp has replaced its step, which does nothing
        a tensor, after an overflow     the same, but only the device knows: it updates nothing where it is nonzero
        True, by train.on_nan: skip     a loss or gradient is not finite, without amp's doing; nothing is called, since
                                        an optimizer may count a step without gradients, or decay weights

    Whether gradients overflowed follows from values that are equal on all ranks, without communication; under fsdp,
    whose ranks hold parts of them, torch reduces it as amp unscales them. With train.on_nan: stop, ``run.health`` fails
    a run whose loss is NaN.
    """
    train, precision, timer = run.config.train, run.precision, run.meter.timer
    timer.start()
    losses = backward(run, group)
    settle_last_step(run)
    run.set_lr()
    host_waits = train.on_nan == "skip"  # will_skip may wait for the device, skip_flag never does
    skip = precision.will_skip(run.optimizer) if host_waits else precision.skip_flag(run.optimizer)
    if run.gradient_hook and skip is not True:  # where only the device knows of an overflow, they may be infinite
        run.gradient_hook(precision.master_params(run.optimizer), run.state.step)
    finite = True
    params = precision.master_params(run.optimizer)
    if train.clip_norm is not None:
        run.meter.norm = clip_grad_norm_(params, train.clip_norm)
    elif host_waits or measured:
        run.meter.norm = get_total_norm([param.grad for param in params if param.grad is not None])
    if host_waits and not skip:
        finite = finite_everywhere(run, losses)
        skip = not finite
    if finite:
        run.optimizer.step()
    end_step(run, losses, skip)
    timer.end("optimizer")
    if run.hooks.after_step:
        settle_last_step(run)
        run.hooks.call(AFTER_STEP, run)  # which may look at the gradients
        timer.start()  # their time is not part of the step
    clear_gradients(run.optimizer)


def backward(run: Run, group: list[MicroBatch]) -> Losses:
    """Add up the gradients of the micro-batches of ``group``, which are averaged over ranks once, in the last backward
    pass. Returns their losses. Collective."""
    timer, losses = run.meter.timer, []
    for index, micro in enumerate(group):
        ends_step = index == len(group) - 1
        with run.parallel.micro_batch(micro, ends_step):
            inputs, share = mixed(run.config.train, run.config.seed, run.step, prepare(run, micro.batch.inputs))
            outputs = run.parallel.model(inputs)
            loss = mixed_loss(run.task.loss, outputs, micro.batch.targets, share)
            require_loss(run.task, loss)
            weighted = loss if micro.weight == 1.0 else loss * micro.weight
            timer.end("forward")
            with run.precision.scale_loss(weighted, run.optimizer, delay_unscale=not ends_step) as scaled:
                if exchange := ends_step and run.parallel.exchanges:
                    end_backward_before_exchange(timer, scaled)
                run.parallel.backward(scaled, micro.ends)
                timer.end("reduce" if exchange else "backward")
        losses.append((loss, micro))
    return losses


def finite_everywhere(run: Run, losses: Losses) -> bool:
    """Return True if the gradient norm and the losses of a step are finite on every rank: where the norm nearly
    overflows, the ranks of a mixed cluster may differ. Collective; the host waits for the device."""
    assert run.meter.norm is not None
    values = [full(run.meter.norm), *(loss.detach() for loss, micro in losses if micro.num_rows)]
    finite = torch.stack([value.double().reshape(()) for value in values]).isfinite().all()
    return not run.runtime.sum((~finite).int()).item()


def end_step(run: Run, losses: Losses, skip: bool | Tensor) -> None:
    """Add the losses, on the device, and leave the step to ``settle_last_step``. ``skip``: see ``step``."""
    first = run.ranks.own.start
    used = Used([], [0] * len(run.ranks.own), [[] for _ in run.ranks.own])
    for loss, micro in losses:
        if micro.num_rows:  # otherwise it only kept this rank in step
            used.rows.append(micro.rows)
            used.num_rows[micro.rank - first] += micro.num_rows
            used.bad[micro.rank - first] += micro.batch.bad[: micro.num_rows]  # without padding rows
            # With on_nan=stop, a loss that is NaN fails the run, even if its step was skipped; else it must not.
            if run.config.train.on_nan == "stop" or skip is not True:
                run.meter.add_loss(loss, micro.num_rows, skip, micro.rank - first)
    run.unsettled = used, Reading({"skip": skip}) if isinstance(skip, Tensor) else skip
    if not isinstance(skip, Tensor):
        settle_last_step(run)


def end_window(run: Run) -> None:
    """End the steps of a log line, which ``settle_last_step`` writes. Collective."""
    run.collect_waits()
    run.meter.end_window(run.precision.next_scale())
    if run.runtime.device.type != "cuda":
        settle_last_step(run)


def settle_last_step(run: Run) -> None:
    """Count the last step, and write the log line of a window that has ended, if that is not done. Collective.

    The device must not run out of work. So what only a GPU knows, whether it skipped a step and the numbers of a line,
    the host learns while the next backward pass is queued: before the next update, which needs the learning rate and
    the moving average, and waiting for no later work. The two steps after which a line is written:

        on a CPU   backward 1, update 1, count 1, line;    backward 2, update 2, count 2
        on a GPU   queue backward 1, update 1, backward 2; count 1, line; queue update 2, backward 3; count 2
    """
    if run.unsettled is not None:
        (used, skip), run.unsettled = run.unsettled, None
        skipped = skip if isinstance(skip, bool) else skip.values()["skip"] != 0
        if run.ema and not skipped:
            run.ema.update(run.precision.master_params(run.optimizer))
        run.state.add_step(skipped)
        run.meter.count(used, skipped)
        for rows in used.rows:
            run.coverage.add(rows, skipped)
    if run.meter.ended:
        close_window(run)
        run.meter.timer.start()  # the line is not part of a step


def close_window(run: Run) -> None:
    """Count and check what was measured since the last log line, and write the next. Collective."""
    run.this_start.num_threads = determinism.warn_of_threads(run.this_start.num_threads, run.runtime.device)
    run.meter.tick()
    start = time.perf_counter()
    seen = run.meter.reduce(run.ranks)
    run.state.add_window(seen)
    run.health.loss(seen.total, seen.steps, run.state, run.writer.complete)
    run_log.log_train(run, seen)
    run.meter.costs.add({"log": time.perf_counter() - start})


def evaluation(run: Run) -> Report | None:
    """Evaluate, log, and keep the weights if they are the best so far. Return the report; None if the run was stopped
    before its end: the evaluation is still due then, and comes first after a resume. Collective."""
    state, name = run.state, run.config.best_metric
    run.progress.stop()
    run.first_look.end()
    start = time.perf_counter()
    report = evaluate(run)
    if report is None:
        return None
    metrics = run_log.log_evaluation(run, report, time.perf_counter() - start)
    run.health.validation(metrics, state)
    increases = run.config.task.metrics[name] == "max"
    if better := state.add_evaluation(metrics, name, increases):
        keep_best(run)
    lowered = run.schedule.after_evaluation(state.plateau, metrics[name], increases, state.applied)
    run_log.write_summary(run, report)
    run_log.show_evaluation(run, report, metrics, better)
    if lowered:
        log.info("learning rate lowered to %.3g", run.schedule.lr(state.applied, state.plateau.reductions))
    run.hooks.call(AFTER_EVALUATION, run, report)
    if state.ended:  # a hook has ended the run after it was summarized
        run_log.write_summary(run, report)
    return report
