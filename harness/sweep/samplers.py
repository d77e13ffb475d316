"""Optuna's samplers and pruners as a sweep file names them.

Every trial gets a sampler of its own, seeded by its number: what it draws depends on the sweep and on the trials that
are over, and not on how often the sweep was stopped and started in between.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from typing import Any

import optuna

from harness.errors import ConfigError
from harness.sweep.spec import Range, Sweep

_SAMPLERS: dict[str, Any] = {
    "grid": optuna.samplers.RandomSampler,  # never asked: the trials of a grid bring their values
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


def sampler(sweep: Sweep, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """The sampler that draws trial ``number``. Raises ConfigError for arguments it does not take."""
    if (package := _NEEDS.get(sweep.sampler)) and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"sampler {sweep.sampler} needs {package}, which is not installed", hint=f"pip install {package}"
        )
    # Draws of a quasi-random sequence belong together: one seed for all of them.
    own = seed if sweep.sampler == "qmc" else (seed * 1_000_003 + number) % 2**32
    return _make(_SAMPLERS[sweep.sampler], {"seed": own, **sweep.sampler_args}, "sampler_args")


def pruner(sweep: Sweep, epochs: int) -> optuna.pruners.BasePruner:
    """The pruner, for trials of ``epochs`` epochs. Raises ConfigError for arguments it does not take."""
    known = {"max_resource": epochs} if sweep.pruner == "hyperband" else {}
    return _make(_PRUNERS[sweep.pruner], {**known, **sweep.pruner_args}, "pruner_args")


def _make(cls: Any, arguments: dict[str, Any], key: str) -> Any:
    takes = ", ".join(name for name in inspect.signature(cls.__init__).parameters if name != "self")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Optuna's {cls.__name__} cannot be made: {error}", where=key, hint=f"it takes: {takes}"
        ) from None


def suggest(trial: optuna.Trial, key: str, axis: Any) -> Any:
    """The value of ``key`` in ``trial``: drawn now, or as it was drawn before."""
    if not isinstance(axis, Range):
        return trial.suggest_categorical(key, axis if isinstance(axis, list) else axis.choices)
    if all(isinstance(end, int) for end in (axis.low, axis.high, axis.step or 1)):
        return trial.suggest_int(key, int(axis.low), int(axis.high), step=int(axis.step or 1), log=axis.log)
    return trial.suggest_float(key, axis.low, axis.high, step=axis.step, log=axis.log)


def within(value: Any, axis: Any) -> bool:
    """Whether ``value`` can be drawn from ``axis`` as the file has it now."""
    if isinstance(axis, Range):
        return isinstance(value, int | float) and axis.low <= value <= axis.high
    return value in (axis if isinstance(axis, list) else axis.choices)
