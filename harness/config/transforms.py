"""The setting ``transforms`` of tasks with images: lists of torchvision.transforms.v2 classes with their arguments.

The names and arguments are checked in ``harness.data.transforms``, which imports torchvision.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from harness.config.base import Mark, Section

_STEP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}


def _step(value: Any) -> str | dict[str, Any]:
    """Return an entry as it is written. Raises ValueError unless it is a name, or {name: arguments}."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value)), str):
        return value
    extra = "; indent the arguments below the name" if isinstance(value, dict) and len(value) > 1 else ""
    raise ValueError(
        "it should be a name such as RandomHorizontalFlip, or a name with arguments such as "
        f"RandomResizedCrop: {{size: 224}}{extra} (found: {value!r:.200})"
    )


Step = Annotated[str | dict[str, Any], BeforeValidator(_step), WithJsonSchema(_STEP_SCHEMA)]
Steps = Annotated[tuple[Step, ...], BeforeValidator(lambda value: () if value is None else value)]


class TransformsSection(Section):
    """Transforms of each image. An entry is a class of torchvision.transforms.v2, alone or with its arguments, such as
    RandomErasing: {p: 0.1}, or CenterCrop: 224 for the first argument; or your own package.module.Class.
    """

    train: Annotated[Steps, Mark.CODE] = Field(default=(), strict=False)
    """Augmentation: applied to training images in this order, such as [RandomHorizontalFlip]. Random numbers depend on
    the seed, the epoch and the row.
    """
    eval: Annotated[Steps, Mark.CODE] = Field(default=(), strict=False)
    """Applied to the images of validation, prediction and export, such as [{CenterCrop: 224}]."""


def name_and_arguments(step: Step) -> tuple[str, Any]:
    """Return the name of an entry and what follows it: a dictionary, another value for the first argument, or None."""
    return (step, None) if isinstance(step, str) else next(iter(step.items()))
