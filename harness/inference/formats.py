"""The formats of ``harness export``, one class for each.

The command lists them before it imports torch, which takes seconds; so each imports what it needs where it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from harness.errors import HarnessError, first_line
from harness.runs.files import temporary_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """A model to export. ``new`` builds one like it with other weights, ``facts`` are its name and arguments, ``input``
    and ``output`` the names of its tensors, and ``example`` is an input."""

    model: nn.Module
    new: Callable[[], nn.Module]
    facts: Mapping[str, object]
    input: str
    output: str
    example: Tensor
    variable_length: bool


class ExportFormat:
    suffix: ClassVar[str]
    tolerance: ClassVar[float]
    """The largest difference of an output that is allowed, relative to the largest output, or to 1."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages of the extra of the same name, which may be missing."""

    def write(self, subject: Exported, path: Path) -> Function:
        """Write ``subject`` to ``path``; return the model that other programs load from there."""
        raise NotImplementedError


class Safetensors(ExportFormat):
    """The weights alone; loading them needs the model's code."""

    suffix, tolerance = ".safetensors", 0.0

    def write(self, subject: Exported, path: Path) -> Function:
        from harness.runs.weights_file import load_weights, save_weights, with_versions

        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in subject.model.state_dict().items()}
        metadata = {"model": str(subject.facts["name"]), "args": json.dumps(subject.facts["args"])}
        save_weights(tensors, path, metadata, work=temporary_for(path))
        loaded = subject.new().eval()
        loaded.load_state_dict(with_versions(load_weights(path), loaded))
        return loaded


class TorchExport(ExportFormat):
    """The traced model, which torch alone can load."""

    suffix, tolerance = ".pt2", 1e-5

    def write(self, subject: Exported, path: Path) -> Function:
        import torch

        program = _traced(subject)
        # Through a file object, since torch.export rejects names that do not end in .pt2.
        with open(path, "wb") as file:
            torch.export.save(program, file)
        with open(path, "rb") as file:
            loaded: Function = torch.export.load(file).module()
        return loaded


class Onnx(ExportFormat):
    """The traced model for ONNX Runtime and others."""

    suffix, tolerance, packages = ".onnx", 1e-4, ("onnx", "onnxscript", "onnxruntime")

    def write(self, subject: Exported, path: Path) -> Function:
        import onnxruntime
        import torch

        names = [subject.input], [subject.output]
        program = torch.onnx.export(
            _traced(subject), input_names=names[0], output_names=names[1], dynamo=True, verbose=False
        )
        assert program is not None  # with dynamo
        program.save(str(path), external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda inputs: torch.from_numpy(session.run([subject.output], {subject.input: inputs.numpy()})[0])


FORMATS: Mapping[str, ExportFormat] = {"safetensors": Safetensors(), "torch_export": TorchExport(), "onnx": Onnx()}


def _traced(subject: Exported) -> torch.export.ExportedProgram:
    import torch

    sizes = {0: torch.export.Dim("batch")} | ({1: torch.export.Dim("length")} if subject.variable_length else {})
    several = torch.cat([subject.example, subject.example])  # a single row would be traced as a constant
    try:
        return torch.export.export(subject.model, (several,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:  # of many types
        raise HarnessError(
            f"torch.export cannot trace this model: {first_line(error)}",
            hint="remove branches on tensor values from forward, or use --format safetensors, which needs no tracing",
        ) from error
