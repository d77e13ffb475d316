"""A folder that ``from_pretrained`` of transformers loads, with the tokenizer, and LoRA added to the weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.data import hub
from harness.errors import ConfigError
from harness.inference.formats import base
from harness.training.model import lora
from harness.training.model.libraries import hf


class Format(base.ExportFormat):
    suffix, tolerance, folder = ".huggingface", 1e-5, True
    packages, extra = ("transformers",), "huggingface"

    def scale_place(self, out: Path) -> tuple[object, str]:
        return out / "config.json", "output_"

    def to_units(self, subject: base.Exported, mean: Tensor, std: Tensor) -> bool:
        return to_units(subject.model, mean, std)

    def write(self, subject: base.Exported, path: Path) -> base.Function:
        """Raises ConfigError if it is not a model of transformers."""
        adapted: Any = type(subject.model)
        if not issubclass(adapted, hf.OneTensor):
            hint = "train with model.name=hf:FOLDER_OR_NAME, or use --format safetensors"
            raise ConfigError("the model is none of transformers", where="--format huggingface", hint=hint)
        plain: Any = copy.deepcopy(subject.model)
        lora.merge(plain)
        plain.__class__ = own = adapted.__mro__[2]
        names = list(map(str, subject.signature.get("classes") or subject.signature.get("columns") or ()))
        if names:
            plain.config.id2label = dict(enumerate(names))
            plain.config.label2id = {name: n for n, name in enumerate(names)}
        scale = subject.signature.get("postprocessing", {})
        plain.config.problem_type = "multi_label_classification" if scale else "single_label_classification"
        if "columns" in subject.signature:
            plain.config.problem_type = "regression"
        if "columns" in subject.signature and scale:
            plain.config.output_mean, plain.config.output_std = scale["mean"], scale["std"]
        with hf.quiet():
            plain.save_pretrained(path)
            save_inputs(path, subject.signature.get("preprocessing", {}), subject.tokenizer)
            tokenizer = ["transformers.AutoTokenizer.from_pretrained('FOLDER')"] if subject.tokenizer else []
            load = [f"transformers.{own.__name__}.from_pretrained('FOLDER')", *tokenizer]
            write_readme(path, f"A model of transformers, from `{subject.facts['name']}`", load, subject.metrics)
            loaded: Any = own.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
        loaded.__class__ = adapted
        there: nn.Module = loaded.eval()
        return there


def to_units(model: nn.Module, mean: Tensor, std: Tensor, adapter: bool = False) -> bool:
    """Let the last layer of ``model`` return numbers times ``std`` plus ``mean``, and add matrices of LoRA to the
    weights, for an ``adapter`` only there; return False if it is no linear layer with a bias."""
    heads = lora.last_layers(model)
    lora.merge(model, within=heads if adapter else None)
    layers = [module for head in heads for module in model.get_submodule(head).modules()]
    last = next((layer for layer in reversed(layers) if next(layer.parameters(recurse=False), None) is not None), None)
    if type(last) is not nn.Linear or last.out_features != len(std) or last.bias is None:
        return False
    with torch.no_grad():
        last.weight.copy_(last.weight.double() * std.double()[:, None])
        last.bias.copy_(last.bias.double() * std.double() + mean.double())
    return True


def write_readme(path: Path, what: str, load: Sequence[str], metrics: Mapping[str, float]) -> None:
    """Write the page of the folder ``path``: ``what`` it has, the expressions that ``load`` it, and ``metrics``."""
    code = "\n\n".join(f"    {line}" for line in load)
    values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    shown = f"Validation: {values}\n\n" if values else ""
    (path / "README.md").write_text(f"{what}, trained by apex-harness.\n\n{shown}{code}\n", encoding="utf-8")


def save_inputs(path: Path, facts: Mapping[str, Any], tokenizer: Any) -> None:
    """Write the ``tokenizer``, with the length of the task, or the preprocessing of images into the folder ``path``."""
    if tokenizer is not None:
        own = copy.deepcopy(tokenizer)
        hub.without_lengths(own)
        own.model_max_length = facts["max_length"]
        own.save_pretrained(path)
    if processor := _processor(facts):
        (path / hf.PROCESSOR).write_text(json.dumps(processor, indent=1) + "\n", encoding="utf-8")


def _processor(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of images to a square as transformers writes it; empty for texts and for other
    preprocessing."""
    size = facts.get("size", ())
    if len(size) != 2 or size[0] != size[1] or "transforms" in facts or "mean" not in facts:
        return {}
    return {
        "image_processor_type": "PerceiverImageProcessor",  # crops before it resizes, by the ratio of both sizes
        "do_convert_rgb": facts.get("color") == "rgb",
        "do_center_crop": True, "crop_size": {"height": size[0], "width": size[1]},
        "do_resize": True, "size": {"height": size[0], "width": size[1]}, "resample": 2,
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": facts["mean"], "image_std": facts["std"],
    }  # fmt: skip
