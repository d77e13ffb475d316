"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from harness.config import constraints, loader
from harness.config.schema import Config
from harness.data.batch import Batch, Dataset
from harness.data.loader_workers import require_shared_memory
from harness.distributed import devices, stack
from harness.distributed.runtime import Runtime
from harness.errors import HarnessError, TrainingError, first_line, plural, readable
from harness.runs import remote
from harness.runs.files import is_url
from harness.trackers import metrics_log
from harness.training import build, description, determinism, division, hooks, logical_ranks, memory
from harness.training.determinism import Audit, OutOfTime
from harness.training.evaluation import evaluate
from harness.training.evaluation.metrics import Sums
from harness.training.models import recompute, weights
from harness.training.optimizer import on_gradients, optim, precision
from harness.training.strategies.base import find
from harness.training.task import OpenedTask, SupportsPredictions, SupportsSample

P = ParamSpec("P")
T = TypeVar("T")

_ROWS = 4  # of each split that take a step, or are evaluated


def examine(
    path: str, overrides: Sequence[str], world_size: int, limit_s: float = build.FILES_S
) -> tuple[dict[str, Any], list[HarnessError]]:
    """Return (facts, errors). A stage is left out only if it needs the result of one that failed. ``limit_s``: for a
    look for the files that the rows name, for decoding a sample of them, and for a step and an evaluation on a few
    rows."""
    try:
        config = loader.load(path, overrides)
    except HarnessError as error:
        return {}, [error]
    examination = _Examination(config, world_size, limit_s)
    examination.run()
    return examination.facts, examination.errors


@dataclass(frozen=True)
class Candidate:
    """The parts of a run. ``model`` is trained for a step and must not be used afterwards."""

    config: Config
    task: OpenedTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    size: division.Sizes
    device: torch.device  # that the run will train on


class _Examination:
    """The stages of ``examine``, and the facts and errors that they have found so far."""

    def __init__(self, config: Config, world_size: int, limit_s: float) -> None:
        self.config, self.world_size, self.limit_s = config, world_size, limit_s
        self.facts: dict[str, Any] = {"run folder": f"{config.output.rstrip('/')}/{config.name}"}
        self.errors: list[HarnessError] = []

    def attempt(self, stage: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``stage``; None, with its error among ``errors``, if it raises one."""
        try:
            return stage(*args, **kwargs)
        except HarnessError as error:
            self.errors.append(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's own task, model or optimizer, which may call sys.exit
            hint = "harness train prints the traceback"
            what = f"{type(error).__name__}: {first_line(readable(error))}"
            self.errors.append(TrainingError(what, where=stack.raised_at(error), hint=hint))
        return None

    def run(self) -> None:
        config, attempt = self.config, self.attempt
        device = attempt(devices.choose, config.runtime.device, 0, 1)
        amp = attempt(precision.choose, config.precision, device, config.needs_our_amp) if device else None
        task = self._open_task()
        size = (
            attempt(division.sizes, config, len(task.train), config.parallel.num_ranks(self.world_size))
            if task
            else None
        )
        model = attempt(build.build_model, config, task) if task else None
        attempt(metrics_log.require, config.trackers)
        attempt(_require_output, config)
        if config.train.on_gradients:
            attempt(on_gradients.find, config.train.on_gradients)
        own_hooks = attempt(hooks.build, config.hooks)
        if model is not None and task is not None:
            self._examine_model(model, task, device)
        optimizer = self._build_optimizer(model, size)
        if size is not None and amp is not None and task is not None and device is not None:
            self._plan(task, size, device, amp.backend)
            self.facts |= own_hooks.described() if own_hooks else {}
            if model is not None:
                self.facts["same bits"] = _same_bits(config, model, self.world_size)
                readable_rows = self._sample(task)
                if optimizer is not None and readable_rows:
                    candidate = Candidate(config, task, model, optimizer, size, device)
                    attempt(_try, candidate, self.world_size, self.limit_s, self.facts)
        attempt(lambda: find(config.parallel).check_world(config.parallel, self.world_size))

    def _open_task(self) -> OpenedTask | None:
        task = self.attempt(build.open_task, self.config, Runtime(), self.limit_s)
        if task is None:  # it stops at the first error of the data
            known = set(map(str, self.errors))
            found = self.attempt(lambda: [*self.config.task.problems()]) or []
            self.errors += [error for error in found if str(error) not in known]
        return task

    def _examine_model(self, model: nn.Module, task: OpenedTask, device: torch.device | None) -> None:
        config, facts, attempt = self.config, self.facts, self.attempt
        attempt(build.require_mixable, config, task)
        if device is not None:
            attempt(determinism.require_restorable, model, device, config.train.deterministic)
        facts["model"] = f"{config.model.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
        if config.model.weights is not None and (loaded := attempt(weights.load, model, config)):
            facts["weights"] = "; ".join(filter(None, [loaded["summary"], loaded["warning"]]))
        if again := attempt(recompute.apply, model, config.model.activation_checkpointing):
            shown = ", ".join(again if len(again) <= 4 else [*again[:3], "...", again[-1]])
            facts["recomputed"] = f"{plural(len(again), 'module')} in the backward pass: {shown}"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "the rows of each rank"
            facts["batch norm"] = f"over {rows}"

    def _build_optimizer(self, model: nn.Module | None, size: division.Sizes | None) -> torch.optim.Optimizer | None:
        """Return the optimizer of ``model``; without one, look only at its settings."""
        section = self.config.optimizer
        if model is None or size is None:
            self.attempt(optim.build, section, [nn.Parameter(torch.zeros(1))], section.lr)
            return None
        groups = self.attempt(optim.groups, section, model, size.lr)
        optimizer = self.attempt(optim.build, section, groups, size.lr) if groups else None
        self.facts |= optim.described(optimizer, model) if optimizer else {}
        return optimizer

    def _plan(self, task: OpenedTask, size: division.Sizes, device: torch.device, backend: str) -> None:
        num_ranks = self.config.parallel.num_ranks(self.world_size)
        self.facts |= description.describe(self.config, task, size, num_ranks, device, backend)
        self.facts["preset"] = f"{self.facts['preset']}; choose another with extends: preset:NAME"
        if warning := division.too_few_rows(size, len(task.train)):
            self.facts["warning"] = warning

    def _sample(self, task: OpenedTask) -> bool:
        """False if files of a sample of the rows are damaged."""
        if not isinstance(task, SupportsSample):
            return True
        sampled = self.attempt(task.sample, self.limit_s)
        self.facts |= {"files": sampled} if sampled else {}
        return sampled is not None


def _try(run: Candidate, world_size: int, limit_s: float, facts: dict[str, Any]) -> None:
    """Take a few rows through a training step on the CPU, and others through an evaluation, for at most ``limit_s``
    seconds. Add to ``facts`` what was tried, what CUDA cannot do deterministically, and the memory of a rank.

    Raises the errors of the data, TrainingError with the stage in which anything else failed, and ConfigError if the
    device refuses an operation.
    """
    start, done = time.monotonic(), []
    audit = Audit(start + limit_s)
    try:
        done.append(_train(run, audit, world_size))
        facts["memory"] = _memory(run, world_size)
        done.append(_evaluate(run, audit))
    except OutOfTime:
        done.append(f"stopped after {limit_s:.0f} s")
    facts["one batch"] = f"{', '.join(done)}; on the CPU in float32, in {time.monotonic() - start:.1f} s"
    level = run.config.train.deterministic
    facts["deterministic"] = determinism.described(level, audit.found | determinism.unrestorable(run.model))
    if audit.found and level is True and run.device.type == "cuda":
        raise determinism.refused(audit.found)


def _train(run: Candidate, audit: Audit, world_size: int) -> str:
    num_rows = max(2, min(_ROWS, run.size.micro_batch, len(run.task.train)))  # training repeats a single row, too
    batch = _batch(run.task.train, num_rows, 0, "training")
    if batch is None:
        return "no training row could be read"
    rows = max(run.size.micro_batch, min(run.size.eval_batch, len(run.task.eval)))
    batch_bytes = rows * (batch.inputs.nbytes + batch.targets.nbytes) / len(batch)
    num_ranks = -(-world_size // run.config.launch.nnodes)
    require_shared_memory(batch_bytes, run.config.data.num_workers, num_ranks)
    with audit:
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
    return f"{plural(len(batch), 'training row')} through prepare, model, loss {loss.item():.4g}, backward, optimizer"


def _evaluate(run: Candidate, audit: Audit) -> str:
    task, num_rows = run.task, min(_ROWS, run.size.eval_batch, len(run.task.eval))
    batch = _batch(task.eval, num_rows, None, "validation")
    if batch is None:
        return "no validation row could be read"
    with audit, torch.no_grad():
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
    return f"{plural(len(batch), 'validation row')} through prepare, model and metrics"


def _batch(dataset: Dataset, num_rows: int, epoch: int | None, split: str) -> Batch | None:
    """``num_rows`` rows, evenly spread over ``dataset``; None if all of them are unreadable."""
    rows = np.linspace(0, len(dataset) - 1, num_rows).round().astype(np.int64)
    with _stage("batch() of the dataset", split):
        batch = dataset.batch(rows, epoch)
    return batch if len(batch) else None


def _outputs(run: Candidate, batch: Batch, split: str, training: bool) -> Tensor:
    with _stage("prepare() of the task", split):
        inputs = evaluate.prepare(run, batch.inputs)
    with _stage(f"the model {run.config.model.name}", split):
        outputs: Tensor = run.model.train(training)(inputs)
    return outputs


def _require_loss(loss: object) -> None:
    hint = "check the inputs and labels of the first rows, task.mean and task.std, and loss()"
    if not isinstance(loss, Tensor):
        found = f"a value of type {type(loss).__name__} instead of one number"
    elif loss.numel() != 1:
        found = f"a value of shape {tuple(loss.shape)} instead of one number"
    elif not torch.isfinite(loss):
        found = f"{loss.item()} with the initial weights"
    else:
        return
    raise TrainingError(f"loss() of the task returned {found}", where="task", hint=hint)


@contextmanager
def _stage(what: str, split: str) -> Iterator[None]:
    """Add ``what`` failed, and on which data, to an error that lacks them."""
    try:
        yield
    except (HarnessError, OutOfTime):
        raise
    except Exception as error:
        raise TrainingError(
            f"{what} fails on the {split} data: {type(error).__name__}: {first_line(error)}",
            where=stack.raised_at(error),
            hint='"out of bounds" usually means that the model has no output for a label; harness train prints the '
            "traceback" if isinstance(error, IndexError) else "harness train prints the traceback",
        ) from error  # fmt: skip


def _memory(run: Candidate, world_size: int) -> str:
    """Return what a rank of the run holds between two steps, in words; ``run`` has taken one."""
    trained = [param for group in run.optimizer.param_groups for param in group["params"]]
    level, average = run.config.precision.opt_level, trained if run.config.train.ema_decay else ()
    parts: dict[str, float] = {**memory.held(run.model.parameters(), run.optimizer, average)}
    if level in ("O2", "O5"):
        copied = memory.num_bytes([*run.model.parameters(), *trained])
        parts["half-precision copies of weights and gradients"] = copied / 2
    share = (0.5 if level == "O3" else 1.0) / (world_size if find(run.config.parallel).shards else 1)
    shown = ", ".join(f"{name} {memory.shown(share * size)}" for name, size in parts.items() if size)
    return f"{shown} per rank; activations and temporary tensors come on top"


def _same_bits(config: Config, model: nn.Module, world_size: int) -> str:
    """The numbers of processes on which the run has the same bits, and what that costs, or what to set for more."""
    if num := config.parallel.logical_ranks:
        size = sum(param.nbytes for param in model.parameters() if param.requires_grad)
        return logical_ranks.described(num, min(world_size, num), size)
    num = max(world_size, 2)
    settings = [f"parallel.logical_ranks={num}", *(need for need, _ in constraints.needs_of_logical_ranks(config))]
    return f"on {plural(world_size, 'process')} only; on 1 to {num} with {' '.join(settings)}"


def _require_output(config: Config) -> None:
    """Raise HarnessError if ``output`` is a URL that does not answer. Write access is checked only at the start."""
    if is_url(config.output):
        remote.run_folder(config).store.files()
