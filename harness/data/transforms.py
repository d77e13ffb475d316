"""The transforms of a configuration as functions of one image: torchvision.transforms.v2, and the user's own.

Images are uint8 (channels, height, width). A list may return floats, which are then not normalized again.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from harness.config import plugins, signatures
from harness.config.transforms import TransformsSection, name_and_arguments
from harness.data import vision
from harness.data.reduced_jpeg import FILTERS, Region
from harness.data.seeds import EVALUATION_SEED, seeded_torch
from harness.errors import ConfigError, first_line, of_part, plural, similar

Transform = Callable[[Any], Any]
_NOT_FOR_LISTS = {
    "MixUp": "it mixes the images of a batch: use train.mixup=0.2",
    "CutMix": "it mixes the images of a batch: use train.cutmix=1.0",
    "FiveCrop": "it returns several images: use CenterCrop",
    "TenCrop": "it returns several images: use CenterCrop",
    "Lambda": "it needs a function: name your own, as package.module.function",
    "ToTensor": "images are tensors already, and the harness normalizes them with task.mean and task.std: leave it out",
    "Transform": "it is the base class of the others",
}
_DTYPES = ("uint8", "float32", "float64", "float16", "bfloat16", "int32", "int64")
_ANY_LAYOUT = (  # in memory: they compute the same from each
    "RandomHorizontalFlip", "RandomVerticalFlip", "CenterCrop", "RandomErasing", "ToDtype", "Normalize"
)  # fmt: skip
_RESIZED_CROP = "RandomResizedCrop"
_TO_FLOAT = ("ToDtype", "ConvertImageDtype", "Normalize")


@cache
def v2_classes() -> dict[str, Any]:
    """Return the classes of torchvision.transforms.v2, by name. Its import takes long, so only lists with entries need
    it."""
    v2 = vision.torchvision("transforms.v2")
    return {name: each for name, each in vars(v2).items() if inspect.isclass(each) and issubclass(each, v2.Transform)}


def build(section: TransformsSection, size: tuple[int, int] | None, channels: int) -> tuple[Pipeline, Pipeline]:
    """Return the lists for training and evaluation. Raises ConfigError, which names every wrong entry.

    size: (height, width) that images are fitted to after the list; None: as the list leaves them
    """
    problems: list[ConfigError] = []
    train, eval_ = (
        Pipeline(_steps(getattr(section, split), f"task.transforms.{split}", problems), size, channels, seed)
        for split, seed in (("train", None), ("eval", EVALUATION_SEED))
    )
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = "".join(f"\n  {error.where}: {error.message}\n     -> {error.hint}" for error in problems)
        raise ConfigError(f"{len(problems)} problems{lines}", where="task.transforms")
    return train, eval_


@dataclass(frozen=True)
class Pipeline:
    """The transforms of one list, as a function of an image that returns a uint8 or float32 image."""

    steps: dict[str, Transform]
    """{place in the configuration: transform}."""
    size: tuple[int, int] | None
    channels: int
    seed: int | None = None
    """The same random numbers for every image; None: those of torch's generator."""

    def __call__(self, image: Tensor) -> Tensor:
        with seeded_torch(self.seed) if self.seed is not None and self.steps else nullcontext():
            for where, step in self.steps.items():
                image = self._applied(where, step, image, self._faster.get(where))
        if self.steps:
            image = self._usable(image)
        return fitted(image, self.size) if self.size else image

    @property
    def scales_first(self) -> bool:
        """True if the first thing that happens to an image is that a part of it is scaled, with antialiasing."""
        _, first = self._first
        if first is None:
            return self.size is not None
        if _kind(first) == _RESIZED_CROP and not all(isinstance(side, int) for side in first.size):
            return False
        return _kind(first) in (_RESIZED_CROP, "Resize") and bool(first.antialias) and _mode(first) in FILTERS

    @property
    def _first(self) -> tuple[str, Any]:
        return next(iter(self.steps.items()), ("", None))

    def region(self, height: int, width: int) -> Region:
        """Return the part that ``scales_first`` of an image of this size. Draws the numbers that the transform would
        draw."""
        where, first = self._first
        if first is None:
            assert self.size is not None
            return Region(*fitting(height, width, self.size), self.size)
        image = torch.empty(1, height, width, device="meta")
        if _kind(first) == _RESIZED_CROP:
            part = self._applied(where, first, image, lambda image: first.make_params([image]))
            return Region(**part, size=(first.size[0], first.size[-1]), filter=_mode(first))
        rows, columns = self._applied(where, first, image).shape[-2:]
        return Region(0, 0, height, width, (rows, columns), _mode(first))

    @cached_property
    def after_region(self) -> Pipeline:
        """The remaining steps for an image after its ``region`` was scaled."""
        return replace(self, steps=dict(islice(self.steps.items(), 1, None)), seed=None)

    @cached_property
    def _faster(self) -> dict[str, Transform]:
        """{place: what gives the same pixels as the transform there}. The layout in memory, which it changes, must not
        matter to the transforms after it."""
        faster_steps: dict[str, Transform] = {}
        for where, step in reversed(self.steps.items()):
            if _kind(step) == _RESIZED_CROP:
                faster_steps[where] = partial(_resized_crop, step)
            elif _kind(step) not in _ANY_LAYOUT:
                break
        return faster_steps

    def _applied(self, where: str, step: Transform, image: Any, call: Transform | None = None) -> Any:
        try:
            return (call or step)(image)
        except Exception as error:
            if isinstance(step, _Own):
                raise  # with its traceback: a fault in the user's own code
            shape = "x".join(map(str, image.shape[-2:])) if isinstance(image, Tensor) else type(image).__name__
            raise ConfigError(
                f"{type(step).__name__} cannot process an image of {shape}: {first_line(error)}",
                where=where,
                hint="correct its arguments, or put a transform before it that changes the image, such as Resize",
            ) from error

    def _usable(self, image: Any) -> Tensor:
        """Return ``image`` if a batch can be made of it. Raises ConfigError."""
        if not isinstance(image, Tensor):
            kind = type(image)
            description, hint = f"a {kind.__module__}.{kind.__name__}, not a tensor", "add PILToTensor at the end"
        elif image.dim() != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
            description = f"a tensor {tuple(image.shape)} of {str(image.dtype).removeprefix('torch.')}"
            hint = "return uint8 or float32 (channels, height, width)"
        elif len(image) != self.channels:
            description = f"an image with {plural(len(image), 'channel')} instead of {self.channels}"
            hint = "leave out the transform that changes the channels; for image_csv, task.color chooses rgb or gray"
        else:
            plain = image.as_subclass(Tensor)
            return plain.float() if plain.is_floating_point() else plain
        split = next(iter(self.steps)).rpartition(".")[0]
        raise ConfigError(f"the last transform returns {description}", where=split, hint=hint)


def fitted(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the largest centred part of ``image`` with the aspect ratio of ``size``, (height, width), scaled to
    ``size``.

    Bilinear with antialiasing. An image of this aspect ratio is only scaled, one of this size returned as it is.
    """
    height, width = image.shape[-2:]
    if (height, width) == size:
        return image
    top, left, rows, columns = fitting(height, width, size)
    part = image[..., top : top + rows, left : left + columns]
    resized: Tensor = _functional().resize(channels_last(part), list(size), antialias=True)
    return resized


def channels_last(image: Tensor) -> Tensor:
    """Return a copy (channels, height, width) with the channels of a pixel side by side, as JPEGs are decoded and as
    torchvision resizes them fastest."""
    return image.unsqueeze(0).contiguous(memory_format=torch.channels_last).squeeze(0)


def _resized_crop(step: Any, image: Any) -> Any:
    """Return ``step(image)``: torchvision resizes a part of an image that is not copied first in twice the time."""
    if not (type(image) is Tensor and image.dtype == torch.uint8 and image.dim() == 3):
        return step(image)
    part = _functional().crop(image, **step.make_params([image]))
    return _functional().resize(channels_last(part), step.size, step.interpolation, antialias=step.antialias)


def fitting(height: int, width: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the part of such an image that ``fitted`` scales."""
    scale = max(size[0] / height, size[1] / width)
    rows, columns = (max(1, round(side / scale)) for side in size)
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def require_match(train: Tensor, evaluated: Tensor, section: TransformsSection) -> None:
    """Raise ConfigError if an image of training and one of evaluation, both transformed, do not go together."""
    if train.dtype != evaluated.dtype:
        kinds = f"{train.dtype} in training but {evaluated.dtype} in evaluation".replace("torch.", "")
        hint = "end both lists with ToDtype: {dtype: float32, scale: true} and Normalize, or neither"
        raise ConfigError(f"the transforms return {kinds}", where="task.transforms", hint=hint)
    if train.shape != evaluated.shape and not section.eval:
        sizes = ["x".join(map(str, image.shape[-2:])) for image in (train, evaluated)]
        raise ConfigError(
            f"training images are {sizes[0]}, but evaluation images are {sizes[1]} (height x width)",
            where="task.transforms.eval",
            hint="set task.image_size=[height,width], or this list, such as [{Resize: 256}, {CenterCrop: 224}]",
        )


def describe(section: TransformsSection, example: Tensor, mean: list[float], std: list[float]) -> dict[str, Any]:
    """Return the preprocessing of evaluation, for ``harness export``. ``example``: an image after ``section.eval``."""
    facts: dict[str, Any] = {"transforms": list(section.eval)} if section.eval else {}  # of torchvision.transforms.v2
    facts |= {"size": list(example.shape[-2:]), "resize": "none: images already have this size"}
    if example.is_floating_point():
        return {**facts, "scale": "none: the transforms return what the model takes"}
    scale = "divide pixels (0 to 255) by 255, subtract mean, divide by std"
    return {**facts, "scale": scale, "mean": mean, "std": std}


def _functional() -> Any:
    return vision.torchvision("transforms.v2.functional")


def _kind(step: Transform) -> str:
    """Return the name of torchvision's class."""
    return type(step).__name__


def _mode(scaling: Any) -> Any:
    """Return the name of its interpolation, which torchvision also accepts as a member of an Enum."""
    return getattr(scaling.interpolation, "value", scaling.interpolation)


class _Own:
    """A transform of the user's own. What it draws with ``random`` and numpy follows from torch's generator, which is
    seeded for each row; their own streams continue afterwards as if it had drawn nothing."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        seed = int(torch.randint(2**32, ()))
        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            return self.transform(image)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _steps(entries: Sequence[Any], where: str, problems: list[ConfigError]) -> dict[str, Transform]:
    """Return {place: transform}; what is wrong is added to ``problems``."""
    transforms: dict[str, Transform] = {}
    for number, entry in enumerate(entries):
        try:
            step = transforms[f"{where}.{number}"] = _built(entry, f"{where}.{number}")
            floats = any("." in name or name in _TO_FLOAT for name, _ in map(name_and_arguments, entries[:number]))
            if type(step).__name__ == "RandomErasing" and step.value is None and not floats:  # type: ignore[attr-defined]
                raise ConfigError(
                    "RandomErasing(value='random') draws noise for normalized images, and these are uint8",
                    where=f"{where}.{number}",
                    hint="put ToDtype: {dtype: float32, scale: true} and Normalize before it, or give a color",
                )
        except ConfigError as error:
            problems.append(error)
    return transforms


def _built(entry: str | dict[str, Any], where: str) -> Transform:
    """Return the transform of one entry. Raises ConfigError."""
    name, arguments = name_and_arguments(entry)
    factory = _find(name, where)
    is_function = inspect.isroutine(factory)
    parameters = dict(inspect.signature(factory).parameters)
    if is_function:
        parameters.pop(next(iter(parameters), ""), None)  # the image
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        arguments = {next(iter(parameters), "value"): arguments}  # CenterCrop: 224
    signatures.require_parameters(name, parameters, arguments, where)
    hints = _hints(factory)
    arguments = {key: _converted(key, value, hints.get(key), where) for key, value in arguments.items()}
    try:
        transform = partial(factory, **arguments) if is_function else factory(**arguments)
    except Exception as error:  # of many types
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        hint = f"its arguments are: {', '.join(parameters)}"
        message = f"cannot build {name}({listed}): {first_line(error)}"
        raise of_part(message, error, where, hint, making=True) from error
    return _Own(transform) if "." in name else transform


def _find(name: str, where: str) -> Any:
    if "." in name:
        factory = plugins.import_own("transform", name, where)
        if inspect.isroutine(factory) or inspect.isclass(factory) and "__call__" in dir(factory):
            return factory
        hint = "name a function that takes an image, or a class whose instances can be called with one"
        raise ConfigError(f"{name} is not a transform", where=where, hint=hint)
    if name in _NOT_FOR_LISTS:
        raise ConfigError(f"{name} cannot be used here", where=where, hint=_NOT_FOR_LISTS[name])
    if name not in v2_classes():
        nearest = similar(name, v2_classes().keys() - _NOT_FOR_LISTS.keys())
        hint = "use a class of torchvision.transforms.v2, or package.module.Class"
        hint = f"did you mean {nearest}?" if nearest else hint
        raise ConfigError(f"unknown transform {name!r}", where=where, hint=hint)
    return v2_classes()[name]


def _hints(factory: Any) -> dict[str, Any]:
    try:
        return get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except Exception:  # an annotation may be any text
        return {}


def _converted(key: str, value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as the parameter ``key`` wants it: texts as members of an Enum or as a torch.dtype, entries as
    transforms."""
    if key == "transforms" and isinstance(value, list | tuple):
        return [_built(entry, f"{where}.{key}.{number}") for number, entry in enumerate(value)]
    if not isinstance(value, str):
        return value
    for kind in (hint, *get_args(hint)):
        if kind is torch.dtype:
            return _chosen(key, value, {name: getattr(torch, name) for name in _DTYPES}, where)
        if inspect.isclass(kind) and issubclass(kind, Enum):
            return _chosen(key, value, {str(member.value): member for member in kind}, where)
    return value


def _chosen(key: str, value: str, allowed: dict[str, Any], where: str) -> Any:
    if value in allowed:
        return allowed[value]
    matches = get_close_matches(value, allowed, n=1)
    hint = (f"did you mean {matches[0]}? " if matches else "") + f"use {', '.join(allowed)}"
    raise ConfigError(f"{key}={value!r} is not allowed", where=where, hint=hint)
