"""Models of Hugging Face's transformers (``hf:FOLDER_OR_NAME``): building them, and their published weights."""

from __future__ import annotations

import inspect
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
from harness.runs.files import read_json
from harness.training.model.libraries.base import KEY, PRETRAINED, WeightsFile

PROCESSOR = "preprocessor_config.json"
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
        keyword_inputs = {"pixel_values": inputs}
        if not inputs.is_floating_point():
            keyword_inputs = dict(zip(self.token_inputs, inputs.unbind(-1), strict=True)) if inputs.dim() == 3 else {
                "input_ids": inputs, "attention_mask": (inputs != 0).long()
            }  # fmt: skip
            accepted = inspect.signature(super().forward).parameters
            keyword_inputs = {name: value for name, value in keyword_inputs.items() if name in accepted}
        logits: Tensor = super().forward(**keyword_inputs).logits
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
    inputs, kinds = ("texts", transformers.AutoModelForSequenceClassification)
    if num_tokens is None:
        inputs, kinds = ("images", transformers.AutoModelForImageClassification)
    if type(config) not in kinds._model_mapping:
        raise ConfigError(
            f"{name} is a model of type {config.model_type}, for which transformers has no classification of {inputs}",
            where="model.name",
            hint=f"use a model for {inputs}, such as one of type {'bert' if num_tokens else 'vit'}",
        )
    if tokenizer is not None:  # where a decoder finds the last token; its file may have none, or another
        config.pad_token_id = tokenizer.tokenizer.pad_token_id
    is_own = tokenizer is not None and tokenizer.tokenizer.name_or_path == str(hub.folder(name, "model.name"))
    _require_inputs(name, config, in_channels, num_tokens, is_own)
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
    attributes = {"token_inputs": tokenizer.inputs if tokenizer else (), "__module__": type(model).__module__}
    model.__class__ = type(type(model).__name__, (OneTensor, type(model)), attributes)
    built: nn.Module = model.train()
    return built


def _configuration(name: str, num_classes: int, args: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    path = hub.folder(name, "model.name")
    for key in _NO_ARGS.keys() & args.keys():
        reason, hint = _NO_ARGS[key]
        raise ConfigError(f"{key} {reason}", where=f"model.args.{key}", hint=hint)
    try:
        with quiet():  # about other names of classes
            config, unknown = AutoConfig.from_pretrained(
                str(path), return_unused_kwargs=True, trust_remote_code=False, num_labels=num_classes, **args
            )
    except Exception as error:  # of many types
        raise ConfigError(
            f"{path / hub.CONFIG} cannot be used: {first_line(error)}",
            where="model.args" if args else "model.name",
            hint="give a folder that save_pretrained wrote; code of the folder's own is not run",
        ) from None
    if config.model_type == "timm_wrapper":
        hint = f"set model.name=timm:{config.architecture} model.weights={name}"
        raise ConfigError(f"{name} is a model of timm", where="model.name", hint=hint)
    if unknown:
        key, settings = next(iter(unknown)), config.to_dict()
        nearest = similar(key, settings)
        hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(sorted(settings))}"
        raise ConfigError(f"{type(config).__name__} has no setting {key}", where=f"model.args.{key}", hint=hint)
    return config


def _require_inputs(
    name: str, config: Any, in_channels: int | None, num_tokens: int | None, own_tokenizer: bool
) -> None:
    places = getattr(config, "vocab_size", None)
    if num_tokens is not None and places is not None and num_tokens > places:
        raise ConfigError(
            f"the tokenizer has {num_tokens:,} ids, but {name} only {places:,}",
            where="task.tokenizer.name",
            hint="give the model one embedding per token, and save it again: "
            "model.resize_token_embeddings(len(tokenizer)); model.save_pretrained(FOLDER)"
            if own_tokenizer
            else f"use the tokenizer of the model: task.tokenizer.name={name}",
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
        return WeightsFile(chosen, file, statistics(chosen), partial(weights_in, file), classes(chosen))

    return get


def weights_in(file: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights in ``file``, of ``hub.weights``, that ``model`` has too, by their names in it.

    transformers reads them, which knows the names of older versions. Weights of another shape are without values.
    Raises ConfigError.
    """
    model_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, OneTensor))
    try:
        with quiet():
            pretrained, loading = model_class.from_pretrained(
                str(file.parent), config=model.config, dtype=torch.float32, output_loading_info=True,
                ignore_mismatched_sizes=True, use_safetensors="safetensors" in file.name, local_files_only=True,
            )  # fmt: skip
    except Exception as error:  # of many types
        hint = "copy or download it again, or set model.weights=FILE"
        is_code = "weights_only" in str(error)
        problem = "they hold more than tensors and could run code" if is_code else first_line(error)
        raise ConfigError(f"its weights cannot be read: {problem}", where=str(file), hint=hint) from None
    mismatched = {key: torch.empty(shape, device="meta") for key, shape, _ in loading["mismatched_keys"]}
    state, missing = pretrained.state_dict(), loading["missing_keys"]
    return {key: mismatched.get(key, value) for key, value in state.items() if key not in missing}


def classes(name: str) -> list[str]:
    """Return the names of the model's outputs; empty if it has none but generic ones."""
    try:
        labels = read_json(hub.folder(name, "model.name") / hub.CONFIG)["id2label"]
        names = [str(labels[str(number)]) for number in range(len(labels))]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [] if all(each in (f"LABEL_{number}", str(number)) for number, each in enumerate(names)) else names


def statistics(name: str) -> tuple[Any, Any] | None:
    """Return the mean and the standard deviation of the images that the model expects; None if they are not known."""
    try:
        processor = read_json(hub.folder(name, "model.name") / PROCESSOR)
        return processor["image_mean"], processor["image_std"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def quiet() -> Iterator[None]:
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
