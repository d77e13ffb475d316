"""Build a model by name: built-in, torchvision's, timm's, or the user's own class."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from harness.config import plugins
from harness.config.places import HUB
from harness.distributed import machine
from harness.errors import ConfigError, argument_at_fault, first_line, of_part, plural, users_line
from harness.training.model.libraries import torchvision
from harness.training.model.libraries.base import Library
from harness.training.reproducibility import determinism

_OF_OWN_CODE = RuntimeError, LookupError, ArithmeticError, AttributeError  # in a model of the user's own: its fault


_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""By model, the name under which it was built."""


def build(
    name: str,
    args: Mapping[str, Any],
    known: Mapping[str, Any],
    example: Tensor,
    outputs: int | tuple[int, ...] | None = None,
    task: object = None,
) -> nn.Module:
    """Return the model ``name`` on the CPU in float32, in training mode.

    ``args`` are the keyword arguments of the configuration. ``known`` are the task's (num_classes, in_channels); the
    model gets those that its signature has. ``example`` is one prepared batch. It initializes lazy layers, and a model
    that cannot process it raises ConfigError here instead of crashing at the first step. So does one that does not
    return ``outputs`` numbers (or numbers of that shape) for each row; without it, a model may return anything.
    ``task``: its section, of whose settings a hint names those that change the example.
    """
    make, library = find(name)
    if library and args.get("pretrained"):
        hint = "remove it, and set model.weights=DEFAULT: published weights are a setting of their own"
        raise ConfigError("pretrained is no argument of the model", where="model.args.pretrained", hint=hint)
    accepted = inspect.signature(make).parameters
    by_task = library.arguments(known) if library else {key: known[key] for key in known if key in accepted}
    arguments = {**by_task, **args}
    takes = ", ".join(key for key in accepted if key not in ("args", "kwargs", "self"))
    built_in = library is not None or "." not in name
    try:
        inspect.signature(make).bind(**arguments)
        with _parameters_in_memory(name):
            model = make(**arguments)
    except (TypeError, ValueError, AssertionError, MemoryError, *_OF_OWN_CODE) as error:
        if isinstance(error, _OF_OWN_CODE) and not built_in and not _is_allocation(error):
            raise  # with its traceback: a fault in the user's own code
        with_arguments = f" with {', '.join(f'{key}={value!r}' for key, value in args.items())}" if args else ""
        raise ConfigError(
            f"cannot build model {name}{with_arguments}: {_reason(error)}",
            where=users_line(error) or argument_at_fault(error, args, "model.args") or "model.args",
            hint=f"it takes: {takes}",
        ) from None
    if not isinstance(model, nn.Module):
        message = f"{name} returns an object of type {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError(message, where="model.name", hint="return a torch.nn.Module from it")
    try_batch(model, name, example, outputs, task)
    _NAMES[model] = name
    return model


def name_of(model: nn.Module) -> str:
    """Return the name that ``build`` got for ``model``; of a model that a task made itself, its class."""
    return _NAMES.get(model, type(model).__name__.removeprefix("FSDP"))  # which fsdp adds


def require_memory(num_bytes: int, what: str, where: str, memory: machine.Memory | None = None) -> None:
    """Raise ConfigError, with the key ``where``, if ``num_bytes`` exceed the free ``memory``, by default this machine's
    now: the system would kill the process while it fills them."""
    total, free, _ = memory or machine.memory()
    if num_bytes > free:
        raise ConfigError(
            f"{what} take {num_bytes / 2**30:,.1f} GiB, but only {max(free, 0) / 2**30:,.1f} of this "
            f"machine's {total / 2**30:,.1f} GiB of memory is free",
            where=where,
            hint="use a smaller value",
        )


@contextlib.contextmanager
def _parameters_in_memory(name: str) -> Iterator[None]:
    """Context in which a model is built. It is refused once its weights exceed the memory that was free before: each is
    allocated when it is counted, but most of its pages are only taken when it is filled."""
    total, before = 0, machine.memory()

    def count(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        if parameter is not None and not isinstance(parameter, nn.UninitializedParameter) and not parameter.is_meta:
            total += parameter.numel() * parameter.element_size()
            require_memory(total, f"the weights of {name}", "model.args", before)

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _is_allocation(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _reason(error: Exception) -> str:
    """Return the first line of ``error``, without the place in torch's source."""
    size = re.search(r"tried to allocate (\d+) bytes", str(error))
    if _is_allocation(error):
        return f"not enough memory for {int(size[1]) / 2**30:,.1f} GiB" if size else "not enough memory"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return first_line(error)


def try_batch(
    model: nn.Module, name: str, example: Tensor, outputs: int | tuple[int, ...] | None, task: object = None
) -> None:
    """Raise ConfigError if ``model`` cannot process ``example``, or does not return ``outputs`` numbers for each row.
    Leaves it in training mode."""
    if any(param.is_meta for param in model.parameters()):  # built without values
        example = example.to("meta")
    try:
        with torch.no_grad():
            returned = model.eval()(example)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        places = _places(model) if name.startswith(HUB) and not example.is_floating_point() else None
        reason = f"it has {places} positions" if places and places < example.shape[1] else _reason(error)
        problem = f"model {name} cannot process a batch of shape {tuple(example.shape)}: {reason}"
        hint = _of_configuration(model, name, error) or _remedy(model, example, name, task)
        raise determinism.explained(error) or of_part(problem, error, "model.name", hint) from error
    finally:
        model.train()
    shape = tuple(returned.shape) if isinstance(returned, Tensor) else f"an object of type {type(returned).__name__}"
    row = outputs if isinstance(outputs, tuple) else (outputs,)
    if outputs is not None and shape != (len(example), *row):
        expected = plural(outputs, "output") if isinstance(outputs, int) else f"outputs of shape {outputs}"
        argument = "num_classes" if isinstance(outputs, int) else "num_characters"
        hint = f"add an argument {argument} to your model (the harness sets it), or set the number in model.args"
        if not isinstance(returned, Tensor):
            hint = "let forward() return a tensor alone: of a dictionary, tuple or output of transformers, its logits"
        raise ConfigError(
            f"model {name} returns {shape} for {plural(len(example), 'row')}, not {expected} for each",
            where="model.name",
            hint=hint,
        )


def _of_configuration(model: nn.Module, name: str, error: Exception) -> str:
    """Return the hint if the configuration of ``model``, of transformers, lacks the first token of the decoder, or has
    another size of images; else ""."""
    config = getattr(model, "config", None)
    if name.startswith(HUB) and (key := "decoder_start_token_id") in str(error):
        padding = getattr(config, "pad_token_id", 0)
        return f'add "{key}": {padding}, the id of the padding, to config.json in its folder, or in a copy of it'
    size = getattr(config, "image_size", None)
    if not (name.startswith(HUB) and size and "image size" in str(error)):
        return ""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return f"set task.image_size=[{height},{width}]"


def _places(model: nn.Module) -> int | None:
    """Return how many tokens ``model``, of transformers, takes; None if its configuration does not say so."""
    places = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(places, int):
        return None
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            places -= module.padding_idx + 1  # RoBERTa and its kin count positions from there
    return places


def _remedy(model: nn.Module, example: Tensor, name: str, task: object) -> str:
    """Return the hint if ``model``, which is ``name``, cannot process ``example``, the most likely cause first."""
    if name.startswith(HUB) and not example.is_floating_point():
        places, key = _places(model), "task.tokenizer.max_length"
        if places is None:
            return f"lower {key}={example.shape[1]}: the model may have fewer positions"
        if places < example.shape[1]:
            return f"set {key}={places}: the model has no more positions (max_position_embeddings of its config.json)"
        return f"check task.tokenizer and model.args; {key}={example.shape[1]} is within the model's {places} positions"
    if not example.is_floating_point():
        if example.dim() == 3 and "." in name:
            return (
                "write forward() for this shape: of the last axis, 0 is input_ids, 1 attention_mask and 2, if the "
                "tokenizer has them, token_type_ids"
            )
        return (
            "use a model that takes token ids, such as text_cnn, or one of your own that takes num_tokens and "
            "num_classes"
        )
    if example.dtype is torch.float64 and all(param.dtype is not torch.float64 for param in model.parameters()):
        return "return float32 from batch() of the dataset, or from prepare() of the task, which returned float64"
    settings = [f"task.{key}" for key in ("image_size", "transforms", "color") if hasattr(task, key)]
    gray = hasattr(task, "color") and example.shape[1] == 1
    first = "set task.color=rgb, which torchvision models need; or " if gray else ""
    if library_of(name) is None and "." in name:
        first = "write forward() for this shape; or "
    if not settings:
        return "check model.args, and the shape of the inputs that the task gives the model"
    return f"{first}check {', '.join(['model.args', *settings[:-1]])} and {settings[-1]}"


def find(name: str) -> tuple[Callable[..., nn.Module], Library | None]:
    """Return (the class or function that makes the model, the library that it is of). Raises ConfigError."""
    if library := library_of(name):
        return library.maker(name), library
    built_in = plugins.names("model")
    if name in built_in or "." in name:
        make = plugins.find("model", name, "model.name")
        if not plugins.makes(make, nn.Module):
            raise plugins.wrong_kind(name, "torch.nn.Module", "model.name")
        return make, None
    if Path(name, "config.json").is_file():
        hint = f"use model.name={HUB}{name}, if this folder is a model of Hugging Face"
        raise ConfigError(f"unknown model {name!r}", where="model.name", hint=hint)
    other_kinds = (
        f"use one of {', '.join(built_in)}, a torchvision model such as resnet18, timm:NAME, hf:FOLDER_OR_NAME, "
        "or package.module.Class"
    )
    if "/" in name or "-" in name:
        other_kinds = f"a model of Hugging Face is model.name={HUB}{name}; or {other_kinds}"
    raise plugins.unknown("model", name, [*built_in, *torchvision.names()], "model.name", other_kinds)


def library_of(name: str) -> Library | None:
    """Return the library of the model ``name``, torchvision without a prefix; None for ours and the user's own."""
    prefix, colon, _ = name.partition(":")
    if colon and prefix in plugins.names("model library"):
        library: Library = plugins.find("model library", prefix, "model.name")
        return library
    of_torchvision = "." not in name and name not in plugins.names("model") and name in torchvision.names()
    return torchvision if of_torchvision else None
