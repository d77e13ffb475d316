"""One training run: its parts, as the loop uses them, and when it ends and evaluates."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from harness.config.schema import Config
from harness.data.rank_data import EvalData, TrainData
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.runs.checkpoints import Checkpoints
from harness.runs.console import ProgressBar
from harness.runs.run_dir import RunFolder
from harness.trackers.metrics_log import MetricsLog
from harness.training.checkpoints.checkpoint_writer import CheckpointWriter
from harness.training.evaluation import interval
from harness.training.health import Health
from harness.training.hooks import Hooks
from harness.training.measuring.meter import Meter, Reading, StepRows
from harness.training.optimizer.ema import Ema
from harness.training.optimizer.on_gradients import OnGradients
from harness.training.optimizer.precision import Precision
from harness.training.optimizer.schedule import Schedule
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.rows.coverage import Coverage
from harness.training.rows.division import Sizes
from harness.training.rows.first_look import FirstLook
from harness.training.state import State, is_over, why_ended_early
from harness.training.strategies.base import ParallelStrategy
from harness.training.task import OpenedTask


@dataclass
class ThisStart:
    """What belongs to one start of a run, and is in no checkpoint."""

    zero_s: float  # ``time.perf_counter()`` at which state.wall_s was zero
    num_threads: int  # of torch, before the task's code ran
    weights: dict[str, object]  # source and hash of what ``model.weights`` names; empty if this start has loaded none
    done_at: int = -1
    """The step at which an earlier start finished, if its results are all there; -1: there is something to do."""
    compiled: set[str] = field(default_factory=set)  # the stages that it has entered
    unused_told: tuple[int, str] | None = None  # what the log last said of the rows that an epoch used and did not use


@dataclass
class Run:
    """The parts of a run, built by ``harness.training.build``."""

    config: Config
    runtime: Runtime  # this rank, its device, and the collectives
    folder: RunFolder
    task: OpenedTask  # the datasets, the loss and the metrics
    train_data: TrainData
    eval_data: EvalData
    parallel: ParallelStrategy  # the model, and how ranks share the work
    optimizer: torch.optim.Optimizer
    sizes: Sizes
    """Rows of a step: ``per_rank``, ``global_batch``; of a forward pass: ``micro_batch``. Numbers of steps: of an
    epoch, in all, between log lines (``log_every``) and between saves (``save_every``). The schedule."""
    ema: Ema | None  # the moving average of the weights
    gradient_hook: OnGradients | None  # of train.on_gradients
    health: Health  # fails a run that no longer learns
    writer: CheckpointWriter  # often behind the training; ``complete`` is the newest step known to be on the disk
    tracker: MetricsLog  # metrics.jsonl, and the trackers that get it
    progress: ProgressBar
    stop: Stop  # the request to stop early
    state: State  # the counters
    meter: Meter  # what is measured between two log lines
    hooks: Hooks  # the user's own code, called at certain points
    this_start: ThisStart
    coverage: Coverage  # the rows that the steps of this epoch have used
    first_look: FirstLook = field(default_factory=FirstLook)  # for damaged evaluation rows, by a thread
    saved_step: int = -1
    """The step of the newest checkpoint, which may still be on its way (see ``writer.complete``); -1: none."""
    uncounted: tuple[StepRows, bool | Reading] | None = None
    """The last step, until ``counting`` counts it: the rows that this process used, and whether it was skipped: a bool,
    or where only the device knows, a copy on its way to the host; ``Reading.values`` waits for it."""
    lr: float = 0.0
    """The learning rate of the last step, for the parameters without a group of their own."""
    loss_text: str = ""
    """The loss in the last log line: the mean over its rows, and its steps; empty if it is not finite."""

    @property
    def ranks(self) -> LogicalRanks:
        """The logical ranks: ``num`` of them, of which this process computes the range ``own``, usually one. ``fixed``:
        parallel.logical_ranks sets ``num``; otherwise it is the number of processes."""
        return self.parallel.ranks

    @property
    def precision(self) -> Precision:
        """Amp: it scales the loss, and knows of overflows."""
        return self.parallel.precision

    @property
    def schedule(self) -> Schedule:
        return self.sizes.schedule

    @property
    def checkpoints(self) -> Checkpoints:
        return self.writer.checkpoints

    @property
    def module(self) -> nn.Module:
        """The model without the wrapper that averages gradients."""
        return self.parallel.module

    def wall_s(self) -> float:
        return time.perf_counter() - self.this_start.zero_s

    @property
    def step(self) -> int:
        """The number of steps so far, including one that is not counted yet."""
        return self.state.step + (self.uncounted is not None)

    def throughput(self) -> float:
        """Training rows per second over all ranks; the time includes log lines and checkpoints within an epoch."""
        return self.state.rows / self.state.train_s if self.state.train_s else 0.0

    def finished(self) -> bool:
        """Return True if training is over, by epochs, steps, patience or a hook. The same on every rank."""
        return is_over(self.config, self.state)

    def ended_early(self) -> str:
        """Return why training is over before its last epoch or step; empty if it is not. The same on every rank."""
        return why_ended_early(self.config, self.state)

    def evaluation_due(self) -> bool:
        """Return True if the present step is to be evaluated and is not yet: training is over, or an interval of
        ``train.evaluate_every`` has ended, also with the last step of the epoch before. Raises TrainingError if a loop
        of the user's own has counted more steps than the epoch has."""
        train, state = self.config.train, self.state
        ended = self.finished() or interval.has_ended(train, state, self.train_data)
        return ended and state.step > state.evaluated

    def steps_to_evaluation(self) -> int:
        """Return the steps to the next end of an interval, at least 1."""
        return interval.steps_left(self.config.train, self.state, self.train_data)

    def set_lr(self) -> None:
        """Give the optimizer the learning rates of the next step."""
        self.lr = self.schedule.set_lr(self.optimizer, self.state.applied, self.state.plateau.reductions)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model holds the weights to evaluate and export: the moving average, if there is one."""
        return self.ema.swapped_in() if self.ema else nullcontext()

    def compiling(self, stage: str) -> AbstractContextManager[None]:
        """Context for a ``stage`` that compiles the model at its first time, on some ranks for longer than on others.
        Collective."""
        if not self.config.model.compile or stage in self.this_start.compiled:
            return nullcontext()
        self.this_start.compiled.add(stage)
        return self.runtime.announced(f"compiling {stage}")

    def close(self) -> None:
        """Close all parts; both loaders, even if one fails, as after the death of a worker."""
        self.first_look.end()
        self.progress.stop()
        with closing(self.eval_data.loader), closing(self.train_data.loader):
            self.writer.close()
            self.tracker.close(done=self.finished() and not self.runtime.failed)
