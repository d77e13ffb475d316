"""Models of Hugging Face's transformers (``hf:FOLDER_OR_NAME``): building them, and their published weights."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.places import HUB
from harness.data import hub
from harness.data.hub import HubTokenizer
from harness.errors import ConfigError, first_line, similar
from harness.runs.files import expanded, read_json
from harness.training.models import lora
from harness.training.models.libraries.base import KEY, PRETRAINED, WeightsFile

_PROCESSOR = "preprocessor_config.json"
_PEFT = "--format peft"
_NO_ARGS = {  # what from_pretrained takes: why model.args does not, and what to do
    **dict.fromkeys(
        ("num_labels", "id2label", "label2id"),
        ("is set by the task", "remove it: the number of outputs and their names follow from the labels"),
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), ("is not the precision of the training", "set precision.opt_level")),
    "trust_remote_code": ("is not for us: code of the folder's own is not run", "use a model that transformers has"),
    "revision": ("is a part of the name", "set model.name=hf:OWNER/NAME@REVISION"),
}


class OneTensor(nn.Module):
    """Lets a model of transformers take the inputs of a batch as one tensor, and return its logits. ``build`` puts it
    before the model's own class, so that the weights keep their names."""

    token_inputs: tuple[str, ...] = ()

    def forward(self, inputs: Tensor) -> Tensor:
        named = {"pixel_values": inputs}
        if not inputs.is_floating_point():
            named = dict(zip(self.token_inputs, inputs.unbind(-1), strict=True)) if inputs.dim() == 3 else {
                "input_ids": inputs, "attention_mask": (inputs != 0).long()
            }  # fmt: skip
            accepted = inspect.signature(super().forward).parameters
            named = {name: value for name, value in named.items() if name in accepted}
        logits: Tensor = super().forward(**named).logits
        return logits


def maker(name: str) -> Callable[..., nn.Module]:
    hub.require("transformers", "model.name")
    return partial(build, name)


def arguments(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: known[key] for key in known if key in inspect.signature(build).parameters}


def build(
    name: str,
    num_classes: int,
    in_channels: int | None = None,
    num_tokens: int | None = None,
    tokenizer: HubTokenizer | None = None,
    **args: Any,
) -> nn.Module:
    """Return the model with ``num_classes`` outputs, for texts if ``num_tokens`` is given, else for images; ``args``
    change its configuration. Raises ConfigError."""
    import transformers

    config = _configuration(name, num_classes, args)
    what, kinds = ("texts", transformers.AutoModelForSequenceClassification)
    if num_tokens is None:
        what, kinds = ("images", transformers.AutoModelForImageClassification)
    if type(config) not in kinds._model_mapping:
        raise ConfigError(
            f"{name} is a model of type {config.model_type}, for which transformers has no classification of {what}",
            where="model.name",
            hint=f"use a model for {what}, such as one of type {'bert' if num_tokens else 'vit'}",
        )
    if tokenizer is not None:  # where a decoder finds the last token; its file may have none, or another
        config.pad_token_id = tokenizer.tokenizer.pad_token_id
    _require_inputs(name, config, in_channels, num_tokens)
    try:
        model: Any = kinds.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ImportError as error:  # of what the model's module imports
        from harness.data import vision

        vision.torchvision("io")  # one that does not fit torch has its own error
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        raise ConfigError(
            f"transformers cannot import {name}: {first_line(cause)}",
            where="model.name",
            hint=f"install the package of {missing}, such as with: pip install {missing.partition('.')[0]}"
            if missing
            else "harness doctor shows the versions that are installed",
        ) from error
    known = {"token_inputs": tokenizer.inputs if tokenizer else (), "__module__": type(model).__module__}
    model.__class__ = type(type(model).__name__, (OneTensor, type(model)), known)
    built: nn.Module = model.train()
    return built


def _configuration(name: str, num_classes: int, args: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    path = hub.folder(name, "model.name")
    for key in _NO_ARGS.keys() & args.keys():
        why, hint = _NO_ARGS[key]
        raise ConfigError(f"{key} {why}", where=f"model.args.{key}", hint=hint)
    try:
        with _quiet():  # about other names of classes
            config, unknown = AutoConfig.from_pretrained(
                str(path), return_unused_kwargs=True, trust_remote_code=False, num_labels=num_classes, **args
            )
    except Exception as error:  # of many types
        raise ConfigError(
            f"{path / hub.CONFIG} cannot be used: {first_line(error)}",
            where="model.args" if args else "model.name",
            hint="give a folder that save_pretrained wrote; code of the folder's own is not run",
        ) from None
    if unknown:
        key, settings = next(iter(unknown)), config.to_dict()
        near = similar(key, settings)
        hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(settings))}"
        raise ConfigError(f"{type(config).__name__} has no setting {key}", where=f"model.args.{key}", hint=hint)
    return config


def _require_inputs(name: str, config: Any, in_channels: int | None, num_tokens: int | None) -> None:
    places = getattr(config, "vocab_size", None)
    if num_tokens is not None and places is not None and num_tokens > places:
        raise ConfigError(
            f"the tokenizer has {num_tokens:,} ids, but {name} only {places:,}",
            where="task.tokenizer.name",
            hint=f"use the tokenizer of the model: task.tokenizer.name={name}",
        )
    channels: Any = getattr(config, "num_channels", in_channels)
    if in_channels is not None and channels != in_channels:
        color: str = {1: "gray", 3: "rgb"}.get(channels, "")
        first = f"task.color={color}, if the task has this setting, or " if color else ""
        raise ConfigError(
            f"{name} takes images of {channels} channels, but the task has {in_channels}",
            where="model.name",
            hint=f"set {first}model.args.num_channels={in_channels}",
        )


def published(weights: str, name: str) -> Callable[[], WeightsFile]:
    chosen = name if weights in PRETRAINED else weights
    if not chosen.startswith(HUB):
        hint = "give a weights file, a run folder, a URL, or hf:FOLDER_OR_NAME"
        raise ConfigError(f"no such file: {weights}", where=KEY, hint=hint)

    def get() -> WeightsFile:
        file = hub.weights(chosen, KEY)
        return WeightsFile(chosen, file, statistics(chosen), partial(_weights, file))

    return get


def _weights(file: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights in ``file``, of ``hub.weights``, that ``model`` has too, by their names in it.

    transformers reads them, which knows the names of older versions. Weights of another shape are without values.
    Raises ConfigError.
    """
    own: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, OneTensor))
    try:
        with _quiet():
            there, found = own.from_pretrained(
                str(file.parent), config=model.config, dtype=torch.float32, output_loading_info=True,
                ignore_mismatched_sizes=True, use_safetensors="safetensors" in file.name, local_files_only=True,
            )  # fmt: skip
    except Exception as error:  # of many types
        hint = "copy or download it again, or set model.weights=FILE"
        why = "they hold more than tensors and could run code" if "weights_only" in str(error) else first_line(error)
        raise ConfigError(f"its weights cannot be read: {why}", where=str(file), hint=hint) from None
    other = {key: torch.empty(shape, device="meta") for key, shape, _ in found["mismatched_keys"]}
    return {key: other.get(key, t) for key, t in there.state_dict().items() if key not in found["missing_keys"]}


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


def save(model: nn.Module, path: Path, signature: Mapping[str, Any], tokenizer: Any) -> Callable[[Tensor], Tensor]:
    """Write ``model``, with matrices of LoRA added to its weights, and its ``tokenizer`` into the folder ``path``;
    return the model that from_pretrained loads there. Raises ConfigError if it is not a model of transformers."""
    adapted: Any = type(model)
    if not issubclass(adapted, OneTensor):
        hint = "train with model.name=hf:FOLDER_OR_NAME, or use --format safetensors"
        raise ConfigError("the model is none of transformers", where="--format huggingface", hint=hint)
    plain: Any = copy.deepcopy(model)
    lora.merge(plain)
    plain.__class__ = own = adapted.__mro__[2]
    names = list(map(str, signature.get("classes") or signature.get("columns") or ()))
    if names:
        plain.config.id2label = dict(enumerate(names))
        plain.config.label2id = {name: n for n, name in enumerate(names)}
    scale = signature.get("postprocessing", {})
    plain.config.problem_type = "multi_label_classification" if scale else "single_label_classification"
    if "columns" in signature:
        plain.config.problem_type = "regression"
    if "columns" in signature and scale:
        plain.config.output_mean, plain.config.output_std = scale["mean"], scale["std"]
    with _quiet():
        plain.save_pretrained(path)
        _save_inputs(path, signature.get("preprocessing", {}), tokenizer)
        loaded: Any = own.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    loaded.__class__ = adapted
    there: nn.Module = loaded.eval()
    return there


def save_adapter(
    model: nn.Module, path: Path, name: str, signature: Mapping[str, Any], tokenizer: Any
) -> Callable[[Tensor], Tensor]:
    """Write the matrices of LoRA of ``model``, the modules that ``hf:FOLDER_OR_NAME`` does not have, and the
    ``tokenizer`` into the folder ``path``; return the model that peft loads there. Raises ConfigError."""
    kind: Any = type(model)
    if not (issubclass(kind, OneTensor) and lora.adapted(model)):
        what, hint = ("has no matrices of LoRA", "model.lora.r=8") if issubclass(kind, OneTensor) else (
            "is none of transformers", "model.name=hf:FOLDER_OR_NAME and model.lora.r=8"
        )  # fmt: skip
        hint = f"train with {hint}, or use --format {'huggingface' if issubclass(kind, OneTensor) else 'safetensors'}"
        raise ConfigError(f"the model {what}", where=_PEFT, hint=hint)
    import peft

    plain: Any = copy.deepcopy(model)
    settings, state = plain.peft_config.pop("default"), plain.state_dict()
    layers, whole = _adapter_parts(model, name)
    lora.merge(plain, removed=layers)
    del plain.peft_config
    plain.__class__ = inner = kind.__mro__[2]
    place, _, revision = name.removeprefix(HUB).partition("@")
    folder = expanded(name.removeprefix(HUB))
    if tokenizer is not None:
        settings.task_type, by_peft = peft.TaskType.SEQ_CLS, ("classifier", "score")  # which it saves anyway
        whole = [each for each in whole if each not in by_peft]
    settings.target_modules, settings.modules_to_save = layers, whole
    settings.revision = None if folder.is_dir() else revision or None
    plain.name_or_path = settings.base_model_name_or_path = str(folder.resolve()) if folder.is_dir() else place
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers
        wrapped = peft.get_peft_model(plain, settings)
        matrices = {f"base_model.model.{each}": state[each] for each in state if f".{lora.PART}" in each}
        wrapped.load_state_dict({each: matrices[each] for each in matrices.keys() & wrapped.state_dict()}, strict=False)
        wrapped.save_pretrained(path, save_embedding_layers=False)
        padding = None if tokenizer is None else plain.config.pad_token_id
        _write_readme(path, str(settings.base_model_name_or_path), signature, padding)
        _save_inputs(path, signature.get("preprocessing", {}), tokenizer)
        base = inner.from_pretrained(
            str(hub.folder(name, "model.name")), config=model.config, dtype=torch.float32, local_files_only=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        loaded = peft.PeftModel.from_pretrained(base, str(path)).get_base_model()
    loaded.__class__ = kind
    ready: nn.Module = loaded.eval()
    return ready


def _write_readme(path: Path, base: str, signature: Mapping[str, Any], padding: int | None) -> None:
    """Replace peft's page without content. An adapter has no place for names of classes and, of texts, the id of the
    ``padding``, so the page has them."""
    given = f"id2label={dict(enumerate(map(str, signature.get('classes') or signature.get('columns') or ())))!r}"
    kind = "AutoModelForImageClassification"
    if padding is not None:
        kind, given = "AutoModelForSequenceClassification", f"pad_token_id={padding}, {given}"
    load = f"peft.AutoPeftModelForSequenceClassification.from_pretrained('FOLDER', {given})"
    on_base = f"peft.PeftModel.from_pretrained(transformers.{kind}.from_pretrained({base!r}, {given}), 'FOLDER')"
    load = f"{load}\n\nOr on the model that you load:\n\n    {on_base}" if padding is not None else on_base
    text = f"An adapter of peft for `{base}`, trained by apex-harness.\n\nIt has no names of classes: give them.\n\n"
    (path / "README.md").write_text(f"{text}    {load}\n", encoding="utf-8")


def _adapter_parts(model: nn.Module, name: str) -> tuple[list[str], list[str]]:
    """Return (the layers of ``model`` whose matrices an adapter of ``hf:FOLDER_OR_NAME`` has, the modules that it has
    whole, because they differ from those there). Raises ConfigError if other weights do."""
    state = model.state_dict()
    own = {each.replace(lora.BASE, "."): value for each, value in state.items() if f".{lora.PART}" not in each}
    try:
        found = _weights(hub.weights(name, KEY), model)
    except ConfigError as error:  # such as of the copy in the run folder, which has no weights
        hint = "type where the model is now: model.name=hf:FOLDER_OR_NAME"
        raise ConfigError(error.message, where="model.name", hint=hint) from None
    there = {each: value for each, value in found.items() if value.shape == own[each].shape}
    changed = {each for each, value in own.items() if each not in there or not torch.equal(value, there[each])}
    modules = {each.rpartition(".")[0] for each in changed}
    whole = sorted(each for each in modules if not lora.inside(each, [*modules - {each}]))
    layers = [each for each in lora.adapted(model) if not lora.inside(each, whole)]
    if not layers or any(each.rpartition(".")[0] in lora.adapted(model) for each in changed & there.keys()):
        what = f"the weights beside the matrices are not those of {name}: the run started from others, or rounded them"
        raise ConfigError(what, where=_PEFT, hint="use --format huggingface, which needs no other weights")
    return layers, whole


def _save_inputs(path: Path, facts: Mapping[str, Any], tokenizer: Any) -> None:
    """Write the ``tokenizer``, with the length of the task, or the preprocessing of images into the folder ``path``."""
    if tokenizer is not None:
        own = copy.deepcopy(tokenizer)
        hub.without_lengths(own)
        own.model_max_length = facts["max_length"]
        own.save_pretrained(path)
    if processor := _processor(facts):
        (path / _PROCESSOR).write_text(json.dumps(processor, indent=1) + "\n", encoding="utf-8")


def _processor(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of square images as transformers writes it; empty for texts and for other
    preprocessing."""
    size = facts.get("size", ())
    if len(size) != 2 or size[0] != size[1] or "transforms" in facts or "mean" not in facts:
        return {}
    return {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": facts.get("color") == "rgb",
        "do_resize": True, "size": {"shortest_edge": size[0]}, "resample": 2,
        "do_center_crop": True, "crop_size": {"height": size[0], "width": size[1]},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": facts["mean"], "image_std": facts["std"],
    }  # fmt: skip


def statistics(name: str) -> tuple[Any, Any] | None:
    """Return the mean and the standard deviation of the images that the model expects; None if they are not known."""
    try:
        facts = read_json(hub.folder(name, "model.name") / _PROCESSOR)
        return facts["image_mean"], facts["image_std"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which transformers prints neither warnings nor progress: the harness names what is not loaded."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
