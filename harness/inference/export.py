"""Export a run's best weights as a file that other programs load, with a JSON file that describes it.

Before the file gets its name, it is loaded and its outputs on real rows are compared with the model's. Models are
exported in float32, regardless of the opt level, and accept any number of rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from harness.errors import ConfigError, DataError, HarnessError
from harness.inference.formats import base
from harness.inference.formats.base import Exported, Function
from harness.inference.trained_model import in_units, scale_of, with_training_data
from harness.runs import reader, trained_run
from harness.runs.console import working
from harness.runs.files import new_folder, output_error, replacing, require_output
from harness.training import build
from harness.training.model import model_builder
from harness.training.task import OpenedTask, SupportsSignature

if TYPE_CHECKING:
    from harness.config.schema import Config

log = logging.getLogger("harness")

CHECK_ROWS = (8, 3, 1)  # sizes of the batches of evaluation rows to compare


class CheckedRows(NamedTuple):
    """A batch of real inputs, and what the model makes of them."""

    inputs: Tensor
    outputs: Tensor


def export(run: Path, kind: str, out: Path | None, overrides: Sequence[str] = (), trust: bool = False) -> Path:
    """Write the best weights of ``run`` as ``kind`` to ``out``, and their description to ``out`` + ``.json``.

    ``trust``: see ``trained_run.configuration``.

    Raises HarnessError, and writes neither file, if the loaded file does not compute the same outputs.
    """
    form = base.find(kind)
    if missing := [name for name in form.packages if not find_spec(name)]:
        raise ConfigError(
            f"missing packages: {', '.join(missing)}",
            where=f"--format {kind}",
            hint=f"run pip install 'apex-harness[{form.extra}]', or use --format torch_export"
            if form.extra
            else f"run pip install {' '.join(missing)}",
        )
    config = trained_run.configuration(run, overrides, trust)
    out = out or run / f"model{form.suffix}"
    require_output(out, trained_run.texts_of_task(config), also=".json", folder=form.folder)
    trained_run.warn_if_unfinished(run, config)
    task = with_training_data(run, config)
    model = build.build_model(config, task)
    trained_run.load_into(model, trained_run.best_weights(run), run)
    samples = _samples(model.float().eval(), task)  # an error of the model's own code is not one of writing
    subject = replace(_subject(config, task, model, samples[0].inputs), metrics=_metrics(run, config))
    scale = scale_of(subject.signature)
    has_units = scale is not None and form.to_units(subject, *scale)
    if scale and has_units:
        mean, std = scale
        samples = [CheckedRows(inputs, outputs * std + mean) for inputs, outputs in samples]
        subject = replace(subject, signature=in_units(subject.signature))
    writing = new_folder if form.folder else replacing
    try:  # the description gets its name after the file that it describes
        with replacing(out.with_name(out.name + ".json")) as description, writing(out) as temporary:
            with working(f"exporting the model to {out.name}"):
                difference = _compare(samples, form.write(subject, temporary), form.tolerance)
            facts = {"name": config.name, "format": kind, **_facts(subject, samples, form.folder), **subject.signature}
            facts["checked"] = {
                "rows": sum(len(sample.inputs) for sample in samples),
                "largest_difference": difference,
                "allowed": form.tolerance,
                "of": "the largest output, or 1",
            }
            description.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise output_error(out, error) from None
    log.info(
        "%s: outputs differ by at most %.2g (allowed: %g); %s.json describes inputs and outputs",
        out, difference, form.tolerance, out.name,
    )  # fmt: skip
    if has_units:
        log.info("its numbers are in the unit of their column")
    elif scale:
        place, prefix = form.scale_place(out)
        log.info(
            "its numbers are standardized: multiply them by %sstd and add %smean, which are in %s",
            prefix, prefix, place,
        )  # fmt: skip
    if form.note:
        log.info(form.note, trained_run.weights_path(run))
    return out


def _subject(config: Config, task: OpenedTask, model: nn.Module, example: Tensor) -> Exported:
    signature: dict[str, Any] = dict(task.signature) if isinstance(task, SupportsSignature) else {}
    return Exported(
        model=model,
        new=lambda: build.build_model(config, task),
        facts={"name": model_builder.name_of(model), "args": config.model.args},
        input=signature.pop("input", "inputs"),
        output=signature.pop("output", "outputs"),
        example=example,
        max_length=signature.pop("max_length", None),
        signature=signature,
        tokenizer=getattr(getattr(task, "tokenizer", None), "tokenizer", None),
    )


def _metrics(run: Path, config: Config) -> dict[str, float]:
    """Return the metrics of validation with the best weights; empty if the run has no record of them."""
    summary = reader.read(run).summary
    step = reader.section(summary, "best").get("step")
    best: dict[str, float] = next((line for line in summary.get("history", ()) if line["step"] == step), {})
    return {name: best[name] for name in config.task.metrics if name in best}


def _samples(model: nn.Module, task: OpenedTask) -> list[CheckedRows]:
    """Return evaluation rows that can be read, the largest batch first."""
    samples, start = [], 0
    for size in CHECK_ROWS:
        batch = task.eval.batch(np.arange(start, start + size) % len(task.eval), None)
        start += size
        if len(batch):
            inputs = task.prepare(batch.inputs)
            with torch.no_grad():
                samples.append(CheckedRows(inputs, model(inputs)))
    if not samples:
        raise DataError(
            f"none of the first {start} validation rows can be read, on which the exported model is checked",
            where="task",
            hint="restore their files; task.on_bad_row=stop names the first",
        )
    return sorted(samples, key=lambda sample: -len(sample.inputs))


def _compare(samples: Sequence[CheckedRows], loaded: Function, tolerance: float) -> float:
    """Return the largest difference on real rows, relative to the largest output, or to 1 if that is larger. Raises
    HarnessError if it is not within ``tolerance``."""
    worst = 0.0
    for inputs, expected in samples:
        with torch.no_grad():
            found = loaded(inputs)
        if found.shape != expected.shape:
            raise HarnessError(
                f"the exported model's output has shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
            )
        finite = expected[expected.isfinite()].abs()
        scale = max(1.0, finite.max().item() if len(finite) else 0.0)
        gaps = (found - expected).abs().masked_fill(found == expected, 0.0)  # infinity, too, is equal to itself
        difference = gaps.max().item() / scale
        if not difference <= tolerance:  # true for NaN, too
            raise HarnessError(
                f"the exported model's outputs differ from the original's by {difference:.2g} on real rows (allowed: "
                f"{tolerance:g})",
                hint="nothing was written; --format safetensors stores the exact weights",
            )
        worst = max(worst, difference)
    return worst


def _facts(subject: Exported, samples: Sequence[CheckedRows], folder: bool) -> dict[str, object]:
    """Return the model and its tensors; for the ``folder`` of from_pretrained, those that a tokenizer there makes."""
    inputs, outputs = samples[0]
    length = ["length"] if subject.max_length is not None else []
    tensors = {
        "inputs": (subject.input, inputs, ["batch", *length, *inputs.shape[1 + len(length) :]]),
        "outputs": (subject.output, outputs, ["batch", *outputs.shape[1:]]),
    }
    described = {
        key: [{"name": name, "type": str(tensor.dtype).removeprefix("torch."), "shape": shape}]
        for key, (name, tensor, shape) in tensors.items()
    }
    if folder and subject.tokenizer is not None:
        names = subject.signature["preprocessing"]["last_dimension"]
        described["inputs"] = [{"name": name, "type": "int64", "shape": ["batch", "length"]} for name in names]
    return {"model": subject.facts, **described, "torch": torch.__version__}
