"""Losses of labelled rows by name, and losses of the user's own.

The loss of a batch is the mean over its rows, so that the mean over micro-batches and ranks is the mean over all rows.
With class weights, too, the sum is divided by the number of rows, not by the sum of their weights as torch does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.config import plugins
from harness.config.targets import Kind, LossSection
from harness.errors import ConfigError, first_line, plural

Counts = Callable[[], tuple[np.ndarray, int]]  # (training rows with each label, training rows)


class Loss:
    """A built-in loss. Targets: int64 (batch,) of classes, zeros and ones (batch, labels), or numbers (batch,
    columns)."""

    def __init__(
        self, name: str, section: LossSection, labels: Sequence[str | int], kind: Kind, counts: Counts
    ) -> None:
        self.name, self.kind = name, kind
        self.smoothing = section.label_smoothing
        self.gamma = 2.0 if section.gamma is None else section.gamma
        self.delta = 1.0 if section.delta is None else section.delta
        weights = section.class_weights
        sigmoid = name == "bce" or kind == "multi_label"
        self._weights = None if weights is None else _class_weights(weights, labels, sigmoid, counts)
        self._on_device: dict[torch.device, Tensor] = {}

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss: the mean over rows."""
        if self.name == "cross_entropy" and self._weights is None:
            return functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing)
        return self._total(outputs.float(), targets, self.smoothing) / len(targets)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The validation loss: the sum over rows, without label smoothing."""
        return self._total(outputs.float(), targets, 0.0)

    def _total(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        if self.kind == "regression":
            return self._regression(outputs, targets) / outputs.shape[1]
        weights = self._weights_on(outputs.device)
        if self.name == "cross_entropy":
            return functional.cross_entropy(
                outputs, targets, weight=weights, label_smoothing=smoothing, reduction="sum"
            )
        if self.name == "focal" and self.kind == "single_label":
            easy = functional.cross_entropy(outputs, targets, reduction="none")
            factor = (1 - torch.exp(-easy)).clamp_min(1e-7) ** self.gamma  # (1 - probability of the label) ** gamma
            if weights is not None:
                factor = factor * weights[targets]
            return (factor * easy).sum()
        hot = _hot(targets, outputs)
        if self.name == "focal":
            each = functional.binary_cross_entropy_with_logits(outputs, hot, pos_weight=weights, reduction="none")
            plain = functional.binary_cross_entropy_with_logits(outputs, hot, reduction="none")
            return ((1 - torch.exp(-plain)).clamp_min(1e-7) ** self.gamma * each).sum() / outputs.shape[1]
        hot = hot * (1 - smoothing) + smoothing / (outputs.shape[1] if self.kind == "single_label" else 2)
        total = functional.binary_cross_entropy_with_logits(outputs, hot, pos_weight=weights, reduction="sum")
        return total / outputs.shape[1]

    def _regression(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.name == "huber":
            return functional.huber_loss(outputs, targets, reduction="sum", delta=self.delta)
        return (functional.mse_loss if self.name == "mse" else functional.l1_loss)(outputs, targets, reduction="sum")

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self._weights is not None and device not in self._on_device:  # a copy to a GPU makes the host wait
            self._on_device[device] = torch.tensor(self._weights, dtype=torch.float32, device=device)
        return self._on_device.get(device)


class OwnLoss:
    """A loss of the user's own: a module or function of (outputs, targets) that returns the mean over the rows."""

    def __init__(self, name: str, section: LossSection) -> None:
        self.name = name
        part = plugins.import_own("loss", name, "task.loss.name")
        try:
            if inspect.isclass(part):
                part = part(**section.args)
            elif section.args:
                part = functools.partial(part, **section.args)
        except Exception as error:  # of the user's own code
            raise _failed(name, error, "task.loss.args") from error
        if not callable(part) or inspect.ismodule(part):
            hint = "name a class or a function: package.module.Class"
            raise ConfigError(f"{name} is not a loss: it cannot be called", where="task.loss.name", hint=hint)
        if isinstance(part, nn.Module) and list(part.parameters()):
            hint = "put the parameters into the model"
            raise ConfigError(
                f"the loss {name} has parameters, which would not be trained", where="task.loss.name", hint=hint
            )
        self._call = part

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self._call, nn.Module):
            self._call.to(outputs.device)  # its buffers; does nothing after the first time
        loss = self._call(outputs.float(), targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"an object of type {type(loss).__name__}"
            )
            hint = "return the mean over the rows (in torch: reduction='mean')"
            raise ConfigError(
                f"the loss {self.name} returns {found}, not one number", where="task.loss.name", hint=hint
            )
        return loss.reshape(())

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.mean(outputs, targets) * len(targets)


def rehearse(loss: Loss | OwnLoss, outputs: Tensor, targets: Tensor) -> None:
    """Raise ConfigError if ``loss`` cannot train on a made-up batch."""
    try:
        value = loss.mean(outputs.requires_grad_(), targets)
        if not value.requires_grad:
            hint = "compute it from the outputs with torch's functions"
            raise ConfigError(f"the loss {loss.name} has no gradient", where="task.loss.name", hint=hint)
        value.backward()
    except ConfigError:
        raise
    except Exception as error:  # of the user's own code
        raise _failed(loss.name, error, "task.loss.name") from error


def _failed(name: str, error: Exception, where: str) -> ConfigError:
    what = f"the loss {name} fails: {type(error).__name__}: {first_line(error)}"
    hint = "it is called with outputs and targets of a batch; docs/targets.md lists their shapes"
    return ConfigError(what, where=where, hint=hint)


def _hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as float32 (batch, labels)."""
    if targets.dim() == 1:
        return functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return targets.to(outputs.dtype)


def _class_weights(given: Any, labels: Sequence[str | int], sigmoid: bool, counts: Counts) -> list[float]:
    """One weight per label. Raises ConfigError."""
    where = "task.loss.class_weights"
    if given == "balanced":
        per_label, num_rows = counts()
        found: list[float] = _balanced(per_label.astype(float), num_rows, sigmoid).tolist()
        return found
    if isinstance(given, dict):
        known = [str(label) for label in labels]
        if unknown := [label for label in given if label not in known]:
            hint = f"use labels of the training table, such as {', '.join(known[:10])}"
            raise ConfigError(f"there is no label {unknown[0]!r}", where=where, hint=hint)
        weights = [float(given.get(label, 1.0)) for label in known]
    else:
        weights = [float(weight) for weight in given]
    if len(weights) != len(labels):
        hint = "give one weight per label, in the same order, or {label: weight}"
        raise ConfigError(
            f"{plural(len(weights), 'weight')} for {plural(len(labels), 'label')}", where=where, hint=hint
        )
    if min(weights) < 0 or not any(weights):
        raise ConfigError("weights must be positive or zero, and not all zero", where=where)
    return weights


def _balanced(counts: np.ndarray, num_rows: int, sigmoid: bool) -> np.ndarray:
    """As scikit-learn: rows / (classes * rows of the class). For a sigmoid per label: rows without / rows with it."""
    filled = np.maximum(counts, 1)
    return np.maximum(num_rows - counts, 1) / filled if sigmoid else num_rows / (len(counts) * filled)
