"""Export a run's best weights as a file that other programs load, with a JSON file that describes it.

Before the file gets its name, it is loaded and its outputs on real rows are compared with the model's. Models are
exported in float32, regardless of the opt level, and accept any number of rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from harness.config.schema import Config
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, HarnessError, first_line
from harness.runs import trained_run
from harness.runs.checkpoint import load_weights, save_weights
from harness.runs.files import output_error, replacing, require_output, temporary_for, write_atomically
from harness.training import build
from harness.training.task import OpenedTask, SupportsLearned, SupportsSignature

log = logging.getLogger("harness")

CHECK_ROWS = (8, 3, 1)  # sizes of the batches of evaluation rows to compare
TOLERANCE = {"safetensors": 0.0, "torch_export": 1e-5, "onnx": 1e-4}  # relative to the largest output, or to 1
SUFFIX = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}


class Exported(NamedTuple):
    """The model to export, the names of its input and output, and batches of real inputs."""

    model: nn.Module
    input: str
    output: str
    batches: list[Tensor]


def export(run: Path, kind: str, out: Path | None, overrides: Sequence[str] = (), trust: bool = False) -> Path:
    """Write the best weights of ``run`` as ``kind`` to ``out``, and their description to ``out`` + ``.json``.

    ``trust``: see ``trained_run.configuration``.

    Raises HarnessError, and writes neither file, if the loaded file does not compute the same outputs.
    """
    if kind == "onnx" and (missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if not find_spec(name)]):
        raise ConfigError(
            f"missing packages: {', '.join(missing)}",
            where="--format onnx",
            hint="run pip install 'apex-harness[onnx]', or use --format torch_export",
        )
    config = trained_run.configuration(run, overrides, trust)
    out = out or run / f"model{SUFFIX[kind]}"
    require_output(out, trained_run.inputs(config), also=".json")
    task = build.open_task(config, Runtime())
    if isinstance(task, SupportsLearned) and task.learned != trained_run.learned(run):
        raise ConfigError(
            "the classes or the image size of the training data differ from the run's task.json",
            where=str(run),
            hint="restore the files that changed after the training",
        )
    subject = _subject(run, config, task)
    try:
        with replacing(out) as temporary:
            load = {"safetensors": _safetensors, "torch_export": _torch_export, "onnx": _onnx}[kind](
                subject, temporary, config, task
            )
            difference = _compare(subject, load, kind)
        facts = _facts(config, task, subject, kind, difference)
        write_atomically(out.with_name(out.name + ".json"), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    except (OSError, SafetensorError) as error:
        raise output_error(out, error) from None
    log.info(
        "%s: outputs differ by at most %.2g (allowed: %g); %s.json describes inputs and outputs",
        out, difference, TOLERANCE[kind], out.name,
    )  # fmt: skip
    if kind == "safetensors":
        log.info("the exported file has the same tensors as %s, in float32", trained_run.weights(run))
    return out


def _subject(run: Path, config: Config, task: OpenedTask) -> Exported:
    model = build.build_model(config, task)
    trained_run.load(model, trained_run.best(run), run)
    signature = _signature(task)
    batches, start = [], 0
    for size in CHECK_ROWS:
        rows = np.arange(start, start + size) % len(task.eval)
        batches.append(task.prepare(task.eval.batch(rows, None).inputs))
        start += size
    return Exported(model.float().eval(), signature.get("input", "inputs"), signature.get("output", "outputs"), batches)


def _signature(task: OpenedTask) -> dict[str, Any]:
    return dict(task.signature) if isinstance(task, SupportsSignature) else {}


def _safetensors(subject: Exported, path: Path, config: Config, task: OpenedTask) -> Callable[[Tensor], Tensor]:
    """The weights alone; loading them needs the model's code."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in subject.model.state_dict().items()}
    metadata = {"model": config.model.name, "args": json.dumps(config.model.args)}
    save_weights(tensors, path, metadata, work=temporary_for(path))
    loaded = build.build_model(config, task).eval()
    loaded.load_state_dict(load_weights(path))
    return loaded


def _torch_export(subject: Exported, path: Path, config: Config, task: OpenedTask) -> Callable[[Tensor], Tensor]:
    program = _traced(subject, task)
    # Through a file object, since torch.export rejects names that do not end in .pt2.
    with open(path, "wb") as file:
        torch.export.save(program, file)
    with open(path, "rb") as file:
        loaded: Callable[[Tensor], Tensor] = torch.export.load(file).module()
    return loaded


def _onnx(subject: Exported, path: Path, config: Config, task: OpenedTask) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    program = torch.onnx.export(
        _traced(subject, task), input_names=[subject.input], output_names=[subject.output], dynamo=True, verbose=False
    )
    assert program is not None  # with dynamo
    program.save(str(path), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def loaded(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run([subject.output], {subject.input: inputs.numpy()})[0])

    return loaded


def _traced(subject: Exported, task: OpenedTask) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(subject.model, (subject.batches[0],), dynamic_shapes=(_sizes(task),), strict=False)
    except Exception as error:  # of many types
        reason = first_line(error)
        raise HarnessError(
            f"torch.export cannot trace this model: {reason}",
            hint="remove branches on tensor values from forward, or use --format safetensors, which needs no tracing",
        ) from error


def _sizes(task: OpenedTask) -> dict[int, Any]:
    """The dimensions of the input that may have another size."""
    length = {1: torch.export.Dim("length")} if _signature(task).get("variable_length") else {}
    return {0: torch.export.Dim("batch"), **length}


def _compare(subject: Exported, load: Callable[[Tensor], Tensor], kind: str) -> float:
    """The largest difference on real rows, relative to the largest output, or to 1 if that is larger."""
    worst = 0.0
    for inputs in subject.batches:
        with torch.no_grad():
            expected, found = subject.model(inputs), load(inputs)
        if found.shape != expected.shape:
            raise HarnessError(
                f"the exported model's output has shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
            )
        scale = max(1.0, expected.abs().max().item())
        worst = max(worst, (found - expected).abs().max().item() / scale)
    if not worst <= TOLERANCE[kind]:  # true for NaN, too
        raise HarnessError(
            f"the exported model's outputs differ from the original's by {worst:.2g} on real rows (allowed: "
            f"{TOLERANCE[kind]:g})",
            hint="nothing was written; --format safetensors stores the exact weights",
        )
    return worst


def _facts(config: Config, task: OpenedTask, subject: Exported, kind: str, difference: float) -> dict[str, Any]:
    example = subject.batches[0]
    with torch.no_grad():
        outputs = subject.model(example)

    def described(name: str, tensor: Tensor) -> dict[str, Any]:
        return {
            "name": name,
            "type": str(tensor.dtype).removeprefix("torch."),
            "shape": ["batch", *tensor.shape[1:]],
        }

    inputs = described(subject.input, example)
    if _signature(task).get("variable_length"):
        inputs["shape"][1] = "length"

    left_out = ("input", "output", "variable_length")
    described_by_task = {key: value for key, value in _signature(task).items() if key not in left_out}
    return {
        "name": config.name,
        "format": kind,
        "model": {"name": config.model.name, "args": config.model.args},
        "inputs": [inputs],
        "outputs": [described(subject.output, outputs)],
        **described_by_task,
        "checked": {
            "rows": sum(CHECK_ROWS),
            "largest_difference": difference,
            "allowed": TOLERANCE[kind],
            "of": "the largest output, or 1",
        },
        "torch": torch.__version__,
    }
