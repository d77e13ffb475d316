"""One training run: its parts, as the loop uses them, and what it logs and reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from harness.config.schema import Config
from harness.data.batch import Dataset
from harness.data.loader import EvalData, TrainData
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import plural
from harness.runs.checkpoint import Checkpoints
from harness.runs.console import ProgressBar
from harness.runs.run_dir import RunFolder
from harness.trackers.metrics_log import MetricsLog
from harness.training.checkpoint_writer import CheckpointWriter
from harness.training.division import Sizes
from harness.training.evaluation.metrics import Report
from harness.training.first_look import FirstLook
from harness.training.health import Health
from harness.training.hooks import Hooks
from harness.training.logical_ranks import LogicalRanks
from harness.training.meter import Meter, Reading
from harness.training.optimizer.on_gradients import OnGradients
from harness.training.optimizer.optim import Ema
from harness.training.optimizer.precision import Precision
from harness.training.optimizer.schedule import Schedule
from harness.training.progress import Coverage, State, Used
from harness.training.strategies.base import ParallelStrategy
from harness.training.task import OpenedTask

log = logging.getLogger("harness")


@dataclass
class Run:
    """The parts of a run, built by ``harness.training.build``. Every rank calls every method."""

    config: Config
    runtime: Runtime
    folder: RunFolder
    task: OpenedTask
    train_data: TrainData
    eval_data: EvalData
    parallel: ParallelStrategy
    optimizer: torch.optim.Optimizer
    size: Sizes
    """The sizes, and the schedule, which depends on them."""
    ema: Ema | None
    gradient_hook: OnGradients | None
    health: Health
    writer: CheckpointWriter
    tracker: MetricsLog
    progress: ProgressBar
    stop: Stop
    state: State
    meter: Meter
    hooks: Hooks
    coverage: Coverage
    """The rows of this epoch's steps so far."""
    first_look: FirstLook | None = None
    """None after the first evaluation."""
    saved_step: int = -1
    """The step of the newest checkpoint, complete or on its way; -1: none."""
    done_at: int = -1
    """The step at which an earlier start finished, if its results are all there; -1: there is something to do."""
    log_offset: int = 0
    """Bytes of metrics.jsonl that were written before the restored checkpoint."""
    log_digest: str = ""
    """The SHA-256 of these bytes."""
    started: float = 0.0
    """``time.perf_counter()`` at which state.wall_s was zero."""
    start_weights: dict[str, object] = field(default_factory=dict)
    """What this start loaded: source, hash."""
    uncounted: tuple[Used, bool | Reading] | None = None
    """The last step, until it is counted, and if it was skipped."""
    lr: float = 0.0
    """The learning rate of the last step, for the parameters without a group of their own."""
    num_threads: int = field(default_factory=torch.get_num_threads)
    """Threads of torch, before the task's code ran."""

    _compiled: set[str] = field(default_factory=set)
    """The stages that this start has passed."""

    @property
    def ranks(self) -> LogicalRanks:
        return self.parallel.ranks

    @property
    def precision(self) -> Precision:
        return self.parallel.precision

    @property
    def schedule(self) -> Schedule:
        return self.size.schedule

    @property
    def checkpoints(self) -> Checkpoints:
        return self.writer.checkpoints

    @property
    def module(self) -> nn.Module:
        """The model without the wrapper that averages gradients."""
        return self.parallel.module

    def wall_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def step(self) -> int:
        """The number of steps so far, including one that is not counted yet."""
        return self.state.step + (self.uncounted is not None)

    def throughput(self) -> float:
        """Training rows per second over all ranks, including skipped steps, log lines and checkpoints, but not
        evaluation."""
        return self.state.rows / self.state.train_s if self.state.train_s else 0.0

    def finished(self) -> bool:
        """Return True if training is over, by epochs, steps, patience or a hook. The same on every rank."""
        state, train = self.state, self.config.train
        return (
            (train.epochs is not None and state.epoch >= train.epochs)
            or (train.max_steps is not None and state.step >= train.max_steps)
            or bool(self.ended_early())
        )

    def ended_early(self) -> str:
        """Return why training is over before its last epoch or step; empty if it is not. The same on every rank."""
        state, patience = self.state, self.config.train.patience
        if state.ended:
            return state.ended
        if patience is not None and state.since_best >= patience:
            evaluations = plural(state.since_best, "evaluation")
            return f"{self.config.best_metric} was not better in the last {evaluations} (train.patience)"
        return ""

    def evaluation_due(self) -> bool:
        """Return True if the present step is to be evaluated and is not yet: training is over, or one step ago the next
        evaluation was one step away."""
        return self.state.step > self.state.evaluated and (self.finished() or self.steps_to_evaluation(before=1) == 1)

    def steps_to_evaluation(self, before: int = 0) -> int:
        """Return the steps to the next evaluation, counted from ``before`` steps ago."""
        state, data = self.state, self.train_data
        done = sum(segment.steps for segment in state.segments)
        # An epoch resumed on another number of ranks has another number of steps.
        per_epoch = done + data.steps_left(state.segments) if done else data.steps_per_epoch()
        every = self.config.train.evaluate_every
        return every.steps_left(state.step - before, state.epoch, done - before, per_epoch)

    def set_lr(self) -> None:
        """Give the optimizer the learning rates of the next step."""
        self.lr = self.schedule.set_lr(self.optimizer, self.state.applied, self.state.plateau.reductions)

    def collect_waits(self) -> None:
        """Move the time that the loader made this rank wait, and that loading took, to the meter."""
        waited_s, spent_s = self.train_data.loader.take_times()
        self.meter.wait_s += waited_s
        self.meter.costs.add(spent_s)
        self.meter.costs.add({"tracker": self.tracker.take_cpu_s()})

    def end_window(self) -> None:
        """End the steps of a log line, and write it. On a GPU, ``log_train`` writes it after the next backward pass has
        been queued, so that the device does not run out of work. Collective."""
        self.collect_waits()
        self.meter.end_window(self.precision.next_scale())
        if self.runtime.device.type != "cuda":
            self.log_train()

    def log_train(self) -> None:
        """Write a training entry; its loss is the mean over the rows of all ranks in the steps applied since the last.
        Collective."""
        state, meter, lr = self.state, self.meter, self.lr
        self._notice_threads()
        meter.tick()
        start, steps = time.perf_counter(), meter.steps
        time_s = meter.time_s  # before ``reduce``, which resets the meter
        seen = meter.reduce(self.ranks)
        state.rows, state.rows_skipped = state.rows + seen.rows, state.rows_skipped + seen.rows_skipped
        state.bad_rows, state.train_s = state.bad_rows + seen.bad, state.train_s + time_s
        self.health.loss(seen.total, steps, state, self.writer.complete)
        rows_per_s = seen.rows / time_s if time_s else None
        self.tracker.log(
            "train",
            {"step": state.step, "epoch": state.epoch, "loss": seen.loss, "lr": lr, **self._group_rates(),
             "grad_norm": seen.norm, "loss_scale": seen.scale, "skipped": state.skipped, "samples": state.rows,
             "samples_skipped": state.rows_skipped, "samples_per_s": rows_per_s,
             **unreadable(self.task.train, seen.bad_rows), "memory_mib": meter.peak_mib(), "data_wait": seen.waited,
             **{f"time_{phase}": round(share, 6) for phase, share in seen.shares.items()}, "cost": seen.cost,
             "wall_s": self.wall_s()},
        )  # fmt: skip
        which = "the last step was" if steps == 1 else f"all of the last {steps} steps were"
        all_skipped = f"{which} skipped, loss scale {seen.scale:g}"
        shown = f"loss {seen.loss:.4f}" if seen.rows > seen.rows_skipped else all_skipped
        self.progress.show(f"{shown}  lr {lr:.3g}  {rows_per_s or 0.0:.0f} rows/s")
        meter.costs.add({"log": time.perf_counter() - start})

    def _notice_threads(self) -> None:
        """Warn if code of the user has changed torch's number of threads, by which sums on a CPU are divided."""
        before, self.num_threads = self.num_threads, torch.get_num_threads()
        if before != self.num_threads and self.runtime.device.type == "cpu":
            log.warning(
                "the number of torch's threads has changed from %d to %d: on a CPU, results depend on it; remove the "
                "call of torch.set_num_threads, and set launch.threads or OMP_NUM_THREADS",
                before, self.num_threads,
            )  # fmt: skip

    def _group_rates(self) -> dict[str, float]:
        """Return the learning rates of the groups that have their own, numbered as in the log at the start."""
        groups = self.optimizer.param_groups
        return {f"lr_group_{n}": group["lr"] for n, group in enumerate(groups) if group.get("lr_scale", 1.0) != 1.0}

    def log_coverage(self) -> None:
        """Write how many distinct rows the epoch used over all ranks, and how many updated the weights; start the next.
        Collective."""
        state, rows = self.state, self.coverage.num_rows
        used, repeated, skipped, missing = self.coverage.covered(
            self.runtime, getattr(self.task.train, "row_name", str)
        )
        self.tracker.log(
            "epoch",
            {"step": state.step, "epoch": state.epoch, "rows_used": used, "rows_updated": used - skipped, "rows": rows,
             "rows_repeated": repeated,
             "steps_skipped": state.epoch_skipped, "bad_rows": state.bad_rows},
        )  # fmt: skip
        text = f"{used} of {rows} rows used"
        if state.epoch_skipped:
            steps = plural(state.epoch_skipped, "step")
            why = "because of overflow" + (" or NaN" if self.config.train.on_nan != "stop" else "")
            text += f"; {used - skipped} of them updated the weights, and {skipped} belonged to {steps} skipped {why}"
        text += f"; {plural(repeated, 'more use')} of rows that were used before" if repeated else ""
        if missing and self.config.data.tail == "use":
            text += f"; rows not used: {', '.join(missing)}{', ...' if rows - used > len(missing) else ''}"
        if state.bad_rows:
            text += f"; {plural(state.bad_rows, 'unreadable row')} so far, which metrics.jsonl names"
        log.info("epoch %d: %s", state.epoch + 1, text)
        self.coverage.clear()

    def average_buffers(self) -> None:
        """Set the running statistics of batch norms, and other floating-point buffers, which training leaves to each
        rank, to their mean over ranks, on all of them. Collective."""
        own = [{name: b for name, b in of_rank.items() if b.is_floating_point()} for of_rank in self.ranks.buffers()]
        if self.ranks.num == 1 or not own[0]:
            return
        flat = [torch.cat([buffer.double().reshape(-1) for buffer in of_rank.values()]) for of_rank in own]
        means = (self.ranks.sum(flat) / self.ranks.num).split([buffer.numel() for buffer in own[0].values()])
        for of_rank in own:
            for buffer, mean in zip(of_rank.values(), means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model holds the weights to evaluate and export: the moving average, if there is one."""
        return self.ema.swapped_in() if self.ema else nullcontext()

    def compiling(self, stage: str) -> AbstractContextManager[None]:
        """Context for a ``stage`` that compiles the model at its first time, on some ranks for longer than on others.
        Every rank enters it."""
        if not self.config.model.compile or stage in self._compiled:
            return nullcontext()
        self._compiled.add(stage)
        return self.runtime.announced(f"compiling {stage}")

    def write_summary(self, evaluation: Report) -> None:
        """Write summary.json, and the confusion matrix, of the newest evaluation. Collective."""
        state = self.state
        with self.runtime.together("writing the summary"):
            if self.runtime.rank == 0:
                self.folder.confusion(evaluation)
                self.folder.summary(
                    {"name": self.config.name, "finished": self.finished(), "ended_early": self.ended_early() or None,
                     "epoch": state.epoch, "step": state.step,
                     "evaluation": {name: value for name, value in evaluation.items() if name != "confusion"},
                     "best": {self.config.best_metric: state.best, "step": state.best_step}, "history": state.history,
                     "samples": state.rows, "samples_skipped": state.rows_skipped, "skipped": state.skipped,
                     "bad_rows": state.bad_rows,
                     "wall_s": self.wall_s(), "world_size": self.ranks.num, "amp": self.precision.backend}
                )  # fmt: skip
                self.folder.publish()

    def end_look(self) -> None:
        """End the first look at the evaluation rows, if it still runs."""
        if self.first_look is not None:
            self.first_look.end()
            self.first_look = None

    def close(self) -> None:
        self.end_look()
        self.progress.stop()
        self.writer.close()
        self.tracker.close(done=self.finished() and not self.runtime.failed)
        self.train_data.loader.close()
        self.eval_data.loader.close()


def unreadable(dataset: Dataset, rows: Iterable[int]) -> dict[str, list[str]]:
    """Return the field of a log line that names the ``rows`` of ``dataset`` that could not be read; none without."""
    name = getattr(dataset, "row_name", str)
    return {"unreadable": found} if (found := [name(row) for row in rows]) else {}
