"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from harness.config import constraints, loader
from harness.config.places import is_url
from harness.config.schema import Config
from harness.data.batch import Batch, Dataset, read
from harness.data.loader_workers import require_shared_memory
from harness.distributed import devices, machine, stack
from harness.distributed.runtime import Runtime
from harness.errors import (
    ConfigError,
    DataError,
    DoubtError,
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
from harness.runs import checkpoint, hub_copies, layout, remote
from harness.runs.console import in_words
from harness.trackers import metrics_log
from harness.training import build, description, determinism, division, hooks, logical_ranks, memory
from harness.training.determinism import Audit, OutOfTime
from harness.training.evaluation import evaluate
from harness.training.evaluation.sums import Sums
from harness.training.models import lora, recompute, weights
from harness.training.optimizer import on_gradients, optim, precision, trained_parameters
from harness.training.strategies.base import strategy_class
from harness.training.task import (
    OpenedTask,
    SupportsPredictions,
    SupportsSample,
    doubt_of_mean,
    doubt_of_sums,
    loss_place,
    require_loss,
)

P = ParamSpec("P")
T = TypeVar("T")

_PACE_S = 10.0  # for another training step, to estimate how long the run takes
_NO_TRIAL = "a training step and an evaluation (because of the errors)"
_ROWS = 4  # of each split that take a step, or are evaluated


def examine(
    path: str,
    overrides: Sequence[str],
    world_size: int,
    limit_s: float = build.FILES_S,
    written_at: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[HarnessError]]:
    """Return (facts, errors). A stage is left out only if it needs the result of one that failed. ``limit_s``: for a
    look for the files that the rows name, for decoding a sample of them, and for a step and an evaluation on a few
    rows. ``written_at``: as for ``loader.load``."""
    try:
        config = loader.load(path, overrides, written_at)
    except HarnessError as error:
        return {}, [error]
    examination = _Examination(config, world_size, limit_s)
    examination.run()
    return examination.facts, examination.errors


class _Examination:
    """The stages of ``examine``, and the facts and errors that they have found so far."""

    def __init__(self, config: Config, world_size: int, limit_s: float) -> None:
        self.config, self.world_size, self.limit_s = config, world_size, limit_s
        self.facts: dict[str, Any] = {"run folder": f"{config.output.rstrip('/')}/{config.name}"}
        self.errors: list[HarnessError] = []
        self.warnings: list[str] = []
        self.located = config  # with the run's copies of folders of Hugging Face that are gone
        run = Path(config.output, config.name)
        if config.checkpoint.resume == "auto" and checkpoint.steps(run / layout.CHECKPOINTS):
            self.located = hub_copies.with_copies(config, run)

    def attempt(self, stage: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``stage``; None, with its error among ``errors``, if it raises one."""
        try:
            return stage(*args, **kwargs)
        except HarnessError as error:
            self.errors.append(loader.placed(error, self.config))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's own task, model or optimizer, which may call sys.exit
            self.errors.append(_unexpected(error, ""))
        return None

    def run(self) -> None:
        config, attempt = self.config, self.attempt
        device = attempt(devices.choose, config.runtime.device, 0, 1)
        amp = attempt(precision.choose, config.precision, device, config.needs_our_amp) if device else None
        attempt(metrics_log.require, config.trackers)
        attempt(_require_output, config)
        name = config.train.on_gradients
        has_function = name is None or attempt(on_gradients.find, name) is not None
        own_hooks = attempt(hooks.build, config.hooks)
        for hook in own_hooks.all if own_hooks else ():
            if not hook.has(hooks.BEFORE_TRAINING):  # which may make its state
                attempt(self._try_state, hook)
        num_errors = len(self.errors)
        for check in build.name_checks(config):
            attempt(check)
        wrong_names = len(self.errors) > num_errors
        task = self._open_task(look_at_files=not wrong_names)
        num_ranks = config.parallel.num_ranks(self.world_size)
        sizes = attempt(division.sizes_of, config, len(task.train), num_ranks) if task else None
        if wrong_names:
            self._build_optimizer(None, None)  # which looks at its name again
            self.errors = [*{str(error): error for error in self.errors}.values()]
            self.facts = {}  # a plan would hide the errors
            attempt(lambda: strategy_class(config.parallel).check_world(config.parallel, self.world_size))
            return
        model = attempt(build.build_model, self.located, task) if task else None
        untried = [_NO_TRIAL]
        if model is not None and task is not None:
            self._examine_model(model, task, device)
        optimizer = self._build_optimizer(model, sizes)
        if sizes is not None and amp is not None and task is not None and device is not None:
            self._plan(task, sizes, device, amp.backend)
            self.facts |= own_hooks.describe() if own_hooks else {}
            if model is not None:
                self.facts["same bits"] = _same_bits(config, model, self.world_size)
                readable_rows = self._sample(task)
                if optimizer is not None:
                    trial = _Trial(config, task, model, optimizer, sizes, device, self.world_size, self.limit_s)
                    if readable_rows and has_function:
                        attempt(trial.run, self.facts)
                    attempt(trial.require_memory, self.facts)
                    untried = trial.untried
        attempt(lambda: strategy_class(config.parallel).check_world(config.parallel, self.world_size))
        self.facts |= {"not tried": "; ".join(untried)} if untried else {}

    def _try_state(self, hook: hooks.Hook) -> None:
        """Call ``state_dict()`` of ``hook``. That it fails is a warning: what it lacks may be made in training."""
        try:
            hooks.Hooks([hook]).state_dict()
        except OwnCodeError as error:
            if error.__cause__ is None:  # of what it returned
                raise
            self.warnings.append(f"{error.where}: before training, {error.message}")

    def _open_task(self, look_at_files: bool) -> OpenedTask | None:
        task = self.attempt(build.open_task, self.located, Runtime(), self.limit_s if look_at_files else None)
        if task is None:  # it stops at the first error of the data
            section = self.config.task
            problems = self.attempt(lambda: [*section.problems()]) or []
            if not problems and isinstance(self.errors[-1], DataError):
                problems = self.attempt(lambda: [*section.row_problems()]) or []
            found = {str(error): loader.placed(error, self.config) for error in problems}  # both may be one table
            doubts = [
                " ".join(text.split()).replace(" -> ", ": ") for text in found if isinstance(found[text], DoubtError)
            ]
            self.facts |= {"warning": "; ".join(doubts)} if doubts else {}
            found = {text: error for text, error in found.items() if not isinstance(error, DoubtError)}
            told = {error.where: error for error in self.errors}
            for error in found.values():
                if other := told.pop(error.where, None):  # it tells less, but may have a better hint
                    error.hint = other.hint
                    self.errors.remove(other)
            self.errors += found.values()
        return task

    def _examine_model(self, model: nn.Module, task: OpenedTask, device: torch.device | None) -> None:
        config, facts, attempt = self.config, self.facts, self.attempt
        attempt(build.require_mixable, config, task)
        if device is not None:
            attempt(determinism.require_restorable, model, device, config.train.deterministic)
        facts["model"] = description.describe_model(config, model)
        if config.model.lora is not None:
            facts["lora"] = lora.summary(model, config.model.lora)
        starts = self.located.model.name == config.model.name and config.model.start_weights is not None
        if starts and (loaded := attempt(weights.load, model, config)):
            facts["weights"] = "; ".join(filter(None, [loaded["summary"], loaded["warning"]]))
        if again := attempt(recompute.apply, model, config.model.activation_checkpointing):
            shown = ", ".join(again if len(again) <= 4 else [*again[:3], "...", again[-1]])
            facts["recomputed"] = f"{plural(len(again), 'module')} in the backward pass: {shown}"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "the rows of each rank"
            facts["batch norm"] = f"over {rows}"

    def _build_optimizer(self, model: nn.Module | None, sizes: division.Sizes | None) -> torch.optim.Optimizer | None:
        """Return the optimizer of ``model``; if there is none, or nothing to train, look only at its settings."""
        section, attempt = self.config.optimizer, self.attempt
        groups = attempt(trained_parameters.groups, section, model, sizes.lr) if model and sizes else None
        if model is None or sizes is None or not groups:
            attempt(optim.build, section, [nn.Parameter(torch.zeros(1, 1))], section.lr)
            return None
        optimizer = attempt(optim.build, section, groups, sizes.lr)
        self.facts |= trained_parameters.describe(optimizer, model) if optimizer else {}
        return optimizer

    def _plan(self, task: OpenedTask, sizes: division.Sizes, device: torch.device, backend: str) -> None:
        num_ranks = self.config.parallel.num_ranks(self.world_size)
        self.facts |= description.describe(self.config, task, sizes, num_ranks, device, backend)
        slow = precision.warning(self.config.precision, device)
        gone = "a model's folder is gone: the run resumes from its own copy" if self.located != self.config else ""
        few = division.doubts(self.config, sizes, len(task.train))
        warnings = filter(None, [gone, *self.warnings, *task.notes, *few, slow])
        self.facts |= {"warning": text} if (text := "; ".join(warnings)) else {}

    def _sample(self, task: OpenedTask) -> bool:
        """Return False if files of a sample of the rows are damaged."""
        if not isinstance(task, SupportsSample):
            return True
        sampled = self.attempt(task.sample, self.limit_s)
        self.facts |= {"files": sampled} if sampled else {}
        return sampled is not None


@dataclass
class _Trial:
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

    def __post_init__(self) -> None:
        self.untried = [_NO_TRIAL]

    def run(self, facts: dict[str, Any]) -> None:
        """Take a step and evaluate, for at most ``limit_s`` seconds. Add to ``facts`` what was tried, and what CUDA
        cannot do deterministically; to ``untried`` what was not.

        Raises the errors of the data, TrainingError with the stage in which anything else failed, and ConfigError if
        the device refuses an operation.
        """
        start, done = time.monotonic(), []
        audit, left = Audit(start + self.limit_s), ["a training step", "an evaluation"]
        why = "no row could be read"
        try:
            for stage in (_train, _evaluate):
                with self._of_shapes():
                    found = stage(self, audit)
                if found:
                    done.append(found)
                    del left[0 if stage is _train else -1]
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
                    self.task.loss(_outputs(self, batch, "training", training=True), batch.targets).backward()
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
        config, share = self.config, 1 / (self.world_size if strategy_class(self.config.parallel).shards else 1)
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
        total, there = share * sum(parts.values()) + activations, self._device_memory()
        if total > there:
            has_blocks = bool(recompute.blocks(self.model))
            raise ConfigError(
                f"a rank needs about {memory.shown(total)}, of which {memory.shown(activations)} are activations of "
                f"{rows}, but has {memory.shown(there)} of memory on {self.device.type} here",
                where="batch",
                hint=memory.remedies(config, self.world_size, "training", has_blocks)
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
            inputs = _inputs(self, self.batch)
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


def _train(run: _Trial, audit: Audit) -> str:
    """Take a training step; return what was done, empty if no row could be read."""
    num_rows = max(2, min(_ROWS, run.sizes.micro_batch, len(run.task.train)))  # training repeats a single row, too
    batch = run.batch = _batch(run.task.train, num_rows, 0, "training")
    if batch is None:
        return ""
    rows = (run.sizes.micro_batch, min(run.sizes.eval_batch, len(run.task.eval)))
    every, per_epoch = run.config.train.evaluate_every, run.sizes.steps_per_epoch
    # An evaluation within an epoch keeps the batches that were loaded for the rest of the epoch.
    within = every.amount % (1 if every.unit == "epochs" else per_epoch) or run.sizes.total_steps % per_epoch
    batch_bytes = (sum(rows) if within else max(rows)) * (batch.inputs.nbytes + batch.targets.nbytes) / len(batch)
    num_ranks = -(-run.world_size // run.config.launch.nnodes)
    require_shared_memory(batch_bytes, run.config.data.num_workers, num_ranks)
    start = time.monotonic()
    kept = memory.KeptForBackward(num_rows, [*run.model.parameters(), *run.model.buffers()])
    with audit:
        with kept:
            outputs = _outputs(run, batch, "training", training=True)
            with _stage("loss() of the task", "training"):
                loss = run.task.loss(outputs, batch.targets)
            require_loss(run.task, loss)
        _require_finite(run, loss)
        run.kept = kept
        with _stage("the backward pass", "training"):
            loss.backward()
        if own := on_gradients.build(run.config, run.model, run.optimizer, torch.device("cpu")):
            with _stage(f"the function {run.config.train.on_gradients}", "training"):
                own([param for group in run.optimizer.param_groups for param in group["params"]], 0)
        with _stage(f"the optimizer {run.config.optimizer.name}", "training"):
            run.optimizer.step()
    run.step_s = time.monotonic() - start
    if doubt := doubt_of_mean(run.config.task, run.task, outputs, batch.targets):
        run.doubts["mean"] = doubt
    return f"{plural(len(batch), 'training row')} through prepare, model, loss {loss.item():.4g}, backward, optimizer"


def _evaluate(run: _Trial, audit: Audit) -> str:
    """Evaluate; return what was done, empty if no row could be read."""
    task, num_rows = run.task, min(_ROWS, run.sizes.eval_batch, len(run.task.eval))
    batch = _batch(task.eval, num_rows, None, "validation")
    if batch is None:
        return ""
    with audit, torch.no_grad():
        outputs = _outputs(run, batch, "validation", training=False)
        with _stage("evaluate() of the task", "validation"):
            sums = Sums()
            evaluate.add_pairs(sums, task, outputs, batch.targets)
        with _stage("report() of the task", "validation"):
            evaluate.numbers(task, sums, run.config.task.metrics)
        if doubt := doubt_of_sums(task, outputs, batch.targets):
            run.doubts["sums"] = doubt
        if isinstance(task, SupportsPredictions):
            with _stage("predictions() or known() of the task", "validation"):
                task.predictions(outputs)
                task.known(batch.rows)
    return f"{plural(len(batch), 'validation row')} through prepare, model and metrics"


def _batch(dataset: Dataset, num_rows: int, epoch: int | None, split: str) -> Batch | None:
    """Return ``num_rows`` rows, evenly spread over ``dataset``; None if all of them are unreadable."""
    rows = np.linspace(0, len(dataset) - 1, num_rows).round().astype(np.int64)
    with _stage("batch() of the dataset", split):
        batch = read(dataset, rows, epoch)
    return batch if len(batch) else None


def _inputs(run: _Trial, batch: Batch) -> Tensor:
    """Return the input of the model; instead of float64 in float32, as amp casts it at every level."""
    inputs = evaluate.prepare(run, batch.inputs)
    is_double = isinstance(inputs, Tensor) and inputs.dtype is torch.float64
    own_double = any(param.dtype is torch.float64 for param in run.model.parameters())
    return inputs.float() if is_double and not own_double else inputs


def _outputs(run: _Trial, batch: Batch, split: str, training: bool) -> Tensor:
    with _stage("prepare() of the task", split):
        inputs = _inputs(run, batch)
    with _stage(f"the model {run.config.model.name}", split):
        outputs: Tensor = run.model.train(training)(inputs)
    return outputs


def _require_finite(run: _Trial, loss: Tensor) -> None:
    if not torch.isfinite(loss):
        known = [f"task.{key}" for key in ("mean", "std") if hasattr(run.config.task, key)]
        raise TrainingError(
            f"loss() of the task returned {loss.item()} with the initial weights",
            where=place_of(type(run.task), "loss") or "task",
            hint=f"check {', '.join(['the inputs and labels of the first rows', *known])} and loss()",
        )


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
        raise _unexpected(error, f"{what} fails on the {split} data: ") from error


def _unexpected(error: BaseException, what: str) -> TrainingError:
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


def _same_bits(config: Config, model: nn.Module, world_size: int) -> str:
    """Return the numbers of processes on which the run has the same bits, and what that costs, or what to set for
    more."""
    if num := config.parallel.logical_ranks:
        size = sum(param.nbytes for param in model.parameters() if param.requires_grad)
        return logical_ranks.describe(num, min(world_size, num), size)
    num = max(world_size, 2)
    settings = [f"parallel.logical_ranks={num}", *(need for need, _ in constraints.needs_of_logical_ranks(config))]
    return f"on {plural(world_size, 'process')} only; on 1 to {num} with {' '.join(settings)}"


def _require_output(config: Config) -> None:
    """Raise HarnessError if ``output`` is a URL that does not answer. Write access is checked only at the start."""
    if is_url(config.output):
        remote.run_folder(config).store.files()
