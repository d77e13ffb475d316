"""The training loop: train, epoch, step, evaluation.

``run.precision`` is amp's interface; its module says who skips a step after an overflow, and when the host waits for
the device. With train.on_nan: stop, other NaNs are applied, and ``health`` fails the run at the next log line or save.

On a CPU, ``record_step`` counts a step as it ends, and ``end_window`` writes its log line. On a GPU, both may leave it
to ``catch_up``: when the host has queued the next backward pass, so that the device has work meanwhile; or when
counters are needed, before hooks, a save and the end of an epoch (``counting``).
"""

from __future__ import annotations

import logging
import sys
import time

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from harness.data.rank_data import MicroBatch
from harness.training import run_log
from harness.training.checkpoints.checkpointing import keep_best, save
from harness.training.counting import Losses, catch_up, end_window, record_step
from harness.training.evaluation.evaluate import evaluate, try_evaluation
from harness.training.hooks import AFTER_EVALUATION, AFTER_STEP, BEFORE_TRAINING
from harness.training.measuring.step_timer import end_backward_before_exchange
from harness.training.optimizer.optimizer_builder import clear_gradients
from harness.training.rows.mixing import mixed, mixed_loss
from harness.training.run import Run
from harness.training.strategies.sharding import full
from harness.training.task import Report, prepare, require_loss

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
        save(run)  # does nothing, unless it resumed from another run, which it then no longer needs
        run.writer.wait()
    try_evaluation(run)  # of a task of the user's own, on one batch: its faults are found before an epoch is over


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
            epoch(run)  # to its end, or to an evaluation in it
            save(run)
    save(run)  # if stopped before the first step; otherwise there is one
    run.writer.wait()
    return False


def epoch(run: Run) -> None:
    """Train to the end of the current epoch, to an evaluation in it, or until all ranks agree to stop. Collective."""
    state, data = run.state, run.train_data
    run.parallel.model.train()
    run.meter.restart_clock()
    steps_left = data.steps_left(state.segments)
    run.progress.start(run_log.epoch_of(run, state.epoch + 1), state.step)
    pause_at = min(state.step + run.steps_to_evaluation(), run.config.train.max_steps or sys.maxsize)
    for number, group in enumerate(data.groups(state.epoch, state.segments), state.step + 1):
        steps_left -= 1
        log_due = number % run.sizes.log_every == 0
        data.advance(state.segments)  # before the step, whose hooks see the position; groups() has a copy of the list
        with run.compiling("the smaller last step" if steps_left == 0 else "a full step"):
            step(run, group, measured=log_due or number == pause_at or steps_left == 0)
        run.progress.step()
        run.first_look.poll()  # raises the error of a damaged evaluation row
        if log_due:
            end_window(run)
        if run.stop.poll() or number == pause_at or state.ended:
            break  # the save of ``train_to_end`` comes after the end of the window
        if steps_left and run.sizes.save_every and number % run.sizes.save_every == 0:
            catch_up(run)
            save(run)
    catch_up(run)
    run.progress.stop()
    if run.meter.steps and (steps_left == 0 or run.evaluation_due()):
        end_window(run)  # one that is shorter than ``log_every``
        catch_up(run)  # on a GPU, its line is still to be written
    run.meter.stop_clock()
    if steps_left == 0 or run.finished():
        run.health.updates(state, run.writer.complete)
    if steps_left == 0:
        run_log.log_coverage(run)
        run.coverage.clear()
        state.next_epoch()


def step(run: Run, group: list[MicroBatch], measured: bool = False) -> None:
    """Take one optimizer step over the micro-batches of ``group``. ``measured``: a log line with the gradient norm
    follows. Collective."""
    timer = run.meter.timer
    timer.start()
    losses = backward(run, group)
    catch_up(run)  # now that the device has work; the learning rate depends on the number of steps
    run.set_lr()
    skipped = update(run, losses, measured)
    record_step(run, losses, skipped)  # adds up the losses, on the device
    timer.end("optimizer")
    if run.hooks.after_step:
        catch_up(run)
        run.hooks.call(AFTER_STEP, run)  # which may look at the gradients
        timer.start()  # their time is not part of the step
    clear_gradients(run.optimizer)


def backward(run: Run, group: list[MicroBatch]) -> Losses:
    """Add up the gradients of ``group``, and average them over ranks, once, in the last backward pass. Return the mean
    loss of each micro-batch: times ``weight``, added up, and averaged over ranks, that of all rows. Collective."""
    timer, losses = run.meter.timer, []
    for number, micro in enumerate(group, 1):
        is_last = number == len(group)
        with run.parallel.micro_batch(micro, is_last):
            # The inputs on their way to the model, and, with mixup or cutmix, mixed with a ``share`` of other rows.
            inputs, share = mixed(run.config.train, run.config.seed, run.step, prepare(run, micro.batch.inputs))
            outputs = run.parallel.model(inputs)
            loss = mixed_loss(run.task.loss, outputs, micro.batch.targets, share)
            require_loss(run.task, loss)
            weighted_loss = loss if micro.weight == 1.0 else loss * micro.weight
            timer.end("forward")
            with run.precision.scale_loss(weighted_loss, run.optimizer, delay_unscale=not is_last) as scaled_loss:
                if exchange := is_last and run.parallel.exchanges:
                    end_backward_before_exchange(timer, scaled_loss)  # for the times in the log
                run.parallel.backward(scaled_loss, micro.ends)
                timer.end("reduce" if exchange else "backward")
        losses.append((loss, micro))
    return losses


def update(run: Run, losses: Losses, measured: bool) -> bool | Tensor:
    """Update the weights, or skip that on all ranks alike: amp looks at averaged gradients (of shards, torch reduces
    what it finds), ``finite_everywhere`` at a sum. Return whether it is skipped: True or False, or a tensor where only
    the device knows, not 0 if so. Collective."""
    train, precision, optimizer = run.config.train, run.precision, run.optimizer
    host_waits = train.on_nan == "skip"
    skip = precision.will_skip(optimizer) if host_waits else precision.skip_flag(optimizer)  # which never waits
    if run.gradient_hook and skip is not True:  # where only the device knows of an overflow, they may be infinite
        run.gradient_hook(precision.master_params(optimizer), run.step)
    params = precision.master_params(optimizer)
    if train.clip_norm is not None:
        run.meter.norm = clip_grad_norm_(params, train.clip_norm)
    elif host_waits or measured:
        run.meter.norm = get_total_norm([param.grad for param in params if param.grad is not None])
    if host_waits and not skip and not finite_everywhere(run, losses):
        return True  # the optimizer is not called: it may count a step without gradients, or decay weights
    optimizer.step()  # after an overflow, amp has replaced it, and it updates nothing
    return skip


def finite_everywhere(run: Run, losses: Losses) -> bool:
    """Return True if the gradient norm and the losses of a step are finite on every rank: where the norm nearly
    overflows, the ranks of a mixed cluster may differ. Collective; the host waits for the device."""
    assert run.meter.norm is not None
    values = [full(run.meter.norm), *(loss.detach() for loss, micro in losses if micro.num_rows)]
    all_finite = torch.stack([value.double().reshape(()) for value in values]).isfinite().all()
    return not run.runtime.sum((~all_finite).int()).item()


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
