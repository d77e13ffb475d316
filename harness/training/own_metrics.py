"""Metrics of torchmetrics or of the user's own, computed over every evaluation row once at any world size.

If torchmetrics adds up the states of a metric over ranks, they are added here, in float64. Any other metric gets the
outputs and targets of all rows at once, which every rank gathers.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.config import plugins
from harness.config.targets import MetricSection
from harness.errors import ConfigError, TrainingError, first_line
from harness.training.metrics import Pairs, Sums


class OwnMetric:
    """A class with ``update(outputs, targets)``, ``compute()`` and ``reset()``, or a function of all outputs and
    targets."""

    def __init__(self, section: MetricSection, known: Mapping[str, Any]) -> None:
        self.key, self.name = section.shown, section.name
        try:
            part = plugins.import_own("metric", section.name, "task.metrics")
        except ConfigError as error:
            if section.name.startswith("torchmetrics.") and isinstance(error.__cause__, ModuleNotFoundError):
                error.hint = f"pip install 'apex-harness[torchmetrics]'; or {error.hint}"
            raise
        with self._explained():
            self._metric: Any = None
            self._function = part
            if inspect.isclass(part):
                taken = inspect.signature(part).parameters
                args = {key: value for key, value in known.items() if key in taken} | section.args
                self._metric = part(**args)
                self._metric.sync_on_compute = False  # the states are reduced here
            elif section.args:
                self._function = functools.partial(part, **section.args)
        reductions = getattr(self._metric, "_reductions", {})
        self._adds = bool(reductions) and all(
            getattr(reduction, "__name__", "") == "dim_zero_sum" and isinstance(getattr(self._metric, state), Tensor)
            for state, reduction in reductions.items()
        )
        self._states = list(reductions) if self._adds else []

    @property
    def needs_rows(self) -> bool:
        """True if it gets all rows at once."""
        return not self._adds

    def pairs(self, outputs: Tensor, targets: Tensor) -> Pairs:
        """The states of a batch, if they can be added."""
        if not self._adds:
            return {}
        with self._explained():
            metric: Any = self._metric
            metric.to(outputs.device)
            metric.reset()
            metric.update(outputs, targets)
            states = {state: getattr(metric, state).detach().clone() for state in self._states}
        return {f"{self.key}.{state}": (value, torch.ones_like(value)) for state, value in states.items()}

    def value(self, sums: Sums, rows: Callable[[], tuple[Tensor, Tensor]]) -> float:
        """The metric of the reduced states; ``rows`` returns all outputs and targets."""
        with self._explained():
            result = self._of_states(sums) if self._adds else self._of_rows(*rows())
        number = result.item() if isinstance(result, Tensor) and result.numel() == 1 else result
        if not isinstance(number, int | float) and not hasattr(number, "__float__") or isinstance(number, Tensor):
            found = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else f"{number!r:.80}"
            hint = "average it: for torchmetrics, set args: {average: macro}"
            raise ConfigError(f"the metric {self.name} returns {found}, not a number", where="task.metrics", hint=hint)
        return float(number)

    def _of_states(self, sums: Sums) -> Any:
        metric: Any = self._metric
        metric.reset()
        for state in self._states:
            like, total = getattr(metric, state), sums.pairs[f"{self.key}.{state}"][0]
            setattr(metric, state, total.to(like.device, like.dtype).view_as(total))
        metric._update_count = 1  # without updates, it would warn
        return metric.compute()

    def _of_rows(self, outputs: Tensor, targets: Tensor) -> Any:
        if self._metric is None:
            return self._function(outputs, targets)
        metric: Any = self._metric
        if hasattr(metric, "to"):
            metric.to(outputs.device)
        metric.reset()
        metric.update(outputs, targets)
        return metric.compute()

    def _explained(self) -> _Explained:
        return _Explained(self.name)

    def rehearse(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ConfigError if it fails on made-up rows."""
        sums = Sums()
        sums.add(self.pairs(outputs, targets))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the made-up rows
                self.value(sums, lambda: (outputs, targets))
        except TrainingError as error:
            raise ConfigError(error.message, where="task.metrics", hint=error.hint) from error


class _Explained:
    """Context that turns an error of the user's code into a TrainingError that names the metric."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigError | torch.OutOfMemoryError):
            what = f"the metric {self.name} fails: {type(error).__name__}: {first_line(error)}"
            hint = "check its args; docs/targets.md describes what it is called with"
            raise TrainingError(what, where="task.metrics", hint=hint) from error
