"""A training step and an evaluation on a few rows, for ``harness check``."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset, read
from harness.data.loader_workers import require_shared_memory
from harness.distributed import machine, stack
from harness.errors import (
    ConfigError,
    HarnessError,
    OwnCodeError,
    TrainingError,
    first_line,
    is_users,
    place_of,
    plural,
    readable,
    users_line,
)
from harness.runs.console import in_words
from harness.training.evaluation import task_checks
from harness.training.evaluation.sums import Sums
from harness.training.evaluation.task_checks import doubt_of_mean, doubt_of_sums, loss_place, require_columns
from harness.training.measuring import memory
from harness.training.model import model_builder, recompute
from harness.training.optimizer import on_gradients
from harness.training.reproducibility import determinism
from harness.training.reproducibility.determinism import Audit, OutOfTime
from harness.training.rows import division
from harness.training.strategies.base import strategy_class
from harness.training.task import OpenedTask, SupportsPredictions, prepare, require_loss

NO_TRIAL = "a training step and an evaluation (because of the errors)"
_PACE_S = 10.0  # for another training step, to estimate how long the run takes
_ROWS = 4  # of each split that take a step, or are evaluated


@dataclass
class TrialStep:
    """A training step on a few rows and an evaluation of others, on the CPU in float32, and what they tell of the run.
    ``model`` is trained, and must not be used afterwards."""

    config: Config
    task: OpenedTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sizes: division.Sizes
    device: torch.device
    """The device that the run will train on."""
    world_size: int
    limit_s: float
    batch: Batch | None = None
    """The batch of the training step."""
    step_s: float = 0.0
    """The time of the training step, on ``batch``."""
    kept: memory.KeptForBackward | None = None
    doubts: dict[str, str] = field(default_factory=dict)
    """What is probably wrong with the loss or the metrics, in words, each under its place or kind."""
    untried: list[str] = field(default_factory=lambda: [NO_TRIAL])

    def run(self, facts: dict[str, Any]) -> None:
        """Take a step and evaluate, for at most ``limit_s`` seconds. Add to ``facts`` what was tried, and what CUDA
        cannot do deterministically; to ``untried`` what was not.

        Raises the errors of the data, TrainingError with the stage in which anything else failed, and ConfigError if
        the device refuses an operation.
        """
        start, done = time.monotonic(), []
        audit, why = Audit(start + self.limit_s), "no row could be read"
        left = {"a training step": self._train, "an evaluation": self._evaluate}
        try:
            for name, stage in [*left.items()]:
                with self._of_shapes():
                    found = stage(audit)
                if found:
                    done.append(found)
                    del left[name]
        except OutOfTime as error:
            why = f"stopped after {self.limit_s:.0f} s{f', in {error}' if str(error) else ''}"
            done.append(why)
        self.untried = [f"{' and '.join(left)} ({why})"] if left else []
        self.untried += self._other_than_the_run()
        if self.doubts:
            facts["warning"] = "; ".join(filter(None, [facts.get("warning"), *self.doubts.values()]))
        facts["one batch"] = f"{', '.join(done)}; on the CPU in float32, in {time.monotonic() - start:.1f} s"
        if self.device.type == "cpu" and self.step_s:
            with self._of_shapes():
                facts["duration"] = self._duration(min(start + self.limit_s - time.monotonic(), _PACE_S))
        level = self.config.train.deterministic
        facts["deterministic"] = determinism.describe(level, audit.found | determinism.unrestorable(self.model))
        if audit.found and level is True and self.device.type == "cuda":
            raise determinism.refused(audit.found)

    @contextmanager
    def _of_shapes(self) -> Iterator[None]:
        """Context that adds torch's warnings of a loss whose outputs and targets differ in shape to ``doubts``, in one
        line, and passes the others on."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                yield
        finally:
            for each in caught:
                text = str(each.message)
                if "different to the input size" in text:
                    place = f"{os.path.relpath(each.filename)}:{each.lineno}" if is_users(each.filename) else ""
                    place = place or loss_place(self.config.task, self.task)
                    self.doubts.setdefault(place, f"{place}: {' '.join(text.split())}")
                else:
                    warnings.showwarning(each.message, each.category, each.filename, each.lineno)

    def _duration(self, left_s: float) -> str:
        """Return the time of all steps in words, at the pace of further steps: the first one is slower, because it is
        audited and allocates. One of the same rows, then three of as many as in the run, or as fit into ``left_s``
        and the memory; the fastest of the largest counts, since other programs can only slow a step down."""
        assert self.batch is not None
        sizes, few, row_s, paces = self.sizes, len(self.batch), self.step_s / len(self.batch), dict[int, float]()
        row_bytes, end = (self.kept.num_bytes / few if self.kept else 0.0), time.monotonic() + left_s
        with suppress(Exception):  # of rows that were not tried
            for wanted in (few, *[sizes.micro_batch] * 3):
                start = time.monotonic()
                most = min((end - start) / row_s, machine.memory().free / 2 / max(row_bytes, 1.0))
                if most < min(few, wanted):
                    break
                rows = min(wanted, int(most))
                if batch := _batch(self.task.train, rows, 0, "training"):
                    self.task.loss(self._outputs(batch, "training", training=True), batch.targets).backward()
                    self.optimizer.step()
                    row_s = (time.monotonic() - start) / len(batch)
                    paces[rows] = min(row_s, paces.get(rows, math.inf))
        rows, row_s = max(paces.items(), default=(few, row_s))
        epochs, rest = divmod(sizes.total_steps, sizes.steps_per_epoch)
        shard = -(-len(self.task.train) * sizes.per_rank // sizes.global_batch)
        total = epochs * min(sizes.steps_per_epoch * sizes.per_rank, shard) + min(rest * sizes.per_rank, shard)
        least = "about" if rows == sizes.micro_batch else "at most"
        return f"{least} {in_words(total * row_s)} for {total:,} training rows per rank, at the pace of {rows} here"

    def _other_than_the_run(self) -> list[str]:
        """What the run does and the trial does not, in words."""
        level = self.config.precision.opt_level
        return [
            *([f"{level} on {self.device.type} (the trial is in float32 on the CPU)"]
              if level != "O0" or self.device.type != "cpu" else []),
            *([f"{self.world_size} ranks (the trial is of one)"] if self.world_size > 1 else []),
            *(["model.compile"] if self.config.model.compile else []),
            *(["the methods of hooks except state_dict"] if self.config.hooks else []),
        ]  # fmt: skip

    def require_memory(self, facts: dict[str, Any]) -> None:
        """Add to ``facts`` what a rank of the run holds, in words: measured as far as the trial came, else estimated.
        Raises ConfigError if that is more than its device has."""
        config, share = self.config, 1 / (self.world_size if strategy_class(self.config.parallel).shards_weights else 1)
        level = config.precision.opt_level
        parts = self._held()
        shown = [f"{name} {memory.shown(share * size)}" for name, size in parts.items() if size]
        activations, how = self._activations()
        facts["memory"] = f"{', '.join(shown)} per rank; "
        rows = plural(self.sizes.micro_batch, "row")
        if activations is None:
            facts["memory"] += f"activations and temporary tensors come on top (not known: {how})"
            activations = 0.0
        else:
            activations *= 1.0 if level == "O0" else 0.5
            found = f"about {memory.shown(activations)} of activations for {rows} at a time ({how})"
            facts["memory"] += f"{found}; temporary tensors come on top"
        held, there = share * sum(parts.values()), self._device_memory()
        total = held + activations
        if total > there:
            has_blocks = bool(recompute.repeated_blocks(self.model))
            most_rows = math.floor((there - held) * self.sizes.micro_batch / (activations or 1.0))
            raise ConfigError(
                f"a rank needs about {memory.shown(total)}, of which {memory.shown(activations)} are activations of "
                f"{rows}, but has {memory.shown(there)} of memory on {self.device.type} here",
                where="batch",
                hint=memory.remedies(config, self.world_size, "training", has_blocks, self.device, most_rows)
                + "; or check on the machine that trains",
            )

    def _held(self) -> dict[str, float]:
        """Bytes of a rank between two steps, without shards."""
        trained = [param for group in self.optimizer.param_groups for param in group["params"]]
        if not self.optimizer.state and 3 * memory.num_bytes(trained) < machine.memory().free:
            for param in trained:  # a step without a forward pass, for the state of the optimizer
                param.grad = torch.zeros_like(param)
            with suppress(Exception):  # of the user's own optimizer, or one that needs the loss
                self.optimizer.step()
        level, average = self.config.precision.opt_level, trained if self.config.train.ema_decay else ()
        parts: dict[str, float] = {**memory.held(self.model.parameters(), self.optimizer, average)}
        if level in ("O2", "O5"):
            copied = memory.num_bytes([*self.model.parameters(), *trained])
            parts["half-precision copies of weights and gradients"] = copied / 2
        return {name: size / 2 for name, size in parts.items()} if level == "O3" else parts

    def _activations(self) -> tuple[float | None, str]:
        """Return (bytes for a micro-batch in float32, from where), or (None, why they are not known)."""
        if self.kept is not None:
            rows = self.kept.num_rows
            return self.kept.num_bytes * self.sizes.micro_batch / rows, f"measured on {plural(rows, 'row')}"
        if self.batch is None:
            return None, "no row could be tried"
        try:
            inputs = self._inputs(self.batch)
            kept = memory.kept_of_shapes(self.model, inputs, self.sizes.micro_batch)
            return kept.num_bytes, "computed from the shapes"
        except Exception as error:  # of the model, which may need values
            return None, f"the model cannot run without values: {first_line(error)}"

    def _device_memory(self) -> float:
        """Bytes of the device of a rank."""
        if self.device.type == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_properties(self.device).total_memory
        ranks = -(-self.world_size // self.config.launch.nnodes)
        return math.inf if self.device.type == "cuda" else machine.memory().total / ranks

    def _train(self, audit: Audit) -> str:
        """Take a training step; return what was done, empty if no row could be read."""
        sizes = self.sizes
        num_rows = max(2, min(_ROWS, sizes.micro_batch, len(self.task.train)))  # training repeats a single row, too
        batch = self.batch = self._read(self.task.train, num_rows, 0, "training")
        if batch is None:
            return ""
        rows = (sizes.micro_batch, min(sizes.eval_batch, len(self.task.eval)))
        every, per_epoch = self.config.train.evaluate_every, sizes.steps_per_epoch
        # An evaluation within an epoch keeps the batches that were loaded for the rest of the epoch.
        within = every.amount % (1 if every.unit == "epochs" else per_epoch) or sizes.total_steps % per_epoch
        batch_bytes = (sum(rows) if within else max(rows)) * (batch.inputs.nbytes + batch.targets.nbytes) / len(batch)
        num_ranks = -(-self.world_size // self.config.launch.nnodes)
        require_shared_memory(batch_bytes, self.config.data.num_workers, num_ranks)
        start = time.monotonic()
        kept = memory.KeptForBackward(num_rows, [*self.model.parameters(), *self.model.buffers()])
        with audit:
            with kept:
                outputs = self._outputs(batch, "training", training=True)
                with _stage("loss() of the task", "training"):
                    loss = self.task.loss(outputs, batch.targets)
                require_loss(self.task, loss)
            self._require_finite(loss)
            self.kept = kept
            with _stage("the backward pass", "training"):
                loss.backward()
            if own := on_gradients.build(self.config, self.model, self.optimizer, torch.device("cpu")):
                with _stage(f"the function {self.config.train.on_gradients}", "training"):
                    own([param for group in self.optimizer.param_groups for param in group["params"]], 0)
            with _stage(f"the optimizer {self.config.optimizer.name}", "training"):
                self.optimizer.step()
        self.step_s = time.monotonic() - start
        if doubt := doubt_of_mean(self.config.task, self.task, outputs, batch.targets):
            self.doubts["mean"] = doubt
        through = f"prepare, model, loss {loss.item():.4g}, backward, optimizer"
        return f"{plural(len(batch), 'training row')} through {through}"

    def _evaluate(self, audit: Audit) -> str:
        """Evaluate; return what was done, empty if no row could be read."""
        task, num_rows = self.task, min(_ROWS, self.sizes.eval_batch, len(self.task.eval))
        batch = self._read(task.eval, num_rows, None, "validation")
        if batch is None:
            return ""
        with audit, torch.no_grad():
            outputs = self._outputs(batch, "validation", training=False)
            with _stage("evaluate() of the task", "validation"):
                sums = Sums()
                task_checks.add_pairs(sums, task, outputs, batch.targets)
            with _stage("report() of the task", "validation"):
                task_checks.numbers(task, sums, self.config.task.metrics)
            if doubt := doubt_of_sums(task, outputs, batch.targets):
                self.doubts["sums"] = doubt
            if isinstance(task, SupportsPredictions):
                with _stage("predictions() or known() of the task", "validation"):
                    known = require_columns(task, "known", batch.rows, batch.rows)
                    require_columns(task, "predictions", outputs, batch.rows, {"id": batch.rows, **known})
        return f"{plural(len(batch), 'validation row')} through prepare, model and metrics"

    def _read(self, dataset: Dataset, num_rows: int, epoch: int | None, split: str) -> Batch | None:
        batch, again = (_batch(dataset, num_rows, epoch, split) for _ in range(2))
        if batch and again and (doubt := task_checks.doubt_of_rows(dataset, batch, again)):
            self.doubts.setdefault("rows", doubt)
        return batch

    def _inputs(self, batch: Batch) -> Tensor:
        """Return the input of the model; instead of float64 in float32, as amp casts it at every level."""
        inputs = prepare(self, batch.inputs)
        is_double = isinstance(inputs, Tensor) and inputs.dtype is torch.float64
        own_double = any(param.dtype is torch.float64 for param in self.model.parameters())
        return inputs.float() if is_double and not own_double else inputs

    def _outputs(self, batch: Batch, split: str, training: bool) -> Tensor:
        with _stage("prepare() of the task", split):
            inputs = self._inputs(batch)
        with _stage(f"the model {model_builder.name_of(self.model)}", split):
            outputs: Tensor = self.model.train(training)(inputs)
        return outputs

    def _require_finite(self, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            section = self.config.task
            known = [f"task.{key}" for key in ("mean", "std") if hasattr(section, key)]
            named = name if "." in (name := getattr(section, "loss_name", "")) else ""
            raise TrainingError(
                f"{named or 'loss() of the task'} returned {loss.item()} with the initial weights",
                where=(loss_place(section, self.task) if named else place_of(type(self.task), "loss")) or "task",
                hint=f"check {', '.join(['the inputs and labels of the first rows', *known])} and {named or 'loss()'}",
            )


def _batch(dataset: Dataset, num_rows: int, epoch: int | None, split: str) -> Batch | None:
    """Return ``num_rows`` rows, evenly spread over ``dataset``; None if all of them are unreadable."""
    rows = np.linspace(0, len(dataset) - 1, num_rows).round().astype(np.int64)
    with _stage("batch() of the dataset", split):
        batch = read(dataset, rows, epoch)
    return batch if len(batch) else None


@contextmanager
def _stage(what: str, split: str) -> Iterator[None]:
    """Add ``what`` failed, and on which data, to an error that lacks them."""
    try:
        yield
    except OutOfTime as error:
        raise OutOfTime(*error.args or [f"{what} on the {split} data"]) from None
    except HarnessError:
        raise
    except Exception as error:
        raise unexpected(error, f"{what} fails on the {split} data: ") from error


def unexpected(error: BaseException, what: str) -> TrainingError:
    """Return the error of the report for ``error``, after ``what``; the user's line comes first."""
    where = users_line(error)
    kind = OwnCodeError if where else TrainingError
    text = f"{what}{type(error).__name__}: {first_line(readable(error))}"
    hint = "" if where else "harness train prints the traceback"
    if what and isinstance(error, IndexError):
        hint = f'"out of bounds" usually means that the model has no output for a label{"; " * bool(hint)}{hint}'
    found = kind(text, where=where or stack.raised_at(error), hint=hint)
    found.__cause__ = error  # whose traceback is printed
    return found
