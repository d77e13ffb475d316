"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from harness.config import constraints, loader
from harness.config.places import is_url
from harness.config.schema import Config
from harness.distributed import devices
from harness.distributed.runtime import Runtime
from harness.errors import (
    DataError,
    DoubtError,
    HarnessError,
    OwnCodeError,
    plural,
)
from harness.runs import checkpoint, hub_copies, layout, remote
from harness.trackers import metrics_log
from harness.training import build, description, hooks
from harness.training.check.trial import NO_TRIAL, TrialStep, unexpected
from harness.training.model import lora, recompute, weights
from harness.training.optimizer import on_gradients, optim, precision, trained_parameters
from harness.training.reproducibility import determinism, logical_ranks
from harness.training.rows import division, opening
from harness.training.strategies.base import strategy_class
from harness.training.task import (
    OpenedTask,
    SupportsSample,
)

P = ParamSpec("P")
T = TypeVar("T")


def examine(
    path: str,
    overrides: Sequence[str],
    world_size: int,
    limit_s: float = opening.FILES_S,
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
            self.errors.append(unexpected(error, ""))
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
        attempt(build.require_optimizer, config)
        attempt(build.require_model, config)
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
        untried = [NO_TRIAL]
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
                    trial = TrialStep(config, task, model, optimizer, sizes, device, self.world_size, self.limit_s)
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
        task = self.attempt(opening.open_task, self.located, Runtime(), self.limit_s if look_at_files else None)
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
