"""Metrics of torchmetrics or of the user's own."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.apex.amp import disable_casts
from harness.config import plugins
from harness.config.targets import MetricSection
from harness.errors import ConfigError, HarnessError, first_line, of_part
from harness.training.evaluation.labels import Labels
from harness.training.evaluation.sums import Pairs, Rows, Sums

_ROWS = "outputs"  # the name under which Sums keeps all outputs and targets


class OwnMetric:
    """A class with ``update(outputs, targets)``, ``compute()`` and ``reset()``, or a function of all outputs and
    targets.

    If torchmetrics adds up the states of a metric over ranks, they are added here, in float64. Any other metric gets
    the outputs and targets of all rows at once, which every rank gathers.
    """

    def __init__(self, section: MetricSection, labels: Labels) -> None:
        self.key, self.name, self._shown = section.shown, section.name, labels.for_metrics
        self._hint = "check its args; docs/targets.md lists the shapes of what it is called with"
        if labels.kind == "single_label" and ".Binary" in section.name:
            multiclass = section.name.replace(".Binary", ".Multiclass")
            self._hint = f"use {multiclass}: it is called with the probability of each class"
        part = _imported(section.name)
        self._metric: Any = None
        with self._explained(making=True):
            if inspect.isclass(part):
                takes_number = labels.count_argument in inspect.signature(part).parameters
                arguments = {labels.count_argument: len(labels.names)} if takes_number else {}
                self._metric = part(**arguments | section.args)
                self._metric.sync_on_compute = False  # the states are reduced here
            self._function = functools.partial(part, **section.args)
        self._states = _added_states(self._metric)
        self.needs_rows = not self._states

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """Return all rows of a batch, or the states of the metric after it."""
        if self.needs_rows:
            return {_ROWS: Rows(outputs, targets)}
        with self._explained():
            self._update(*self._shown(outputs, targets))
            states = {state: getattr(self._metric, state).detach().clone() for state in self._states}
        return {f"{self.key}.{state}": (value, torch.ones_like(value)) for state, value in states.items()}

    def value(self, sums: Sums) -> float:
        """Return the metric of the reduced states, or of all rows."""
        with self._explained():
            result = self._of_rows(sums.all_rows(_ROWS)) if self.needs_rows else self._of_states(sums)
            if (number := _number(result)) is not None:
                return number
        value = f"values of shape {tuple(result.shape)}" if hasattr(result, "shape") else f"{result!r:.80}"
        hint = "average it: for torchmetrics, set args: {average: macro}"
        if isinstance(result, Mapping):
            hint = "return one number; of several, give task.metrics a function for each"
        raise ConfigError(f"the metric {self.name} returns {value}, not a number", where="task.metrics", hint=hint)

    def _of_states(self, sums: Sums) -> Any:
        self._metric.reset()
        for state in self._states:
            like, total = getattr(self._metric, state), sums.pairs[f"{self.key}.{state}"][0]
            setattr(self._metric, state, total.to(like.device, like.dtype).view_as(total))
        self._metric._update_count = 1  # without updates, it would warn
        return self._metric.compute()

    def _of_rows(self, rows: Rows) -> Any:
        if self._metric is None:
            return self._function(*self._shown(*rows))
        self._update(*self._shown(*rows))
        return self._metric.compute()

    def _update(self, outputs: Tensor, targets: Tensor) -> None:
        if hasattr(self._metric, "to"):
            self._metric.to(outputs.device)
        self._metric.reset()
        self._metric.update(outputs, targets)

    @contextmanager
    def _explained(self, making: bool = False) -> Iterator[None]:
        """Context for the user's code, without the casts of O1 and O4. Explains an error, and names the metric."""
        try:
            with disable_casts():
                yield
        except (HarnessError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            message = f"the metric {self.name} fails: {type(error).__name__}: {first_line(error)}"
            raise of_part(message, error, "task.metrics", self._hint, making) from error

    def require_value(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ConfigError if the metric fails on made-up rows."""
        sums = Sums()
        sums.add(self.pairs(outputs, targets))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the made-up rows
            self.value(sums)


def _imported(name: str) -> Any:
    try:
        return plugins.import_own("metric", name, "task.metrics")
    except ConfigError as error:
        if name.startswith("torchmetrics.") and isinstance(error.__cause__, ModuleNotFoundError):
            error.hint = f"pip install 'apex-harness[torchmetrics]'; or {error.hint}"
        raise


def _added_states(metric: Any) -> list[str]:
    """Return the states of ``metric``, if torchmetrics adds up all of them over ranks; else an empty list."""
    reductions = getattr(metric, "_reductions", {})
    added = all(
        getattr(reduction, "__name__", "") == "dim_zero_sum" and isinstance(getattr(metric, state), Tensor)
        for state, reduction in reductions.items()
    )
    return list(reductions) if added else []


def _number(result: Any) -> float | None:
    """Return the number that a metric has returned, also as the only value of a tensor or an array; None if it is
    none."""
    if isinstance(result, Tensor | np.ndarray):
        return float(result.item()) if math.prod(result.shape) == 1 else None
    return float(result) if hasattr(result, "__float__") else None
