"""The state of a sweep in Optuna's storage: its trials, their results, and which trial is next.

A trial that was started but did not end keeps that state in the storage after any kill. The next start of the
sweep begins with such trials and their settings. All writes are Optuna's transactions. main.py ensures that only one
process uses the study.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.trial import TrialState

from harness.config import loader
from harness.config.merge import typed
from harness.config.recipe import in_recipe
from harness.config.trees import differences, flatten
from harness.errors import ConfigError, HarnessError, first_line, plural, reason, remedy
from harness.runs import sweep_folder
from harness.tools.sweep.plan import Plan
from harness.tools.sweep.spec import Range, Settings, SweepSpec, identity

State = sweep_folder.TrialState
Part = TypeVar("Part")  # a sampler or a pruner
_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "waiting",  # started by an earlier process; those of this one are in Study._live
    TrialState.WAITING: "waiting",
}
# A resumed run may change these, but trials of one sweep must agree on them.
_COUNTS = ("train.epochs", "train.max_steps", "train.evaluate_every", "train.patience", "launch.nproc", "launch.nnodes")
_SAMPLERS: dict[str, type[optuna.samplers.BaseSampler]] = {
    "grid": optuna.samplers.RandomSampler,  # unused: the trials of a grid have their values
    "random": optuna.samplers.RandomSampler,
    "tpe": optuna.samplers.TPESampler,
}
_PRUNERS: dict[str, type[optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
_STORAGE_ERRORS = (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError)


@dataclass(frozen=True)
class SweepTrial:
    """A trial as stored. ``number`` is that of its run folder; ``value`` is its best value of the sweep's metric."""

    number: int
    settings: Settings
    state: State
    value: float | None = None
    error: str | None = None


class Study:
    """The trials of ``plan``. ``start_next`` hands out a trial; ``finish``, ``prune`` or ``fail`` ends it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Open or create the storage. Raises ConfigError if it cannot be opened or holds another experiment."""
        self._plan, self._spec = plan, plan.file.spec
        self._seed = plan.trials[0].config.seed
        self._live: dict[int, optuna.Trial] = {}
        pruner = _pruner(self._spec, plan.trials[0].config.train.epochs)
        _sampler(self._spec, self._seed, 0)  # reports wrong arguments before any trial starts
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = _open(folder / "study.db", self._spec.name, plan.direction, pruner)
        self._claim()
        self.resumed = any(frozen.state != TrialState.WAITING for frozen in self._frozen())
        """Whether an earlier process has started trials of this study."""
        if not self._spec.is_search:
            known = {identity(trial.settings) for trial in self.trials()}
            for planned in plan.trials:
                if identity(planned.settings) not in known:
                    self._enqueue({"settings": planned.settings})

    def _frozen(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _claim(self) -> None:
        """Store which experiment the study belongs to; refuse to mix two. A grid may grow, and a search may have more
        trials."""
        space = self._spec.model_dump(mode="json")["space"] if self._spec.is_search else sorted(self._spec.axes)
        kind = "search" if self._spec.is_search else "grid"
        now = {"kind": kind, "space": space, "metric": self._plan.metric, **_recipe(self._plan)}
        before = self._study.user_attrs.get("experiment")
        if before is None:
            self._study.set_user_attr("experiment", now)
            before = now
        if changed := differences(before, now):
            shown = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in list(changed.items())[:4])
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise self._other(f"were trained with different settings ({shown}{more})")
        wanted = {identity(trial.settings) for trial in self._plan.trials}
        others = [trial for trial in self.trials() if identity(trial.settings) not in wanted]
        if others and not self._spec.is_search:
            some = " ".join(typed(others[0].settings))
            raise self._other(f"include {plural(len(others), 'trial')} that the space no longer has, such as {some}")

    def _other(self, what: str) -> ConfigError:
        hint = "restore these settings, or give the new sweep another name: name=NAME"
        return ConfigError(f"the sweep's earlier trials {what}", where=str(self._spec.folder), hint=hint)

    def trials(self) -> list[SweepTrial]:
        """Return the trials by number; of retried ones, the newest attempt."""
        found = {}
        for frozen in self._frozen():
            if (settings := frozen.user_attrs.get("settings")) is not None:
                found[_number(frozen)] = self._trial(frozen, settings)
        return [found[number] for number in sorted(found)]

    def _trial(self, frozen: optuna.trial.FrozenTrial, settings: Settings) -> SweepTrial:
        number = _number(frozen)
        state: State = "running" if number in self._live else _STATES[frozen.state]
        value = frozen.value if state == "finished" else frozen.user_attrs.get("value")
        return SweepTrial(number, settings, state, value, frozen.user_attrs.get("error"))

    # The life of a trial

    def start_next(self) -> SweepTrial | None:
        """Return the next trial: one that was started before, else one that waits, else, in a search, a new draw."""
        frozen = self._frozen()
        for each in frozen:
            if each.state == TrialState.RUNNING and _number(each) not in self._live:
                self._reseed(each.number)
                return self._take(optuna.Trial(self._study, each._trial_id))  # Optuna has no public way to reopen one
        if any(each.state == TrialState.WAITING for each in frozen):
            return self._take(self._study.ask())  # takes the oldest waiting trial
        if not self._spec.is_search or len(self.trials()) >= (self._spec.trials or 0):
            return None
        self._reseed(len(frozen))
        return self._take(self._study.ask())

    def _reseed(self, number: int) -> None:
        self._study.sampler = _sampler(self._spec, self._seed, number)

    def _take(self, trial: optuna.Trial) -> SweepTrial:
        if "settings" not in trial.user_attrs:
            drawn = {key: _suggest(trial, key, axis) for key, axis in self._spec.space.items()}
            trial.set_user_attr("settings", drawn)
        number = int(trial.user_attrs.get("run", trial.number))
        self._live[number] = trial
        return SweepTrial(number, trial.user_attrs["settings"], "running")

    def reported(self, number: int) -> dict[int, float]:
        """Return the reported evaluations of a running trial by epoch."""
        return self._frozen()[self._live[number].number].intermediate_values

    def report(self, number: int, epoch: int, value: float) -> None:
        self._live[number].report(value, epoch)

    def should_prune(self, number: int) -> bool:
        """Return the pruner's decision on the evaluations reported so far."""
        return self._spec.pruner != "none" and self._live[number].should_prune()

    def finish(self, number: int, value: float) -> None:
        self._study.tell(self._live.pop(number), value)

    def prune(self, number: int) -> None:
        """End the trial as pruned; its value is the best reported one."""
        values = self.reported(number).values()
        trial = self._live.pop(number)
        trial.set_user_attr("value", max(values) if self._plan.direction == "maximize" else min(values))
        self._study.tell(trial, state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        trial = self._live.pop(number)
        trial.set_user_attr("error", error)
        self._study.tell(trial, state=TrialState.FAIL)

    def retry_failed(self) -> int:
        """Enqueue the failed trials again, each with its own run folder; return their number."""
        failed = [trial for trial in self.trials() if trial.state == "failed"]
        frozen = {_number(each): each for each in self._frozen()}
        for trial in failed:
            old = frozen[trial.number]
            self._enqueue({"settings": trial.settings, "run": trial.number}, old.params, old.distributions)
        return len(failed)

    def _enqueue(self, attributes: dict[str, Any], params: Any = None, distributions: Any = None) -> None:
        self._study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING, user_attrs=attributes, params=params, distributions=distributions
            )
        )


@contextmanager
def storage_must_work(folder: Path) -> Iterator[None]:
    """Turn errors of the storage and of the system in the body into a HarnessError with a hint."""
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"the sweep cannot go on: {reason(error)}",
            where=str(error.filename or folder),
            hint=f"{remedy(error) or 'fix the cause'}, and run the same command again to resume",
        ) from None
    except _STORAGE_ERRORS as error:
        raise HarnessError(
            f"the state of the sweep cannot be stored: {first_line(error)}",
            where=str(folder),
            hint="fix the cause (such as a full disk) and run the same command again to resume",
        ) from None


def _number(frozen: optuna.trial.FrozenTrial) -> int:
    """Return the number of the trial's run folder; a retried trial keeps that of its first attempt."""
    return int(frozen.user_attrs.get("run", frozen.number))


def _open(path: Path, name: str, direction: str, pruner: optuna.pruners.BasePruner) -> optuna.Study:
    """Open or create the study ``name`` in the database ``path``. Raises ConfigError."""
    try:
        return optuna.create_study(
            study_name=name, storage=f"sqlite:///{path.resolve()}", direction=direction, load_if_exists=True,
            pruner=pruner,
        )  # fmt: skip
    except _STORAGE_ERRORS as error:
        raise ConfigError(
            f"cannot open Optuna's storage: {first_line(error)}",
            where=str(path),
            hint="if the file is damaged, move it elsewhere; the sweep then reads the results of finished trials "
            "from their run folders",
        ) from None


def _recipe(plan: Plan) -> dict[str, Any]:
    """Return the settings that all trials share and that determine their results."""
    flat = flatten(loader.as_tree(plan.trials[0].config))
    kept = [key for key in flat if key in _COUNTS or in_recipe(key, flat["task.name"])]
    return {key: flat[key] for key in kept if not _is_below(key, plan.file.spec.axes)}


def _is_below(key: str, settings: Iterable[str]) -> bool:
    """Return True if ``key`` is one of ``settings`` or a part of one."""
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


# Samplers and pruners
#
# Every trial gets its own sampler, seeded by the trial's number. Its draw depends on the sweep and the finished trials,
# but not on how often the sweep was stopped and started.


def _sampler(spec: SweepSpec, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler for trial ``number``."""
    own = (seed * 1_000_003 + number) % 2**32
    return _make(_SAMPLERS[spec.sampler], {"seed": own, **spec.sampler_args}, "sampler_args")


def _pruner(spec: SweepSpec, epochs: int | None) -> optuna.pruners.BasePruner:
    """Return the pruner for trials of ``epochs`` epochs."""
    known = {"max_resource": epochs} if spec.pruner == "hyperband" and epochs else {}
    return _make(_PRUNERS[spec.pruner], {**known, **spec.pruner_args}, "pruner_args")


def _make(cls: type[Part], arguments: dict[str, Any], key: str) -> Part:
    """Return ``cls(**arguments)``. Raises ConfigError for arguments, of the setting ``key``, that it rejects."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return cls(**arguments)
    except (TypeError, ValueError) as error:
        hint = f"it accepts: {', '.join(inspect.signature(cls).parameters)}"
        raise ConfigError(f"Optuna's {cls.__name__} rejects its arguments: {error}", where=key, hint=hint) from None


def _suggest(trial: optuna.Trial, key: str, axis: Range | list[Any]) -> Any:
    """Return the value of ``key`` in ``trial``: drawn now, or read if it was drawn before."""
    if not isinstance(axis, Range):
        return trial.suggest_categorical(key, axis)
    if all(isinstance(end, int) for end in (axis.low, axis.high, axis.step or 1)):
        return trial.suggest_int(key, int(axis.low), int(axis.high), step=int(axis.step or 1), log=axis.log)
    return trial.suggest_float(key, axis.low, axis.high, step=axis.step, log=axis.log)
