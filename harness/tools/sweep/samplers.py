"""Optuna's samplers and pruners, by their names in a sweep file.

Every trial gets its own sampler, seeded by the trial's number. Its draw depends on the sweep and the finished trials,
but not on how often the sweep was stopped and started.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from typing import Any

import optuna

from harness.errors import ConfigError
from harness.tools.sweep.space import values_of
from harness.tools.sweep.spec import Range, SweepSpec

_SAMPLERS: dict[str, Any] = {
    "grid": optuna.samplers.RandomSampler,  # unused: the trials of a grid have their values
    "random": optuna.samplers.RandomSampler,
    "qmc": optuna.samplers.QMCSampler,
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
}
_PRUNERS: dict[str, Any] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
_NEEDS = {"qmc": "scipy", "gp": "scipy", "cmaes": "cmaes"}


def sampler(spec: SweepSpec, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """The sampler for trial ``number``. Raises ConfigError for arguments that Optuna does not accept."""
    if (package := _NEEDS.get(spec.sampler)) and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"sampler {spec.sampler} needs {package}, which is not installed", hint=f"pip install {package}"
        )
    # The draws of a quasi-random sequence belong together, so they share one seed.
    own = seed if spec.sampler == "qmc" else (seed * 1_000_003 + number) % 2**32
    return _make(_SAMPLERS[spec.sampler], {"seed": own, **spec.sampler_args}, "sampler_args")


def pruner(spec: SweepSpec, epochs: int) -> optuna.pruners.BasePruner:
    """The pruner for trials of ``epochs`` epochs. Raises ConfigError for arguments that Optuna does not accept."""
    known = {"max_resource": epochs} if spec.pruner == "hyperband" else {}
    return _make(_PRUNERS[spec.pruner], {**known, **spec.pruner_args}, "pruner_args")


def _make(cls: Any, arguments: dict[str, Any], key: str) -> Any:
    takes = ", ".join(name for name in inspect.signature(cls.__init__).parameters if name != "self")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Optuna's {cls.__name__} rejects its arguments: {error}", where=key, hint=f"it accepts: {takes}"
        ) from None


def suggest(trial: optuna.Trial, key: str, axis: Any) -> Any:
    """The value of ``key`` in ``trial``: drawn now, or read if it was drawn before."""
    if not isinstance(axis, Range):
        return trial.suggest_categorical(key, values_of(axis))
    if all(isinstance(end, int) for end in (axis.low, axis.high, axis.step or 1)):
        return trial.suggest_int(key, int(axis.low), int(axis.high), step=int(axis.step or 1), log=axis.log)
    return trial.suggest_float(key, axis.low, axis.high, step=axis.step, log=axis.log)


def within(value: Any, axis: Any) -> bool:
    """True if ``value`` can be drawn from ``axis``."""
    if isinstance(axis, Range):
        return isinstance(value, int | float) and axis.low <= value <= axis.high
    return value in values_of(axis)
