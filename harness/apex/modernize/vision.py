"""What torchvision had."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from harness.apex.modernize.rows import Call

WITH_URLS = (
    *("alexnet", "densenet", "googlenet", "inception", "mnasnet", "mobilenet", "mobilenetv2", "resnet", "squeezenet"),
    "vgg",
)


def __getattr__(name: str) -> Any:
    """``urls_of_resnet``: the dictionary ``model_urls`` of ``torchvision.models.resnet``, and so on."""
    if not name.startswith("urls_of_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torchvision

    module = name.removeprefix("urls_of_")
    defined_in = "mobilenetv2" if module == "mobilenet" else module
    urls = {}
    for model in torchvision.models.list_models(module=torchvision.models):
        if torchvision.models.get_model_builder(model).__module__ == f"torchvision.models.{defined_in}":
            weights = torchvision.models.get_model_weights(model).__members__
            if "IMAGENET1K_V1" in weights:
                urls["inception_v3_google" if model == "inception_v3" else model] = weights["IMAGENET1K_V1"].url
    return urls


def makedir_exist_ok(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def _new_empty_tensor(x: Any, shape: Any) -> Any:
    return x.new_empty(shape)


def _output_size(dim: int, input: Any, size: Any, scale_factor: Any) -> Any:
    """The size of the result of ``interpolate``, from exactly one of ``size`` and ``scale_factor``; ``dim`` is 2."""
    if (size is None) == (scale_factor is None):
        raise ValueError("exactly one of size and scale_factor must be given")
    if size is not None:
        return size
    factors = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,) * dim
    return [math.floor(input.size(i + 2) * factors[i]) for i in range(dim)]


def _renamed(**new_names: str) -> Callable[[Any, Callable[[], None]], Any]:
    """The bridge for renamed keyword arguments, ``old="new"``."""

    def wrap(original: Any, used: Callable[[], None]) -> Any:
        accepted = inspect.signature(original).parameters

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old in [each for each in kwargs if each in new_names and each not in accepted]:
                used()
                kwargs[new_names[old]] = kwargs.pop(old)
            return original(*args, **kwargs)

        return wrapper

    return wrap


def _rows(owner: str, name: str, since: str, **new_names: str) -> Call:
    function = owner.rpartition(":")[2] if name == "__init__" else name
    label = f"torchvision {function}({', '.join(f'{old}=' for old in new_names)})"
    symptom = rf"{function}\b.*unexpected keyword argument '({'|'.join(new_names)})'"
    return Call(owner, name, since, label, symptom, _renamed(**new_names))


_TRANSFORMS, _FUNCTIONS = "torchvision.transforms.transforms", "torchvision.transforms.functional"
CALLS = [
    _rows(f"{_TRANSFORMS}:RandomRotation", "__init__", "torchvision 0.15", resample="interpolation"),
    _rows(f"{_TRANSFORMS}:RandomAffine", "__init__", "torchvision 0.15", resample="interpolation", fillcolor="fill"),
    _rows(_FUNCTIONS, "rotate", "torchvision 0.15", resample="interpolation"),
    _rows(_FUNCTIONS, "affine", "torchvision 0.15", resample="interpolation", fillcolor="fill"),
    _rows("torchvision.utils", "make_grid", "torchvision 0.15", range="value_range"),
]
