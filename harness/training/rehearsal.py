"""A step and an evaluation on a few rows on the CPU, for ``harness check``: faults of the data, the model and the task
that would otherwise show only after the ranks have started, and an estimate of the memory that a rank needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.distributed import machine, stack
from harness.errors import ConfigError, HarnessError, TrainingError, first_line, plural
from harness.training import evaluate, memory, on_gradients, recompute
from harness.training.build import Sizes
from harness.training.determinism import Audit
from harness.training.metrics import Sums
from harness.training.task import OpenedTask, SupportsPredictions

_ROWS = 4  # of each split
_SHARE = 0.5  # of the free memory of this machine that the tensors kept for the backward pass may fill
_HALF = {"O1": 0.5, "O2": 0.5, "O3": 0.5, "O4": 0.5, "O5": 0.5}  # size of activations on a GPU, relative to float32


class _Unaffordable(Exception):
    """The rehearsal takes too long, or more memory than is free."""


class _Guard(Audit):
    """``Audit``, which also ends what runs in it after ``until`` (time.monotonic)."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.until:
            raise _Unaffordable("the time limit was reached")
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass
class Rehearsal:
    """The result. ``done`` and ``left_out``: what was tried, and what was not, for the user. ``audit`` and
    ``parts`` ({what: bytes} on one rank) are None if the training step was not completed."""

    done: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    audit: Audit | None = None
    parts: dict[str, float] | None = None

    def __str__(self) -> str:
        return "; not tried: ".join(filter(None, [", ".join(self.done), "; ".join(self.left_out)]))


@dataclass(frozen=True)
class Candidate:
    """The parts to rehearse. ``model`` is trained for a step and must not be used afterwards."""

    config: Config
    task: OpenedTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    size: Sizes
    device: torch.device  # that the run will train on


def rehearse(run: Candidate, limit_s: float) -> Rehearsal:
    """Take ``run`` through a training step, then an evaluation, for at most ``limit_s`` seconds.

    Raises the errors of the data, and TrainingError with the stage in which anything else failed.
    """
    found, start = Rehearsal(), time.monotonic()
    try:
        _train(run, found, start + limit_s)
        _evaluate(run, found, start + limit_s)
    except _Unaffordable as reason:
        found.left_out.append(f"the rest of the training step and the evaluation, because {reason}")
    if run.size.micro_batch > _ROWS:
        found.left_out.append(f"a whole batch of {run.size.micro_batch} rows")
    if run.config.precision.opt_level != "O0":
        found.left_out.append(f"{run.config.precision.opt_level} (this trial ran in float32 on the CPU)")
    found.done[-1:] = [f"{found.done[-1]}, in {time.monotonic() - start:.1f} s"] if found.done else []
    return found


def _train(run: Candidate, found: Rehearsal, until: float) -> None:
    num_rows = max(2, min(_ROWS, run.size.micro_batch, len(run.task.train)))  # training repeats a single row, too
    batch = _batch(run.task.train, num_rows, 0, "training", found)
    if batch is None:
        return
    guard, saved = _Guard(until), _Saved(run.model)
    with guard, saved:
        outputs = _outputs(run, batch, "training", training=True)
        with _stage("loss() of the task", "training"):
            loss = run.task.loss(outputs, batch.targets)
        _require_loss(loss)
        with _stage("the backward pass", "training"):
            loss.backward()
        if own := on_gradients.of_run(run.config, run.model, run.optimizer, torch.device("cpu")):
            with _stage(f"the function {run.config.train.on_gradients}", "training"):
                own([param for group in run.optimizer.param_groups for param in group["params"]], 0)
        with _stage(f"the optimizer {run.config.optimizer.name}", "training"):
            run.optimizer.step()
    found.audit, found.parts = guard, _parts(run, saved.num_bytes / len(batch))
    found.done.append(
        f"{plural(len(batch), 'training row')} through prepare, model, loss {loss.item():.4g}, backward, optimizer"
    )


def _evaluate(run: Candidate, found: Rehearsal, until: float) -> None:
    task, num_rows = run.task, min(_ROWS, run.size.eval_batch, len(run.task.eval))
    batch = _batch(task.eval, num_rows, None, "validation", found)
    if batch is None:
        return
    with _Guard(until), torch.no_grad():
        outputs = _outputs(run, batch, "validation", training=False)
        with _stage("evaluate() of the task", "validation"):
            sums = Sums()
            sums.add(task.evaluate(outputs, batch.targets))
        with _stage("report() of the task", "validation"):
            evaluate.numbers(task.report(sums), run.config.task.metrics)
        if isinstance(task, SupportsPredictions):
            with _stage("predictions() or known() of the task", "validation"):
                task.predictions(outputs)
                task.known(batch.rows)
    found.done.append(f"{plural(len(batch), 'validation row')} through prepare, model and metrics")


def _batch(dataset: Dataset, num_rows: int, epoch: int | None, split: str, found: Rehearsal) -> Batch | None:
    """``num_rows`` rows, evenly spread over ``dataset``; None if all of them are unreadable."""
    rows = np.linspace(0, len(dataset) - 1, num_rows).round().astype(np.int64)
    with _stage("batch() of the dataset", split):
        batch = dataset.batch(rows, epoch)
    if not len(batch):
        found.left_out.append(f"the {split} data, none of whose {num_rows} sampled rows could be read")
        return None
    return batch


def _outputs(run: Candidate, batch: Batch, split: str, training: bool) -> Any:
    with _stage("prepare() of the task", split):
        inputs = evaluate.prepare(run, batch.inputs)
    with _stage(f"the model {run.config.model.name}", split):
        return run.model.train(training)(inputs)


def _require_loss(loss: Any) -> None:
    what = ""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        what = f"a value of {found} instead of one number"
    elif not torch.isfinite(loss):
        what = f"{loss.item()} with the initial weights"
    if what:
        hint = "check the inputs and labels of the first rows, task.mean and task.std, and loss()"
        raise TrainingError(f"loss() of the task returned {what}", where="task", hint=hint)


@contextmanager
def _stage(what: str, split: str) -> Iterator[None]:
    """Add ``what`` failed, and on which data, to an error that lacks them."""
    try:
        yield
    except (HarnessError, _Unaffordable):
        raise
    except Exception as error:
        raise TrainingError(
            f"{what} fails on the {split} data: {type(error).__name__}: {first_line(error)}",
            where=stack.raised_at(error),
            hint='"out of bounds" usually means that the model has no output for a label; harness train prints the '
            "traceback" if isinstance(error, IndexError) else "harness train prints the traceback",
        ) from error  # fmt: skip


class _Saved:
    """Context that adds up the memory of tensors kept for the backward pass, without the weights of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._limit = _SHARE * machine.memory_of()[1]

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._sizes[storage.data_ptr()] = storage.nbytes()
            if self.num_bytes > self._limit:
                raise _Unaffordable(f"the activations of a few rows take more than {memory.shown(self._limit)}")
        return tensor

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


# Memory


def _parts(run: Candidate, row_bytes: float) -> dict[str, float]:
    """{what: bytes} on a rank of the run. ``row_bytes``: what one row keeps for the backward pass, in float32."""
    level, trained = run.config.precision.opt_level, [p for g in run.optimizer.param_groups for p in g["params"]]
    held = memory.held_by(run.model.parameters(), run.optimizer, trained if run.config.train.ema_decay else ())
    scale = 0.5 if level == "O3" else 1.0
    parts: dict[str, float] = {name: size * scale for name, size in held.items()}
    if level in ("O2", "O5"):
        parts["half-precision copies of weights and gradients"] = (
            memory.num_bytes([*run.model.parameters(), *trained]) / 2
        )
    half = _HALF.get(level, 1.0) if run.device.type == "cuda" else 1.0
    parts[f"activations of {plural(run.size.micro_batch, 'row')}"] = half * row_bytes * run.size.micro_batch
    return parts


def require_memory(run: Candidate, parts: dict[str, float], world_size: int) -> str:
    """The estimate ``parts`` in words. Raises ConfigError if the device of ``run`` has less."""
    if run.config.parallel.strategy == "fsdp":
        parts = {name: size / (1 if "activations" in name else world_size) for name, size in parts.items()}
    total, here = sum(parts.values()), -(-world_size // run.config.launch.nnodes)
    largest = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    text = f"about {memory.shown(total)} per rank, without temporary tensors: "
    text += ", ".join(f"{name} {memory.shown(size)}" for size, name in largest)
    if run.device.type != "cuda":
        available, place = machine.memory_of()[0], "this machine"  # which need not be the one that the run starts on
    elif torch.cuda.is_available():
        available, place = torch.cuda.get_device_properties(run.device).total_memory, "this GPU"
    else:
        return f"{text}; the memory of the GPU is not known"
    text += f"; {place} has {memory.shown(available)}"
    text += f", for {here} ranks if all of them start here" if here > 1 and run.device.type != "cuda" else ""
    if total > available:
        has_blocks = bool(recompute.blocks(run.model)) and run.config.parallel.strategy != "dp"
        ways = [*memory.settings(run.config, world_size, "training", has_blocks)][: memory.NUM_SETTINGS]
        raise ConfigError(f"not enough memory: {text}", where="batch", hint=f"use one of: {'; '.join(ways)}")
    return text
