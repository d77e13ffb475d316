"""MixUp (https://arxiv.org/abs/1710.09412) and CutMix (https://arxiv.org/abs/1905.04899): each row of a batch is mixed
with the row before it, and its loss with that row's.

All draws of a step follow from (seed, step). They are the same on every rank and in every micro-batch, and need neither
the device nor any stream of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from harness.config.schema import TrainSection
from harness.data.seeds import Purpose, derive
from harness.errors import ConfigError


def mixed(train: TrainSection, seed: int, step: int, inputs: Tensor) -> tuple[Tensor, float]:
    """Return (the inputs of step ``step``, mixed as ``train`` says; the share of a row's own content in them, 1.0 if
    unmixed).

    With both kinds, each step draws one of them.
    """
    kinds = [(name, alpha) for name in ("mixup", "cutmix") if (alpha := getattr(train, name))]
    if not kinds:
        return inputs, 1.0
    rng = np.random.default_rng(derive(Purpose.MIXING, seed, step))
    name, alpha = kinds[rng.integers(len(kinds))]
    own_share, center = float(rng.beta(alpha, alpha)), rng.random(2)
    if name == "mixup":
        return inputs.lerp(inputs.roll(1, 0), 1 - own_share), own_share
    rows, columns = (_side(size, position, own_share) for size, position in zip(inputs.shape[-2:], center, strict=True))
    cut = inputs.clone()
    cut[..., rows, columns] = inputs.roll(1, 0)[..., rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return cut, 1 - area / (inputs.shape[-2] * inputs.shape[-1])


def mixed_loss(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, own_share: float) -> Tensor:
    """Return the loss of ``outputs`` for the targets of both rows that each input was mixed from, weighted by their
    shares."""
    if own_share == 1.0:
        return loss(outputs, targets)
    return own_share * loss(outputs, targets) + (1 - own_share) * loss(outputs, targets.roll(1, 0))


def require(train: TrainSection, inputs: Tensor) -> None:
    """Raise ConfigError if ``inputs``, a prepared batch, cannot be mixed as ``train`` says."""
    key = "train.mixup" if train.mixup else "train.cutmix"
    if (train.mixup or train.cutmix) and not inputs.is_floating_point():
        kind = str(inputs.dtype).removeprefix("torch.")
        raise ConfigError(f"{kind} inputs cannot be mixed; this task has no images", where=key, hint=f"set {key}=0")
    if train.cutmix and inputs.dim() < 4:
        shape = "x".join(map(str, inputs.shape[1:])) or "()"
        raise ConfigError(
            f"CutMix needs images, but the shape of a row is {shape}", where="train.cutmix", hint="use train.mixup"
        )


def _side(size: int, position: float, own_share: float) -> slice:
    """Return one side of the box that is cut, around ``position`` (0 to 1), as far as it is inside the image."""
    middle, half = int(position * size), int(0.5 * math.sqrt(1 - own_share) * size)
    return slice(max(0, middle - half), min(size, middle + half))
