"""One training run, assembled: the parts that the loop calls, and what all ranks do together to save and restore it."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.loader import EvalData, TrainData
from harness.data.seeds import TRAINING
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import CheckpointError, TrainingError, first_line
from harness.runs import checkpoint
from harness.runs.checkpoint import Checkpoints
from harness.runs.run_dir import RunFolder
from harness.trackers.metrics_log import MetricsLog
from harness.training import fsdp, rng
from harness.training.console import Progress
from harness.training.optim import Ema, Schedule
from harness.training.precision import Precision
from harness.training.progress import Coverage, Meter, State
from harness.training.strategy import Parallel
from harness.training.task import OpenedTask

log = logging.getLogger("harness")

MAX_SKIPPED_IN_A_ROW = 100  # a loss scale that has not found its level by then will not find it


@dataclass
class Run:
    """Everything the loop needs. Built by ``harness.training.build``; every method is called by all ranks."""

    config: Config
    runtime: Runtime
    folder: RunFolder
    task: OpenedTask
    train_data: TrainData
    eval_data: EvalData
    parallel: Parallel
    precision: Precision
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    ema: Ema | None
    checkpoints: Checkpoints
    tracker: MetricsLog
    progress: Progress
    stop: Stop
    state: State
    meter: Meter
    coverage: Coverage
    saved_step: int = -1
    log_offset: int = 0  # bytes of the record that the restored checkpoint vouches for
    started: float = 0.0  # time.perf_counter() at which state.wall_s was zero

    @property
    def module(self) -> nn.Module:
        """The bare model, without what keeps replicas equal."""
        return self.parallel.module

    def wall_s(self) -> float:
        return time.perf_counter() - self.started

    def throughput(self) -> float:
        """Training rows a second over all ranks, log lines and checkpoints included, evaluation left out."""
        return self.state.rows / self.state.train_s if self.state.train_s else 0.0

    def finished(self) -> bool:
        """Whether training is over: epochs, steps, or patience spent. The same on every rank."""
        state, train = self.state, self.config.train
        return (
            state.epoch >= train.epochs
            or (train.max_steps is not None and state.step >= train.max_steps)
            or (train.patience is not None and state.since_best >= train.patience)
        )

    def evaluation_due(self) -> bool:
        state = self.state
        at_edge = not state.in_epoch and state.epoch % self.config.train.evaluate_every == 0
        return state.step > state.evaluated and (at_edge or self.finished())

    def log_train(self, lr: float) -> None:
        """A line of the training record; the loss is the mean over all rows of all ranks since the last line."""
        state, meter = self.state, self.meter
        steps = meter.steps
        meter.wait_s, self.train_data.loader.wait_s = meter.wait_s + self.train_data.loader.wait_s, 0.0
        meter.tick()
        time_s = meter.time_s
        loss, rows, bad, waited, shares = meter.reduce(self.runtime)
        state.rows, state.bad_rows, state.train_s = state.rows + rows, state.bad_rows + bad, state.train_s + time_s
        self.guard(loss if rows else 0.0, steps)
        scale = self.precision.loss_scale()
        self.tracker.log(
            "train",
            {"step": state.step, "epoch": state.epoch, "loss": loss, "lr": lr, "loss_scale": scale,
             "skipped": state.skipped, "samples": state.rows, "samples_per_s": rows / time_s if time_s else None,
             "data_wait": waited, **{f"time_{phase}": round(share, 6) for phase, share in shares.items()},
             "wall_s": self.wall_s()},
        )  # fmt: skip
        self.progress.show(loss, lr, rows / time_s if time_s else 0.0)

    def guard(self, loss: float, steps: int) -> None:
        """Stop with a report where training has gone wrong. ``loss`` is reduced, so all ranks raise together."""
        state = self.state
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} within the last {steps} steps (step {state.step}, epoch {state.epoch})",
                where=self.folder.where,
                hint="lower optimizer.lr, set train.clip_norm or a warm-up, or train.on_nan=skip; "
                "the same recipe goes on from the last checkpoint",
            )
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{state.skipped_in_a_row} steps in a row were skipped for gradients that are not finite "
                f"(loss scale {self.precision.loss_scale():g})",
                where=self.folder.where,
                hint="try precision.opt_level=O4 (bfloat16) or O0; if that fails too, the data or the model yields NaN",
            )

    def log_coverage(self) -> None:
        """How many distinct rows the epoch really used, over all ranks: counted, not assumed."""
        used, rows = self.coverage.count(self.runtime), self.coverage.num_rows
        self.tracker.log(
            "epoch",
            {
                "step": self.state.step,
                "epoch": self.state.epoch,
                "rows_used": used,
                "rows": rows,
                "bad_rows": self.state.bad_rows,
            },
        )
        log.info("epoch %d: %d of %d rows used%s", self.state.epoch + 1, used, rows,
                 f"; {self.state.bad_rows} images could not be read so far" if self.state.bad_rows else "")  # fmt: skip
        self.coverage.clear()

    def save(self) -> None:
        """A checkpoint of the present step, unless there is one. Collective; an error of rank 0 is raised by all."""
        if self.saved_step == self.state.step:
            return
        self.meter.wait_s, self.train_data.loader.wait_s = self.meter.wait_s + self.train_data.loader.wait_s, 0.0
        self.guard(self._window_loss(), self.meter.steps)
        self.state.wall_s = self.wall_s()
        ranks = self.runtime.gather_to_first(self._own())
        seen = self.coverage.bits(self.runtime)
        weights = self._whole(self.module)
        optimizer = self._whole(self.optimizer)
        ema = self._whole(self.ema) if self.ema else None
        with self.runtime.together("saving"):
            if self.runtime.rank == 0:
                self.checkpoints.write(
                    self.state.step,
                    {
                        "state": self.state.to_dict(),
                        "model": weights,
                        "optimizer": optimizer,
                        "amp": self.precision.state_dict(),
                        "backend": self.precision.backend,
                        "opt_level": self.config.precision.opt_level,
                        "ema": ema,
                        "ranks": ranks,
                        "seen": seen,
                        "log_offset": self.tracker.offset(),
                        "world_size": self.runtime.world_size,
                        "data": self.task.fingerprint,
                    },
                )
                self.folder.publish()
        self.saved_step = self.state.step

    def _whole(self, part: nn.Module | torch.optim.Optimizer | Ema) -> dict[str, Any]:
        """The state dict of ``part`` on rank 0, with sharded tensors put together; of no use elsewhere. Collective."""
        first = self.runtime.rank == 0
        if not self.parallel.sharded:
            return part.state_dict() if first else {}
        whole: dict[str, Any] = fsdp.whole(part.state_dict(), keep=first)
        return whole

    def _own(self) -> dict[str, Any]:
        """What this rank has of its own: its random streams, its part of the open log window, and running statistics
        of batch norm, which training leaves to each rank."""
        buffers = {} if self.runtime.world_size == 1 else {name: b.cpu() for name, b in self._float_buffers().items()}
        return {"rng": rng.get_state(self.runtime.device), "meter": self.meter.state_dict(), "buffers": buffers}

    def _float_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.module.named_buffers() if buffer.is_floating_point()}

    def average_buffers(self) -> None:
        """Make the replicas one model: the mean over ranks of the running statistics, on all of them. Collective."""
        buffers = list(self._float_buffers().values())
        if self.runtime.world_size == 1 or not buffers:
            return
        flat = (
            self.runtime.sum(torch.cat([buffer.double().reshape(-1) for buffer in buffers])) / self.runtime.world_size
        )
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def _window_loss(self) -> float:
        """The loss since the last log line, summed: a model gone wrong must not become the newest checkpoint."""
        return self.runtime.sum(self.meter.loss.detach().clone()).item()

    def restore(self, path: Path) -> None:
        """Go on from the checkpoint at ``path``, as if never interrupted.

        At the same world size that is exact, bit for bit. At another one the position in the data, the weights and the
        optimizer are exact, and no row of the epoch is lost or repeated; random streams (dropout) start anew, and
        running statistics of batch norm are the mean over the ranks there were.
        """
        content = checkpoint.read(path, mapped=self.parallel.sharded)  # of which each rank then copies its shard
        if content["opt_level"] != self.config.precision.opt_level:
            raise CheckpointError(
                f"it was written at {content['opt_level']}, this run is at {self.config.precision.opt_level}",
                where=str(path),
                hint=f"use precision.opt_level={content['opt_level']}, or start anew with checkpoint.resume=never",
            )
        if content["data"] != self.task.fingerprint:
            raise CheckpointError(
                "the annotations are not those it was written with: its position in the data has lost its meaning",
                where=str(path),
                hint="put the files back as they were, or start anew with checkpoint.resume=never",
            )
        try:
            self.module.load_state_dict(fsdp.model_parts(self.module, content["model"]))
            self.optimizer.load_state_dict(fsdp.optimizer_parts(self.optimizer, content["optimizer"]))
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"it does not fit this model: {first_line(error)}",
                where=str(path),
                hint="use the model and optimizer it was written with",
            ) from None
        self.precision.load_state_dict(content["amp"])
        if self.ema and content["ema"]:
            self.ema.load_state_dict(content["ema"])
        self.state = State.from_dict(content["state"])
        self._restore_ranks(content)
        self.saved_step, self.log_offset = self.state.step, content["log_offset"]
        self.started = time.perf_counter() - self.state.wall_s
        log.info("resumed from %s: epoch %d, step %d", path, self.state.epoch + 1, self.state.step)

    def _restore_ranks(self, content: dict[str, Any]) -> None:
        """What each rank had of its own, and the rows of the epoch that are used."""
        ranks, rank = content["ranks"], self.runtime.rank
        if rank == 0:
            self.coverage.load(content["seen"])
        if content["world_size"] == self.runtime.world_size:
            rng.set_state(ranks[rank]["rng"], self.runtime.device)
            for name, buffer in self._float_buffers().items():
                buffer.copy_(ranks[rank]["buffers"].get(name, buffer))
            self.meter.load_state_dict(ranks[rank]["meter"])
            return
        log.info(
            "the checkpoint is of %d ranks, this run has %d: random streams start anew",
            content["world_size"],
            self.runtime.world_size,
        )
        rng.seed_all(TRAINING, self.config.seed, self.state.step, rank)
        for name, buffer in self._float_buffers().items() if ranks[0]["buffers"] else ():
            buffer.copy_(torch.stack([other["buffers"][name] for other in ranks]).double().mean(0))
        meters = [other["meter"] for other in ranks]
        if rank == 0:  # the open window as a whole; sums do not care who brings them
            self.meter.load_state_dict({key: sum(meter[key] for meter in meters) for key in meters[0]})
        self.meter.steps = meters[0]["steps"]

    def averaged(self) -> AbstractContextManager[None]:
        """The weights to evaluate and export are in the model while the body runs."""
        return self.ema.swapped_in() if self.ema else nullcontext()

    def keep_best(self) -> None:
        """Mark the present step's checkpoint as the best and leave its weights beside it. Collective."""
        with self.averaged():
            weights = self._whole(self.module)
            with self.runtime.together("keeping the best weights"):
                if self.runtime.rank == 0:
                    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
                    self.checkpoints.mark_best(self.state.step, tensors, self.folder.weights)

    def report(self, evaluation: dict[str, Any]) -> None:
        """``summary.json``, and the confusion matrix as a table, of the newest evaluation. Collective."""
        state = self.state
        with self.runtime.together("writing the summary"):
            if self.runtime.rank == 0:
                self.folder.confusion(
                    evaluation.pop("confusion", None), [str(name) for name in evaluation.get("class_accuracy", {})]
                )
                self.folder.summary(
                    {"name": self.config.name, "finished": self.finished(), "epoch": state.epoch, "step": state.step,
                     "evaluation": evaluation,
                     "best": {self.config.best_metric: state.best, "step": state.best_step}, "history": state.history,
                     "samples": state.rows, "skipped": state.skipped, "bad_rows": state.bad_rows,
                     "wall_s": self.wall_s(), "world_size": self.runtime.world_size, "amp": self.precision.backend}
                )  # fmt: skip
                self.folder.publish()

    def close(self) -> None:
        self.progress.stop()
        self.tracker.close(done=self.finished() and not self.runtime.failed)
        self.train_data.loader.close()
        self.eval_data.loader.close()
