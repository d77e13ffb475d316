"""What torch accepted."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from harness.apex.modernize import torch_math
from harness.apex.modernize.rows import Call

string_classes, int_classes, PY3, PY37 = (str, bytes), int, True, True  # names of torch._six

_SCHEDULERS = (
    *("LRScheduler", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "OneCycleLR"),
    *("SequentialLR", "PolynomialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR"),
    *("CosineAnnealingWarmRestarts", "ExponentialLR"),
)
_MASKED = ("masked_fill", "masked_select", "masked_scatter")


def __getattr__(name: str) -> Any:
    """``torch.distributed._backend``, which changed when the process group was made."""
    if name != "_backend":
        raise AttributeError(name)
    from torch import distributed

    return distributed.get_backend() if distributed.is_initialized() else distributed.Backend.UNDEFINED


# Calls. Each tries the original first, so a version of torch that accepts the call is left alone.


def _retried(errors: Any, symptom: str, again: Callable[..., Any]) -> Callable[[Any, Callable[[], None]], Any]:
    """The bridge that calls ``again(original, *args, **kwargs)`` after an error with ``symptom`` in its text.

    ``again`` returns NotImplemented to raise the error after all.
    """

    def wrap(original: Any, used: Callable[[], None]) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
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

        return wrapper

    return wrap


def _instead(function: Callable[..., Any]) -> Callable[[Any, Callable[[], None]], Any]:
    return _retried(RuntimeError, "is now removed", lambda original, *args, **kwargs: function(*args, **kwargs))


def _view(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy, for comparisons only: since torch 1.5 to 1.7 they keep the strides of their inputs."""
    import torch

    return self.reshape(*args, **kwargs) if self.dtype is torch.bool else NotImplemented


def _with_bool_masks(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The same call with masks of zeros and ones, which comparisons gave before torch 1.2, as bool."""
    import torch

    def converted(value: Any) -> Any:
        is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.uint8
        return value.bool() if is_mask else value

    source, *others = args
    return original(source, *map(converted, others), **{name: converted(value) for name, value in kwargs.items()})


def _subtracted(original: Any, self: Any, other: Any) -> Any:
    """``1 - mask``: with masks of zeros and ones, as comparisons gave before torch 1.2, the inverse mask."""
    import torch

    return original(self.to(torch.uint8), other) if self.dtype is torch.bool else NotImplemented


def _istft(original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    return original(torch.view_as_complex(input.contiguous()), *args, **kwargs)


def _float_betas(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Adam.__init__`` with ``betas=(0, 0.999)``."""
    if "betas" in kwargs:
        kwargs["betas"] = tuple(float(each) for each in kwargs["betas"])
    else:
        args = (*args[:2], tuple(float(each) for each in args[2]), *args[3:])
    return original(self, *args, **kwargs)


def _without_verbose(original: Any, used: Callable[[], None]) -> Any:
    """``__init__`` of a scheduler, which printed each change of the learning rate with ``verbose=True``."""
    parameters = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if "verbose" not in parameters:
            found = len(args) + len(kwargs)
            kwargs.pop("verbose", None)
            args = args[: len(parameters) - 1]
            if type(self).__name__ == "ReduceLROnPlateau" and len(args) > 4 and isinstance(args[4], bool):
                args = (*args[:4], *args[5:])  # until torch 1.6, verbose came before threshold
            if len(args) + len(kwargs) < found:
                used()
        original(self, *args, **kwargs)

    return __init__


def _with_data_source(original: Any, used: Callable[[], None]) -> Any:
    """``Sampler.__init__``, which ignored its argument."""

    def __init__(self: Any, data_source: Any = None) -> None:
        if data_source is not None:
            used()

    return __init__


def _warning_without_set_epoch(original: Any, used: Callable[[], None]) -> Any:
    """``DistributedSampler.__iter__``, with a warning at the script's line if two epochs have the same order."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        state = vars(self)
        if self.shuffle and state.get("_harness_last_epoch") == self.epoch and "_harness_warned" not in state:
            state["_harness_warned"] = True
            used()
            level, frame = 1, sys._getframe()
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "harness.")):
                level, frame = level + 1, frame.f_back
            warnings.warn(
                "a DistributedSampler gives the same order as in the previous epoch. For training, call "
                "sampler.set_epoch(epoch) at the start of each epoch; for validation, this is harmless.",
                stacklevel=level,
            )
        state["_harness_last_epoch"] = self.epoch
        return original(self)

    return __iter__


def _linear_algebra() -> list[Call]:
    rows = []
    for name, function, since in (
        ("symeig", torch_math.symeig, "torch 2.0"),
        ("solve", torch_math.solve, "torch 1.13"),
        ("matrix_rank", torch_math.matrix_rank, "torch 1.13"),
        ("qr", torch_math.qr, "torch 2.15"),
        ("cholesky", torch_math.cholesky, "torch 2.15"),
    ):
        symptom = rf"is now removed(.|\n)*torch\.(linalg\.)?{name}\b"
        for owner in ("torch", "torch:Tensor"):
            rows.append(Call(owner, name, since, f"torch.{name}", symptom, _instead(function)))
    return rows


_STFT = _retried(
    RuntimeError,
    "requires the return_complex parameter",
    lambda original, *args, **kwargs: original(*args, **{**kwargs, "return_complex": False}),
)
_ISTFT = _retried((RuntimeError, TypeError), "requires a complex-valued input", _istft)
_MASKS = _retried(RuntimeError, "mask", _with_bool_masks)
_NO_BYTES = "masked_.*(only supports boolean masks|expected BoolTensor for mask)"
_BETAS = "betas must be either both floats or both Tensors"
CALLS = [
    *_linear_algebra(),
    *[
        Call(owner, name, "torch 2.0", f"torch.{name} of real tensors", symptom, wrap)
        for owner in ("torch", "torch:Tensor")
        for name, symptom, wrap in (
            ("stft", "stft requires the return_complex parameter", _STFT),
            ("istft", "istft requires a complex-valued input", _ISTFT),
        )
    ],
    Call(
        "torch:Tensor",
        "view",
        "torch 1.7",
        "Tensor.view of a non-contiguous bool tensor (copied)",
        "",  # the text does not name the dtype
        _retried(RuntimeError, "view size is not compatible", _view),
    ),
    *[
        Call("torch:Tensor", f"{name}{suffix}", "torch 2.x", f"Tensor.{name} with a uint8 mask", _NO_BYTES, _MASKS)
        for name in _MASKED
        for suffix in ("", "_")
        if name + suffix != "masked_select_"
    ],
    *[Call("torch", name, "torch 2.x", f"Tensor.{name} with a uint8 mask", _NO_BYTES, _MASKS) for name in _MASKED],
    Call(
        "torch:Tensor",
        "__rsub__",
        "torch 1.2",
        "subtraction of a bool tensor",
        "Subtraction, the `-` operator, with a bool tensor is not supported",
        _retried(RuntimeError, "with a bool tensor is not supported", _subtracted),
    ),
    Call(
        "torch.optim.adam:Adam",
        "__init__",
        "torch 2.x",
        "integer betas of Adam",
        _BETAS,
        _retried(ValueError, _BETAS, _float_betas),
    ),
    *[
        Call(
            f"torch.optim.lr_scheduler:{name}",
            "__init__",
            "torch 2.7",
            f"{name}(verbose=), which prints nothing",
            rf"{name}.__init__\(\) got an unexpected keyword argument 'verbose'",
            _without_verbose,
        )
        for name in _SCHEDULERS
    ],
    Call(
        "torch.utils.data.sampler:Sampler",
        "__init__",
        "torch 2.x",
        "Sampler(data_source)",
        r"TypeError: \w*Sampler\(\) takes no arguments",
        _with_data_source,
    ),
    Call(
        "torch.utils.data.distributed:DistributedSampler",
        "__iter__",
        "",
        "DistributedSampler without set_epoch (only a warning)",
        "",
        _warning_without_set_epoch,
    ),
]
