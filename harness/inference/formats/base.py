"""The interface of an export format. To add one, write a module with a class ``Format`` like safetensors.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.config import plugins
from harness.errors import HarnessError, OwnCodeError, users_line

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """A model to export. ``new`` builds one like it with other weights, ``facts`` are its name and arguments, ``input``
    and ``output`` the names of its tensors, and ``example`` is an input. ``max_length``: the largest length of a row,
    if batches differ in their length."""

    model: nn.Module
    new: Callable[[], nn.Module]
    facts: Mapping[str, object]
    input: str
    output: str
    example: Tensor
    max_length: int | None
    signature: Mapping[str, Any] = field(default_factory=dict)
    """What else the task tells of inputs and outputs."""
    tokenizer: Any = None
    """The tokenizer of transformers, if the task has one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of validation; empty if the run does not tell."""


class ExportFormat(ABC):
    """Writes a model in one format, and loads it from there."""

    suffix: ClassVar[str]
    tolerance: ClassVar[float]
    """The largest difference of an output that is allowed, relative to the largest output, or to 1."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that may be missing."""
    extra: ClassVar[str] = ""
    """The extra of the harness that has them."""
    folder: ClassVar[bool] = False
    """True if it writes a folder."""
    note: ClassVar[str] = ""
    """What else to tell of the file, with %s for the path of the run's weights."""

    def to_units(self, subject: Exported, mean: Tensor, std: Tensor) -> bool:
        """Change the weights of ``subject``, whose numbers are standardized, so that they are in the unit of their
        column; return False if the format or the model does not allow it."""
        return False

    def scale_place(self, out: Path) -> tuple[object, str]:
        """Return the file that holds mean and std of standardized numbers, and the prefix of their names there."""
        return f"{out.name}.json", ""

    @abstractmethod
    def write(self, subject: Exported, path: Path) -> Function:
        """Write ``subject`` to ``path``; return the model that other programs load from there."""


def find(name: str) -> ExportFormat:
    """Return the format ``name``. Raises ConfigError if there is none."""
    part: type[ExportFormat] = plugins.find("export format", name, "--format")
    return part()


def traced(subject: Exported) -> torch.export.ExportedProgram:
    """Return the program that torch.export traces, for any number of rows. Raises HarnessError."""
    sizes, hint = {0: torch.export.Dim("batch")}, "remove branches on tensor values from forward"
    several = torch.cat([subject.example, subject.example])  # a single row would be traced as a constant
    if subject.max_length is not None:
        sizes[1] = torch.export.Dim("length", max=subject.max_length)
        several = torch.cat([several, several], dim=1) if several.shape[1] == 1 else several
        hint += "; if it cannot take every length, add task.tokenizer.pad=max_length"
    try:
        return torch.export.export(subject.model, (several,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:  # of many types
        where = users_line(error)
        kind = OwnCodeError if where else HarnessError
        raise kind(
            f"torch.export cannot trace this model: {error}",
            where=where,
            hint=f"{hint}; or use --format safetensors, which needs no tracing",
        ) from error
