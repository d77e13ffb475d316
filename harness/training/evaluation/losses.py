"""The loss of a task with labels: a built-in one by name, or the user's own.

The settings are in ``harness.config.targets``; the arguments of a loss are those of its function or class.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from harness.config import plugins, signatures
from harness.config.targets import LabelledTask, LossSection
from harness.errors import ConfigError, HarnessError, first_line, of_part, plural
from harness.training.evaluation.labels import Labels

_TRAINING_ONLY = "label_smoothing"  # among the arguments of losses
Smoothing = Annotated[float, Field(ge=0, lt=1)]


class LabelCounts(NamedTuple):
    """How many training rows there are."""

    by_label: np.ndarray | None
    """With each label; None if the task does not count them."""
    rows: int


Counts = Callable[[], LabelCounts]


class Loss:
    """A loss, built in or the user's own, as the mean over the rows of a batch, so that the mean over micro-batches and
    ranks is the mean over all rows. With class weights, too, the sum is divided by the number of rows, not by the sum
    of their weights as torch does."""

    def __init__(self, section: LabelledTask, labels: Labels, counts: Counts | None) -> None:
        self.name, self._device = section.loss_name, torch.device("cpu")
        self._call: Callable[[Tensor, Tensor], object] = (
            _own_loss(self.name, section.loss) if "." in self.name else _BuiltIn(section, labels, counts)
        )

    def __call__(self, outputs: Tensor, targets: Tensor, training: bool = True) -> Tensor:
        if isinstance(self._call, nn.Module):
            if self._call.training is not training:
                self._call.train(training)
            if outputs.device != self._device:
                self._device = outputs.device
                self._call.to(self._device)
        loss = self._call(outputs.float(), targets)
        if not (isinstance(loss, Tensor) and (loss.shape == targets.shape[:1] or loss.numel() == 1)):
            description = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ConfigError(
                f"the loss {self.name} returns an object of {description}, not one number",
                where="task.loss.name",
                hint="return the mean over the rows (in torch: reduction='mean'), or the loss of each row",
            )
        return loss.mean() if loss.dim() else loss

    def require_gradient(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ConfigError if the loss cannot train on a made-up batch."""
        try:
            value = self(outputs.requires_grad_(), targets)
            if not value.requires_grad:
                hint = "compute it from the outputs with torch's functions"
                raise ConfigError(f"the loss {self.name} has no gradient", where="task.loss.name", hint=hint)
            value.backward()
        except HarnessError:
            raise
        except Exception as error:  # of the user's own code
            raise _loss_failed(self.name, error, "task.loss.name") from error


# The built-in losses by the names in harness.config.targets, of each row or as the mean. What follows the * are the
# settings task.loss.args.


def cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor | None, *, label_smoothing: Smoothing = 0.0
) -> Tensor:
    reduction = "none" if weights is not None else "mean"  # as fast, and equal to the last bit, as torch's
    return functional.cross_entropy(outputs, targets, weights, label_smoothing=label_smoothing, reduction=reduction)


def bce(outputs: Tensor, targets: Tensor, weights: Tensor | None, *, label_smoothing: Smoothing = 0.0) -> Tensor:
    share = outputs.shape[1] if targets.dim() == 1 else 2
    hot = _one_hot(outputs, targets) * (1 - label_smoothing) + label_smoothing / share
    return _entropy(outputs, hot, pos_weight=weights).mean(dim=1)


def focal(
    outputs: Tensor, targets: Tensor, weights: Tensor | None, *, gamma: Annotated[float, Field(ge=0)] = 2.0
) -> Tensor:
    """Lin et al., https://arxiv.org/abs/1708.02002: the factor (1 - probability of the label) ** gamma gives easy rows
    little weight."""

    def focus(entropy: Tensor) -> Tensor:
        return (1 - torch.exp(-entropy)).clamp_min(1e-7) ** gamma

    if targets.dim() == 1:
        entropy = functional.cross_entropy(outputs, targets, reduction="none")
        return (entropy if weights is None else weights[targets] * entropy) * focus(entropy)
    hot = _one_hot(outputs, targets)
    weighted = _entropy(outputs, hot, pos_weight=weights)
    return (weighted * focus(_entropy(outputs, hot))).mean(dim=1)


def mse(outputs: Tensor, targets: Tensor, weights: None) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="none").mean(dim=1)


def l1(outputs: Tensor, targets: Tensor, weights: None) -> Tensor:
    return functional.l1_loss(outputs, targets, reduction="none").mean(dim=1)


def huber(outputs: Tensor, targets: Tensor, weights: None, *, delta: Annotated[float, Field(gt=0)] = 1.0) -> Tensor:
    return functional.huber_loss(outputs, targets, reduction="none", delta=delta).mean(dim=1)


_entropy = functools.partial(functional.binary_cross_entropy_with_logits, reduction="none")


def _one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``targets`` as zeros and ones of the shape and the type of ``outputs``."""
    hot = functional.one_hot(targets, outputs.shape[1]) if targets.dim() == 1 else targets
    return hot.to(outputs.dtype)


class _BuiltIn(nn.Module):
    """A built-in loss with its arguments and class weights."""

    weights: Tensor | None

    def __init__(self, section: LabelledTask, labels: Labels, counts: Counts | None) -> None:
        super().__init__()
        name, self._function = section.loss_name, signatures.functions(__name__)[section.loss_name]
        passed = ("outputs", "targets", "weights")
        self._args = signatures.checked(name, self._function, section.loss.args, "task.loss.args", passed)
        self._evaluating = {key: value for key, value in self._args.items() if key != _TRAINING_ONLY}
        sigmoid = name == "bce" or labels.kind == "multi_label"
        self.register_buffer("weights", _class_weights(section.loss.class_weights, labels.names, sigmoid, counts))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        args = self._args if self.training else self._evaluating
        loss: Tensor = self._function(outputs, targets, self.weights, **args)
        return loss


def _own_loss(name: str, section: LossSection) -> Callable[[Tensor, Tensor], object]:
    """Return a loss of the user's own: a module or function of (outputs, targets)."""
    part = plugins.import_own("loss", name, "task.loss.name")
    if not callable(part):
        hint = "name a class or a function: package.module.Class"
        raise ConfigError(f"{name} is not a loss: it cannot be called", where="task.loss.name", hint=hint)
    with suppress(ValueError):  # of a function in C, which has no signature
        signatures.require_parameters(name, inspect.signature(part).parameters, section.args, "task.loss.args")
    try:
        if inspect.isclass(part):
            part = part(**section.args)
        elif section.args:
            part = functools.partial(part, **section.args)
    except Exception as error:  # of the user's own code
        raise _loss_failed(name, error, "task.loss.args", making=True) from error
    if isinstance(part, nn.Module) and list(part.parameters()):
        hint = "put the parameters into the model"
        raise ConfigError(
            f"the loss {name} has parameters, which would not be trained", where="task.loss.name", hint=hint
        )
    return part


def _loss_failed(name: str, error: Exception, where: str, making: bool = False) -> HarnessError:
    message = f"the loss {name} fails: {type(error).__name__}: {first_line(error)}"
    hint = "it is called with outputs and targets of a batch; docs/targets.md lists their shapes"
    return of_part(message, error, where, hint, making)


def _class_weights(
    setting: str | tuple[float, ...] | dict[str, float] | None,
    labels: Sequence[str | int],
    sigmoid: bool,
    counts: Counts | None,
) -> Tensor | None:
    """Return one weight per label; None without the ``setting``. Raises ConfigError."""
    where = "task.loss.class_weights"
    if setting is None:
        return None
    if isinstance(setting, str):  # "balanced"
        assert counts is not None  # only a task opened on new data lacks them, which computes no loss
        label_counts = counts()
        if label_counts.by_label is None:
            hint = "add label_counts(start, stop) to it, or give a weight for each label"
            raise ConfigError("the task does not count the training rows with each label", where=where, hint=hint)
        return torch.from_numpy(_balanced(label_counts.by_label, label_counts.rows, sigmoid)).float()
    if isinstance(setting, dict):
        label_names = [str(label) for label in labels]
        if unknown := [label for label in setting if label not in label_names]:
            hint = f"use labels of the training table, such as {', '.join(label_names[:10])}"
            raise ConfigError(f"there is no label {unknown[0]!r}", where=where, hint=hint)
        weights = [float(setting.get(label, 1.0)) for label in label_names]
    else:
        weights = [float(weight) for weight in setting]
    if len(weights) != len(labels):
        hint = "give one weight per label, in the same order, or {label: weight}"
        raise ConfigError(
            f"{plural(len(weights), 'weight')} for {plural(len(labels), 'label')}", where=where, hint=hint
        )
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ConfigError("weights must be positive or zero, finite, and not all zero", where=where)
    return torch.tensor(weights)


def _balanced(counts: np.ndarray, num_rows: int, sigmoid: bool) -> np.ndarray:
    """Return rows / (classes * rows of the class), as scikit-learn does; for a sigmoid per label, rows without the
    label / rows with it."""
    filled = np.maximum(counts, 1).astype(float)
    return np.maximum(num_rows - counts, 1) / filled if sigmoid else num_rows / (len(counts) * filled)
