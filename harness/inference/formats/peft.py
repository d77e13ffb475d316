"""A folder that ``from_pretrained`` of peft loads, with the tokenizer: the matrices of LoRA, and the modules that the
run's folder or name of Hugging Face does not have.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.places import HUB
from harness.data import hub
from harness.errors import ConfigError
from harness.inference.formats import base, huggingface
from harness.runs.files import expanded
from harness.training.model import lora, module_names
from harness.training.model.libraries import hf
from harness.training.model.libraries.base import KEY

_PEFT = "--format peft"


class Format(base.ExportFormat):
    suffix, tolerance, folder = ".peft", 1e-5, True
    packages, extra = ("transformers", "peft"), "huggingface"

    def to_units(self, subject: base.Exported, mean: Tensor, std: Tensor) -> bool:
        return huggingface.to_units(subject.model, mean, std, adapter=True)

    def write(self, subject: base.Exported, path: Path) -> base.Function:
        """Raises ConfigError if it is not a model of transformers with LoRA on the weights of ``model.name``."""
        model, name = subject.model, str(subject.facts["name"])
        kind: Any = type(model)
        if not issubclass(kind, hf.OneTensor):
            hint = "train with model.name=hf:FOLDER_OR_NAME and model.lora.r=8, or use --format safetensors"
            raise ConfigError("the model is none of transformers", where=_PEFT, hint=hint)
        if not lora.adapted(model):
            hint = "train with model.lora.r=8, or use --format huggingface"
            raise ConfigError("the model has no matrices of LoRA", where=_PEFT, hint=hint)
        import peft

        plain: Any = copy.deepcopy(model)
        settings, state = plain.peft_config.pop("default"), plain.state_dict()
        layers, whole = _adapter_parts(model, name)
        lora.merge(plain, removed=layers)
        del plain.peft_config
        plain.__class__ = inner = kind.__mro__[2]
        place, _, revision = name.removeprefix(HUB).partition("@")
        folder = expanded(name.removeprefix(HUB))
        if subject.tokenizer is not None:
            settings.task_type, by_peft = peft.TaskType.SEQ_CLS, ("classifier", "score")  # which it saves anyway
            whole = [each for each in whole if each not in by_peft]
        settings.target_modules, settings.modules_to_save = layers, whole
        settings.revision = None if folder.is_dir() else revision or None
        plain.name_or_path = settings.base_model_name_or_path = str(folder.resolve()) if folder.is_dir() else place
        with hf.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft about transformers
            wrapped = peft.get_peft_model(plain, settings)
            matrices = {f"base_model.model.{each}": state[each] for each in state if module_names.LORA in each}
            known = matrices.keys() & wrapped.state_dict()
            wrapped.load_state_dict({each: matrices[each] for each in known}, strict=False)
            wrapped.save_pretrained(path, save_embedding_layers=False)
            padding = None if subject.tokenizer is None else plain.config.pad_token_id
            what = f"An adapter of peft, without names of classes, for `{settings.base_model_name_or_path}`"
            load = _loading(str(settings.base_model_name_or_path), subject.signature, padding)
            huggingface.write_readme(path, what, load, subject.metrics)  # peft's has no content
            huggingface.save_inputs(path, subject.signature.get("preprocessing", {}), subject.tokenizer)
            below = inner.from_pretrained(
                str(hub.folder(name, "model.name")), config=model.config, dtype=torch.float32, local_files_only=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
            loaded = peft.PeftModel.from_pretrained(below, str(path)).get_base_model()
        loaded.__class__ = kind
        ready: nn.Module = loaded.eval()
        return ready


def _loading(base: str, signature: Mapping[str, Any], padding: int | None) -> list[str]:
    """Return the expressions that load an adapter of ``base``, which has no place for names of classes and, of texts,
    the id of the ``padding``."""
    given = f"id2label={dict(enumerate(map(str, signature.get('classes') or signature.get('columns') or ())))!r}"
    kind = "AutoModelForImageClassification"
    if padding is not None:
        kind, given = "AutoModelForSequenceClassification", f"pad_token_id={padding}, {given}"
    load = f"peft.AutoPeftModelForSequenceClassification.from_pretrained('FOLDER', {given})"
    on_base = f"peft.PeftModel.from_pretrained(transformers.{kind}.from_pretrained({base!r}, {given}), 'FOLDER')"
    return [load, on_base] if padding is not None else [on_base]


def _adapter_parts(model: nn.Module, name: str) -> tuple[list[str], list[str]]:
    """Return (the layers of ``model`` whose matrices an adapter of ``hf:FOLDER_OR_NAME`` has, the modules that it has
    whole, because they differ from those there). Raises ConfigError if other weights do."""
    state = model.state_dict()
    own = {each.replace(lora.BASE_LAYER, "."): value for each, value in state.items() if module_names.LORA not in each}
    try:
        found = hf.weights_in(hub.weights(name, KEY), model)
    except ConfigError as error:  # such as of the copy in the run folder, which has no weights
        hint = "type where the model is now: model.name=hf:FOLDER_OR_NAME"
        raise ConfigError(error.message, where="model.name", hint=hint) from None
    there = {each: value for each, value in found.items() if value.shape == own[each].shape}
    changed = {each for each, value in own.items() if each not in there or not torch.equal(value, there[each])}
    modules = {each.rpartition(".")[0] for each in changed}
    whole = sorted(each for each in modules if not module_names.is_within(each, [*modules - {each}]))
    layers = [each for each in lora.adapted(model) if not module_names.is_within(each, whole)]
    if not layers or any(each.rpartition(".")[0] in lora.adapted(model) for each in changed & there.keys()):
        what = f"the weights beside the matrices are not those of {name}: the run started from others, or rounded them"
        hint = (
            "use --format huggingface, which needs no other weights; for an adapter after model.weights=RUN, type "
            "harness export RUN --format huggingface --out FOLDER, and train from model.name=hf:FOLDER"
        )
        raise ConfigError(what, where=_PEFT, hint=hint)
    return layers, whole
