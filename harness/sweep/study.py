"""The state of a sweep in Optuna's storage: which trials there are, what they came to, and which comes next.

A trial that was begun and is not over stays so in the storage, whoever was killed: the next start begins with those,
with the values they had. All writes are Optuna's own transactions. One process at a time uses a sweep's study
(``harness.sweep.main`` sees to it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import sqlalchemy
from optuna.trial import TrialState

from harness.config import loader
from harness.config.schema import NOT_THE_RECIPE, flatten
from harness.errors import ConfigError, HarnessError, first_line
from harness.sweep import samplers
from harness.sweep.plan import Plan
from harness.sweep.space import Settings, identity
from harness.sweep.spec import axes

State = Literal["waiting", "running", "finished", "pruned", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "waiting",  # it was begun; whoever runs it now knows better
    TrialState.WAITING: "waiting",
}
# A run may go on with other values of these; trials that are to be compared have the same.
_COUNTS = ("train.epochs", "train.max_steps", "train.evaluate_every", "train.patience", "launch.nproc", "launch.nnodes")


@dataclass(frozen=True)
class Trial:
    """A trial as the storage has it. ``number`` is that of its run folder; ``value`` is of the sweep's metric."""

    number: int
    settings: Settings
    state: State
    value: float | None = None
    error: str | None = None


class Study:
    """The trials of ``plan``. Only ``begin`` gives trials out; ``finish``, ``prune`` or ``fail`` takes each back.
    ``begun``: whether an earlier start has given one out."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Open the storage, or make it. Raises ConfigError where it cannot be, or holds another experiment's trials."""
        self._plan, self._sweep = plan, plan.file.sweep
        self._seed = plan.trials[0].config.seed
        self._live: dict[int, optuna.Trial] = {}
        pruner = samplers.pruner(self._sweep, plan.trials[0].config.train.epochs)
        samplers.sampler(self._sweep, self._seed, 0)  # what is wrong with it is said now
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = self._sweep.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
        self._study = _open(url, self._sweep.name, plan.direction, pruner)
        self._claim()
        self.begun = any(frozen.state != TrialState.WAITING for frozen in self._study.get_trials(deepcopy=False))
        self._wanted = {identity(trial.settings) for trial in plan.trials}
        if not self._sweep.is_search:
            known = {identity(trial.settings) for trial in self.trials()}
            for planned in plan.trials:
                if identity(planned.settings) not in known:
                    self._add({"settings": planned.settings})

    def _claim(self) -> None:
        """Make the study this experiment's, or refuse to mix two."""
        now = {
            "kind": "search" if self._sweep.is_search else "grid",
            "metric": self._plan.metric,
            **_recipe(self._plan),
        }
        before = self._study.user_attrs.get("experiment")
        varied = sorted({*axes(self._sweep), *self._study.user_attrs.get("axes", ())})
        if before is None:
            self._study.set_user_attr("experiment", now)
            before = now
        changed = {key for key in now.keys() | before.keys() if now.get(key) != before.get(key)}
        if changed := {key for key in changed if not _is_below(key, varied)}:
            shown = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in sorted(changed)[:4])
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise ConfigError(
                f"the trials that are there were trained otherwise ({shown}{more})",
                where=str(self._sweep.folder),
                hint="put that back, or name the sweep anew: name=NAME",
            )
        self._study.set_user_attr("axes", varied)

    # What there is

    def trials(self) -> list[Trial]:
        """The trials of the space as it is now, by number; of one that was tried again, the newest."""
        found = {}
        for frozen in self._study.get_trials(deepcopy=False):
            settings = frozen.user_attrs.get("settings")
            if settings is not None and self._belongs(settings) and not frozen.user_attrs.get("dropped"):
                found[_run(frozen)] = self._trial(frozen, settings)
        return [found[number] for number in sorted(found)]

    def others(self) -> int:
        """How many trials are there that are not of the space as it is now."""
        return sum(
            settings is not None and not self._belongs(settings)
            for settings in (frozen.user_attrs.get("settings") for frozen in self._study.get_trials(deepcopy=False))
        )

    def _trial(self, frozen: optuna.trial.FrozenTrial, settings: Settings) -> Trial:
        number = _run(frozen)
        state: State = "running" if number in self._live else _STATES[frozen.state]
        value = frozen.value if state == "finished" else frozen.user_attrs.get("value")
        return Trial(number, settings, state, value, frozen.user_attrs.get("error"))

    def _belongs(self, settings: Settings) -> bool:
        if not self._sweep.is_search:
            return identity(settings) in self._wanted
        space: Mapping[str, Any] = self._sweep.space  # type: ignore[assignment]
        return settings.keys() == space.keys() and all(samplers.within(settings[key], space[key]) for key in space)

    # From one trial to the next

    def begin(self) -> Trial | None:
        """The next trial: one that was begun before, else one that waits, else, in a search, a new draw."""
        frozen = self._study.get_trials(deepcopy=False)
        for each in frozen:
            if each.state == TrialState.RUNNING and _run(each) not in self._live and not self._foreign(each):
                self._reseed(each.number)
                return self._take(optuna.Trial(self._study, each._trial_id))
        while any(each.state == TrialState.WAITING for each in self._study.get_trials(deepcopy=False)):
            trial = self._study.ask()  # takes the oldest that waits
            if self._belongs(trial.user_attrs["settings"]):
                return self._take(trial)
            trial.set_user_attr("dropped", True)
            self._study.tell(trial, state=TrialState.FAIL)
        if not self._sweep.is_search or len(self.trials()) >= (self._sweep.trials or 0):
            return None
        self._reseed(len(frozen))
        return self._take(self._study.ask())

    def _foreign(self, frozen: optuna.trial.FrozenTrial) -> bool:
        settings = frozen.user_attrs.get("settings")
        return settings is not None and not self._belongs(settings)

    def _reseed(self, number: int) -> None:
        self._study.sampler = samplers.sampler(self._sweep, self._seed, number)

    def _take(self, trial: optuna.Trial) -> Trial:
        if "settings" not in trial.user_attrs:
            space: Mapping[str, Any] = self._sweep.space  # type: ignore[assignment]
            trial.set_user_attr("settings", {key: samplers.suggest(trial, key, space[key]) for key in space})
        number = int(trial.user_attrs.get("run", trial.number))
        self._live[number] = trial
        return Trial(number, trial.user_attrs["settings"], "running")

    def reported(self, number: int) -> dict[int, float]:
        """The evaluations that are known of a running trial, by epoch."""
        return self._study.get_trials(deepcopy=False)[self._live[number].number].intermediate_values

    def report(self, number: int, epoch: int, value: float) -> None:
        self._live[number].report(value, epoch)

    def hopeless(self, number: int) -> bool:
        """Whether the pruner gives the trial up for its evaluations so far."""
        return self._sweep.pruner != "none" and self._live[number].should_prune()

    def finish(self, number: int, value: float) -> None:
        self._study.tell(self._live.pop(number), value)

    def prune(self, number: int) -> None:
        """Its value is the best of what was reported."""
        values = self.reported(number).values()
        trial = self._live.pop(number)
        trial.set_user_attr("value", max(values) if self._plan.direction == "maximize" else min(values))
        self._study.tell(trial, state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        trial = self._live.pop(number)
        trial.set_user_attr("error", error)
        self._study.tell(trial, state=TrialState.FAIL)

    def retry_failed(self) -> int:
        """Let the failed trials wait again, each in its own run folder; how many there were."""
        failed = [trial for trial in self.trials() if trial.state == "failed"]
        frozen = {_run(each): each for each in self._study.get_trials(deepcopy=False)}
        for trial in failed:
            old = frozen[trial.number]
            self._add({"settings": trial.settings, "run": trial.number}, old.params, old.distributions)
        return len(failed)

    def _add(self, attributes: dict[str, Any], params: Any = None, distributions: Any = None) -> None:
        self._study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING, user_attrs=attributes, params=params, distributions=distributions
            )
        )


@contextmanager
def storage_must_work(folder: Path) -> Iterator[None]:
    """Tell what it means when the storage fails in the body."""
    try:
        yield
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise HarnessError(
            f"the sweep's state cannot be kept: {first_line(error)}",
            where=str(folder),
            hint="mend that (a full disk, a database that is away) and start the same command again: it goes on",
        ) from None


def _run(frozen: optuna.trial.FrozenTrial) -> int:
    return int(frozen.user_attrs.get("run", frozen.number))


def _open(url: str, name: str, direction: str, pruner: optuna.pruners.BasePruner) -> optuna.Study:
    try:
        return optuna.create_study(
            study_name=name, storage=url, direction=direction, load_if_exists=True, pruner=pruner  # type: ignore[arg-type]
        )  # fmt: skip
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, ImportError, ValueError) as error:
        try:
            shown = sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
        except sqlalchemy.exc.ArgumentError:
            shown = "storage"
        raise ConfigError(
            f"Optuna's storage cannot be opened: {first_line(error)}",
            where=shown,
            hint="remove storage: for an SQLite file in the sweep folder, or name one such as postgresql://host/db",
        ) from None


def _recipe(plan: Plan) -> dict[str, Any]:
    """What all trials have in common and what decides what they come to; kept with the study."""
    flat = flatten(loader.as_tree(plan.trials[0].config))
    kept = {
        key: value for key, value in flat.items() if key in _COUNTS or not {key, key.split(".")[0]} & NOT_THE_RECIPE
    }
    return {key: value for key, value in kept.items() if not _is_below(key, axes(plan.file.sweep))}


def _is_below(key: str, settings: Iterable[str]) -> bool:
    """Whether ``key`` is one of ``settings`` or a part of one."""
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)
