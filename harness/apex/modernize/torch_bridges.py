"""What torch and torchvision had or accepted.

A function with ``used`` and ``original`` is called in place of ``original`` (see ``table.Call``). It tries the original
first where it can, so a version that accepts the call is left alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

Used = Callable[[], None]
Bridge = Callable[..., Any]

string_classes, int_classes, PY3, PY37 = (str, bytes), int, True, True  # names of torch._six
_BETAS = "betas must be either both floats or both Tensors"


def __getattr__(name: str) -> Any:
    """Return ``_backend`` of ``torch.distributed``, which changes with the process group, or ``urls_of_resnet`` etc."""
    if name == "_backend":
        from torch import distributed

        return distributed.get_backend() if distributed.is_initialized() else distributed.Backend.UNDEFINED
    if name.startswith("urls_of_"):
        return _model_urls(name.removeprefix("urls_of_"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _model_urls(module: str) -> dict[str, str]:
    """Return ``model_urls`` of ``torchvision.models.MODULE``, the addresses of the same weights."""
    import torchvision

    defined_in = "mobilenetv2" if module == "mobilenet" else module
    urls = {}
    for model in torchvision.models.list_models(module=torchvision.models):
        if torchvision.models.get_model_builder(model).__module__ == f"torchvision.models.{defined_in}":
            weights = torchvision.models.get_model_weights(model).__members__
            if "IMAGENET1K_V1" in weights:
                urls["inception_v3_google" if model == "inception_v3" else model] = weights["IMAGENET1K_V1"].url
    return urls


def _new_empty_tensor(x: Any, shape: Any) -> Any:
    return x.new_empty(shape)


def _output_size(dim: int, input: Any, size: Any, scale_factor: Any) -> Any:
    """Return the size of the result of ``interpolate``, from exactly one of ``size`` and ``scale_factor``; ``dim`` is
    2."""
    if (size is None) == (scale_factor is None):
        raise ValueError("exactly one of size and scale_factor must be given")
    if size is not None:
        return size
    factors = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,) * dim
    return [math.floor(input.size(i + 2) * factors[i]) for i in range(dim)]


def _retried(errors: Any, symptom: str, again: Callable[..., Any]) -> Bridge:
    """Return a bridge that calls ``again(original, *args, **kwargs)`` after an error with ``symptom`` in its text.

    ``again`` returns NotImplemented to raise the error after all.
    """

    def bridge(used: Used, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except errors as error:
            if symptom not in str(error):
                raise
            result = again(original, *args, **kwargs)
            if result is NotImplemented:
                raise
        used()
        return result

    return bridge


def _viewed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a copy, for comparisons only: since torch 1.5 to 1.7 they keep the strides of their inputs."""
    import torch

    return self.reshape(*args, **kwargs) if self.dtype is torch.bool else NotImplemented


def _with_bool_masks(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the same call with a mask of zeros and ones, which comparisons gave before torch 1.2, as bool.

    The mask is the second argument. Values to fill in may be uint8, too.
    """
    import torch

    def converted(value: Any) -> Any:
        is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.uint8
        return value.bool() if is_mask else value

    if "mask" in kwargs:
        kwargs["mask"] = converted(kwargs["mask"])
    return original(*args[:1], *map(converted, args[1:2]), *args[2:], **kwargs)


def _subtracted(original: Any, self: Any, other: Any) -> Any:
    """Return ``1 - mask``, as of masks of zeros and ones, which comparisons gave before torch 1.2: the inverse mask."""
    import torch

    return original(self.to(torch.uint8), other) if self.dtype is torch.bool else NotImplemented


def _float_betas(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``Adam.__init__`` with ``betas=(0, 0.999)``."""
    if "betas" in kwargs:
        kwargs["betas"] = tuple(float(each) for each in kwargs["betas"])
    else:
        args = (*args[:2], tuple(float(each) for each in args[2]), *args[3:])
    return original(self, *args, **kwargs)


view = _retried(RuntimeError, "view size is not compatible", _viewed)
uint8_mask = _retried(RuntimeError, "mask", _with_bool_masks)
mask_subtraction = _retried(RuntimeError, "with a bool tensor is not supported", _subtracted)
integer_betas = _retried(ValueError, _BETAS, _float_betas)


def verbose_scheduler(used: Used, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Do ``__init__`` of a scheduler, which printed each change of the learning rate with ``verbose=True``."""
    parameters = inspect.signature(original).parameters
    if "verbose" not in parameters:
        number = len(args) + len(kwargs)
        kwargs.pop("verbose", None)
        if "threshold" in parameters and len(args) > 4 and isinstance(args[4], bool):
            args = (*args[:4], *args[5:])  # ReduceLROnPlateau had verbose before threshold, the others had it last
        args = args[: len(parameters) - 1]
        if len(args) + len(kwargs) < number:
            used()
    original(self, *args, **kwargs)


def sampler(used: Used, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Do ``Sampler.__init__``, which ignored its argument. A class after it in the method resolution order still gets
    its own arguments, where torch's ``Sampler`` has no ``__init__``."""
    from torch.utils.data import Sampler

    following: Any = super(Sampler, self).__init__ if original is object.__init__ else functools.partial(original, self)
    if (args or kwargs) and getattr(following, "__objclass__", None) is object:
        used()
        args, kwargs = (), {}
    following(*args, **kwargs)


def renamed(**new_names: str) -> Bridge:
    """Return the bridge for renamed keyword arguments, ``old="new"``."""

    def bridge(used: Used, original: Any, *args: Any, **kwargs: Any) -> Any:
        accepted = inspect.signature(original).parameters
        for old in [each for each in kwargs if each in new_names and each not in accepted]:
            used()
            kwargs[new_names[old]] = kwargs.pop(old)
        return original(*args, **kwargs)

    return bridge
