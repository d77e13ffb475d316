"""The formats of ``harness export``, one class for each.

The command lists them before it imports torch, which takes seconds; so each imports what it needs where it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.errors import HarnessError, OwnCodeError, users_line
from harness.runs.files import temporary_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

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


FORMATS: dict[str, ExportFormat] = {}


class ExportFormat:
    """Writes a model in one format, and loads it from there. A subclass is found under its ``name``."""

    suffix: ClassVar[str]
    tolerance: ClassVar[float]
    """The largest difference of an output that is allowed, relative to the largest output, or to 1."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages of the ``extra``, by default that of the format's name, which may be missing."""
    extra: ClassVar[str] = ""
    folder: ClassVar[bool] = False
    """True if it writes a folder."""
    note: ClassVar[str] = ""
    """What else to tell of the file, with %s for the path of the run's weights."""

    def __init_subclass__(cls, name: str) -> None:
        FORMATS[name] = cls()

    def to_units(self, subject: Exported, mean: Tensor, std: Tensor) -> bool:
        """Change the weights of ``subject``, whose numbers are standardized, so that they are in the unit of their
        column; return False if the format or the model does not allow it."""
        return False

    def scale_place(self, out: Path) -> tuple[object, str]:
        """Return the file that holds mean and std of standardized numbers, and the prefix of their names there."""
        return f"{out.name}.json", ""

    def write(self, subject: Exported, path: Path) -> Function:
        """Write ``subject`` to ``path``; return the model that other programs load from there."""
        raise NotImplementedError


class Safetensors(ExportFormat, name="safetensors"):
    """The weights alone; loading them needs the model's code."""

    suffix, tolerance = ".safetensors", 0.0
    note = "the exported file has the same tensors as %s, in float32"

    def write(self, subject: Exported, path: Path) -> Function:
        from harness.runs.weights_file import load_weights, save_weights, with_versions

        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in subject.model.state_dict().items()}
        metadata = {"model": str(subject.facts["name"]), "args": json.dumps(subject.facts["args"])}
        save_weights(tensors, path, metadata, work=temporary_for(path))
        loaded = subject.new().eval()
        loaded.load_state_dict(with_versions(load_weights(path), loaded))
        return loaded


class TorchExport(ExportFormat, name="torch_export"):
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


class Onnx(ExportFormat, name="onnx"):
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


class HuggingFace(ExportFormat, name="huggingface"):
    """A folder that ``from_pretrained`` of transformers loads, with the tokenizer; matrices of LoRA are added to the
    weights."""

    suffix, tolerance, packages, folder = ".huggingface", 1e-5, ("transformers",), True

    def scale_place(self, out: Path) -> tuple[object, str]:
        return out / "config.json", "output_"

    def to_units(self, subject: Exported, mean: Tensor, std: Tensor) -> bool:
        from harness.training.models.libraries import hf

        return hf.to_units(subject.model, mean, std)

    def write(self, subject: Exported, path: Path) -> Function:
        from harness.training.models.libraries import hf

        return hf.save(subject.model, path, subject.signature, subject.tokenizer)


class Peft(ExportFormat, name="peft"):
    """A folder that ``from_pretrained`` of peft loads, with the tokenizer: the matrices of LoRA, and the modules that
    the run's folder or name of Hugging Face does not have."""

    suffix, tolerance, packages, extra, folder = ".peft", 1e-5, ("transformers", "peft"), "huggingface", True

    def to_units(self, subject: Exported, mean: Tensor, std: Tensor) -> bool:
        from harness.training.models.libraries import hf

        return hf.to_units(subject.model, mean, std, adapter=True)

    def write(self, subject: Exported, path: Path) -> Function:
        from harness.training.models.libraries import hf

        name = str(subject.facts["name"])
        return hf.save_adapter(subject.model, path, name, subject.signature, subject.tokenizer)


def _traced(subject: Exported) -> torch.export.ExportedProgram:
    import torch

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
