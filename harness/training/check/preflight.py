"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from harness.config import constraints, loader
from harness.config.places import is_url
from harness.config.schema import Config
from harness.distributed import devices
from harness.distributed.runtime import Runtime
from harness.errors import DataError, DoubtError, HarnessError, OwnCodeError, plural
from harness.runs import borrowed, checkpoint, hub_copies, layout, remote
from harness.trackers import metrics_log
from harness.training import build, description, hooks
from harness.training.check.trial import NO_TRIAL, TrialStep, unexpected
from harness.training.model import lora, recompute, weights
from harness.training.optimizer import emulated_half, on_gradients, optimizer_builder, precision, trained_parameters
from harness.training.reproducibility import determinism, logical_ranks
from harness.training.rows import division, opening
from harness.training.strategies.base import strategy_class
from harness.training.task import OpenedTask, SupportsSample

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class RunPlan:
    """What a run would do, as far as the errors of its configuration let it be known."""

    facts: dict[str, Any]
    """What there is to know of the run, in words or numbers, by what ``harness check`` calls it."""
    errors: list[HarnessError]
    untried: list[str]
    """Parts of the run that nothing here has tried, each with the reason; empty if there is no plan."""


def examine(
    path: str,
    overrides: Sequence[str],
    world_size: int,
    limit_s: float = opening.FILES_S,
    written_at: Mapping[str, str] | None = None,
) -> RunPlan:
    """Return the plan of a configuration, with all errors: a stage is left out only if it needs the result of one that
    failed. ``limit_s``: for a look for the files that the rows name, for decoding a sample of them, and for a step and
    an evaluation on a few rows. ``written_at``: as for ``loader.load``."""
    try:
        config = loader.load(path, overrides, written_at)
    except HarnessError as error:
        return RunPlan({}, [error], [])
    return _Examination(config, world_size, limit_s).run()


class _Examination:
    """The stages of ``examine``. What a stage could not make, because of an error, is None."""

    def __init__(self, config: Config, world_size: int, limit_s: float) -> None:
        self.config = config
        self.world_size = world_size
        self.limit_s = limit_s
        self.plan = RunPlan({"run folder": f"{config.output.rstrip('/')}/{config.name}"}, [], [NO_TRIAL])
        self.warnings: list[str] = []
        self.located = config  # with the run's copies of folders of Hugging Face that are gone
        run = Path(config.output, config.name)
        if config.checkpoint.resume == "auto" and checkpoint.steps(run / layout.CHECKPOINTS):
            self.located = hub_copies.with_copies(config, run)
        self.device: torch.device | None = None
        self.amp: precision.Precision | None = None
        self.hooks: hooks.Hooks | None = None
        self.can_step = True
        self.task: OpenedTask | None = None
        self.sizes: division.Sizes | None = None

    def attempt(self, stage: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``stage``; None, with its error among those of the plan, if it raises one. A name that
        two stages look up is one error."""
        try:
            return stage(*args, **kwargs)
        except HarnessError as raised:
            error = loader.placed(raised, self.config)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # of the user's own task, model or optimizer, which may call sys.exit
            error = unexpected(raised, "")
        if str(error) not in map(str, self.plan.errors):
            self.plan.errors.append(error)
        return None

    def run(self) -> RunPlan:
        names_exist = self._examine_settings()
        self._examine_data(look_at_files=names_exist)
        if names_exist:
            self._examine_model_and_step()
        else:
            self._try_optimizer()
            self.plan = RunPlan({}, self.plan.errors, [])  # facts would hide the errors
        parallel = self.config.parallel
        self.attempt(lambda: strategy_class(parallel).check_world(parallel, self.world_size))
        return self.plan

    def _examine_settings(self) -> bool:
        """Examine what needs no data. Return False if there is no such optimizer or no such model."""
        config, attempt = self.config, self.attempt
        self.device = attempt(devices.choose, config.runtime.device, 0, 1)
        if self.device is not None:
            self.amp = attempt(precision.choose, config.precision, self.device, config.needs_our_amp)
        attempt(metrics_log.require, config.trackers)
        attempt(_require_output, config)
        if not checkpoint.steps(Path(config.output, config.name, layout.CHECKPOINTS)):  # else the run resumes its own
            attempt(borrowed.require_folder, config)
        if (name := config.train.on_gradients) is not None:
            self.can_step = attempt(on_gradients.find, name) is not None
        self.hooks = attempt(hooks.build, config.hooks)
        for hook in self.hooks.all if self.hooks else ():
            if not hook.has(hooks.BEFORE_TRAINING):  # which may make its state
                attempt(self._try_state, hook)
        num_errors = len(self.plan.errors)
        attempt(build.require_optimizer, config)
        attempt(build.require_model, config)
        return len(self.plan.errors) == num_errors

    def _examine_data(self, look_at_files: bool) -> None:
        limit_s = self.limit_s if look_at_files else None
        self.task = self.attempt(opening.open_task, self.located, Runtime(), limit_s)
        if self.task is None:
            self._add_errors_of_data()
            return
        num_ranks = self.config.parallel.num_ranks(self.world_size)
        self.sizes = self.attempt(division.sizes_of, self.config, len(self.task.train), num_ranks)

    def _examine_model_and_step(self) -> None:
        config, attempt, facts = self.config, self.attempt, self.plan.facts
        task, sizes, device = self.task, self.sizes, self.device
        if task is None:
            self._try_optimizer()
            return
        model = attempt(build.build_model, self.located, task)
        if model is not None:
            self._examine_model(model, task)
        optimizer = self._build_optimizer(model, sizes)
        if sizes is None or device is None or self.amp is None:
            return
        self._describe(task, sizes, device, self.amp.backend)
        if model is None:
            return
        facts["same bits"] = _same_bits(config, model, self.world_size)
        can_read = self._sample(task)
        if optimizer is None:
            return
        trial = TrialStep(config, task, model, optimizer, sizes, device, self.world_size, self.limit_s)
        if can_read and self.can_step:
            attempt(trial.run, facts)
        attempt(trial.require_memory, facts)
        self.plan.untried = trial.untried

    def _try_state(self, hook: hooks.Hook) -> None:
        """Call ``state_dict()`` of ``hook``. That it fails is a warning: what it lacks may be made in training."""
        try:
            hooks.Hooks([hook]).state_dict()
        except OwnCodeError as error:
            if error.__cause__ is None:  # of what it returned
                raise
            self.warnings.append(f"{error.where}: before training, {error.message}")

    def _add_errors_of_data(self) -> None:
        """Add all errors of the data: opening it has stopped at the first."""
        section, plan = self.config.task, self.plan
        problems = self.attempt(lambda: [*section.problems()]) or []
        if not problems and isinstance(plan.errors[-1], DataError):
            problems = self.attempt(lambda: [*section.row_problems()]) or []
        errors = {str(error): loader.placed(error, self.config) for error in problems}  # both may be one table
        doubts = [text for text, error in errors.items() if isinstance(error, DoubtError)]
        if doubts:
            plan.facts["warning"] = "; ".join(" ".join(text.split()).replace(" -> ", ": ") for text in doubts)
        told = {error.where: error for error in plan.errors}
        for error in (errors[text] for text in errors if text not in doubts):
            if other := told.pop(error.where, None):  # it tells less, but may have a better hint
                error.hint = other.hint
                plan.errors.remove(other)
            plan.errors.append(error)

    def _examine_model(self, model: nn.Module, task: OpenedTask) -> None:
        config, facts, attempt = self.config, self.plan.facts, self.attempt
        attempt(build.require_mixable, config, task)
        if self.device is not None:
            attempt(determinism.require_restorable, model, self.device, config.train.deterministic)
        facts["model"] = description.describe_model(model)
        if config.model.lora is not None:
            facts["lora"] = lora.summary(model, config.model.lora)
        starts = self.located.model.name == config.model.name and config.model.start_weights is not None
        if starts and (loaded := attempt(weights.load, model, config, task)):
            facts["weights"] = loaded["summary"]
            self.warnings += filter(None, [loaded["warning"]])
        if again := attempt(recompute.apply, model, config.model.activation_checkpointing):
            shown = ", ".join(again if len(again) <= 4 else [*again[:3], "...", again[-1]])
            facts["recomputed"] = f"{plural(len(again), 'module')} in the backward pass: {shown}"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "the rows of each rank"
            facts["batch norm"] = f"over {rows}"

    def _build_optimizer(self, model: nn.Module | None, sizes: division.Sizes | None) -> torch.optim.Optimizer | None:
        section, attempt = self.config.optimizer, self.attempt
        groups = attempt(trained_parameters.groups, section, model, sizes.lr) if model and sizes else None
        if model is None or sizes is None or not groups:
            self._try_optimizer()
            return None
        optimizer = attempt(optimizer_builder.build, section, groups, sizes.lr)
        self.plan.facts |= trained_parameters.describe(optimizer, model) if optimizer else {}
        return optimizer

    def _try_optimizer(self) -> None:
        """Look for errors in the settings of the optimizer where there is no model, or nothing to train."""
        section = self.config.optimizer
        self.attempt(optimizer_builder.build, section, [nn.Parameter(torch.zeros(1, 1))], section.lr)

    def _describe(self, task: OpenedTask, sizes: division.Sizes, device: torch.device, backend: str) -> None:
        config, facts = self.config, self.plan.facts
        num_ranks = config.parallel.num_ranks(self.world_size)
        facts |= description.describe(config, task, sizes, num_ranks, device, backend)
        slow = emulated_half.warning(config.precision, device)
        gone = "a model's folder is gone: the run resumes from its own copy" if self.located != config else ""
        few = division.doubts(config, sizes, len(task.train))
        warnings = filter(None, [gone, *self.warnings, *task.notes, *few, slow])
        facts |= {"warning": text} if (text := "; ".join(warnings)) else {}
        facts |= self.hooks.describe() if self.hooks else {}

    def _sample(self, task: OpenedTask) -> bool:
        """Return False if files of a sample of the rows are damaged."""
        if not isinstance(task, SupportsSample):
            return True
        sampled = self.attempt(task.sample, self.limit_s)
        self.plan.facts |= {"files": sampled} if sampled else {}
        return sampled is not None


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
