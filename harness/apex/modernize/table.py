"""Everything that ``--modernize`` restores: ``NAMES`` and ``RENAMED_MODULES`` that are gone, refused ``CALLS``.

A name or call that the installed version still has is left alone.
"""

from __future__ import annotations

import collections.abc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.apex.modernize import other_bridges, torch_bridges

_TORCH, _OTHER = torch_bridges.__name__, other_bridges.__name__
_LOADER_ITERATOR = "torch.utils.data.dataloader:_BaseDataLoaderIter"
_SCHEDULERS = (
    "LRScheduler", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "OneCycleLR",
    "SequentialLR", "PolynomialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR",
    "CosineAnnealingWarmRestarts", "ExponentialLR",
)  # fmt: skip
_MODELS_WITH_URLS = (
    "alexnet", "densenet", "googlenet", "inception", "mnasnet", "mobilenet", "mobilenetv2", "resnet", "squeezenet",
    "vgg",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A function or method that no longer accepts what it used to accept.

    ``bridge(used, original, *args, **kwargs)`` is called instead, and calls ``used`` whenever it bridges something.
    ``label`` is listed at the end of the run.
    """

    owner: str
    name: str
    label: str
    bridge: Callable[..., Any]


def _renamed(owner: str, name: str, **new_names: str) -> Call:
    function = owner.rpartition(":")[2] if name == "__init__" else name
    label = f"torchvision {function}({', '.join(f'{old}=' for old in new_names)})"
    return Call(owner, name, label, torch_bridges.renamed(**new_names))


def _paths(module: str, *same: str, **new: str) -> dict[str, str]:
    """Return the paths of names of ``module``: those that are the ``same``, and the ``new`` one of each old name."""
    return {old: f"{module}:{name}" for old, name in {**{name: name for name in same}, **new}.items()}


_COLLATE = {**_paths(_TORCH, "string_classes", "int_classes"), "container_abcs": "collections.abc"}

# By module, or ``module:Class``, the path of each lost name, for ``pkgutil.resolve_name``.
NAMES: dict[str, dict[str, str]] = {
    "collections": _paths("collections.abc", *collections.abc.__all__),
    "time": _paths("time", clock="perf_counter" if sys.platform == "win32" else "process_time"),
    "inspect": _paths(_OTHER, "getargspec", "ArgSpec"),
    "numpy": {
        **_paths("builtins", "bool", "complex", "float", "int", "object", "str", long="int", unicode="str"),
        **_paths("numpy", Inf="inf", Infinity="inf", infty="inf", PINF="inf", NaN="nan"),
        **_paths("numpy", float_="float64", complex_="complex128", cfloat="complex128", string_="bytes_"),
        **_paths("numpy", unicode_="str_", bool8="bool_", int0="intp", uint0="uintp", round_="round", product="prod"),
        **_paths("numpy", cumproduct="cumprod", sometrue="any", alltrue="all", mat="asmatrix", row_stack="vstack"),
        **_paths("numpy", trapz="trapezoid"),
        **_paths(_OTHER, "NINF", "asscalar", "in1d"),
    },
    "torch.distributed": {
        **_paths("torch.distributed", dist_backend="Backend", DistBackend="Backend"),
        **_paths(_TORCH, "_backend"),
    },
    "torch._six": {**_COLLATE, **_paths(_TORCH, "PY3", "PY37"), **_paths("math", "inf", "nan")},
    "torch.utils.data._utils.collate": _COLLATE,
    **{
        module: _paths(module, T_co="_T_co")
        for module in (f"torch.utils.data.{each}" for each in ("dataset", "sampler", "dataloader", "distributed"))
    },
    _LOADER_ITERATOR: {"next": f"{_LOADER_ITERATOR}.__next__"},
    "torch.hub": _paths("torch.hub", _download_url_to_file="download_url_to_file"),
    "torch.utils.model_zoo": _paths("torch.hub", _download_url_to_file="download_url_to_file"),
    "torchvision.transforms": _paths("torchvision.transforms", Scale="Resize", RandomSizedCrop="RandomResizedCrop"),
    "torchvision.models.utils": _paths("torch.hub", "load_state_dict_from_url"),
    **{f"torchvision.models.{each}": _paths(_TORCH, model_urls=f"urls_of_{each}") for each in _MODELS_WITH_URLS},
    "torchvision.ops": _paths(_TORCH, "_new_empty_tensor"),
    "torchvision.ops.misc": _paths(_TORCH, "_new_empty_tensor", "_output_size"),
    "PIL": _paths("PIL", PILLOW_VERSION="__version__"),
    "PIL.Image": _paths(
        "PIL.Image", PILLOW_VERSION="__version__", ANTIALIAS="LANCZOS", LINEAR="BILINEAR", CUBIC="BICUBIC"
    ),
    "PIL.ImageFont:ImageFont": _paths(_OTHER, "getsize"),
    "PIL.ImageFont:FreeTypeFont": _paths(_OTHER, "getsize"),
    "matplotlib.backends.backend_agg:FigureCanvasAgg": _paths(_OTHER, "tostring_rgb"),
    "scipy.misc": _paths(_OTHER, "imresize"),
}
# Modules that another module replaces: all names of the new one are found in the old one.
RENAMED_MODULES = {"torchvision.transforms.functional_tensor": "torchvision.transforms._functional_tensor"}

_TRANSFORMS, _FUNCTIONS = "torchvision.transforms.transforms", "torchvision.transforms.functional"
_UNEQUAL_ROWS = "of unequal rows, or with copy=False"
_UINT8_MASK = "with a uint8 mask"
_NO_OUTPUT = "(verbose=), which prints nothing"
CALLS = [
    Call("distutils.version:StrictVersion", "parse", "StrictVersion('1.2.3+cu118')", other_bridges.strict_version),
    Call("json", "loads", "json.load(encoding=)", other_bridges.json_loads),
    *[Call("yaml", name, "yaml.load without a loader", other_bridges.yaml_load) for name in ("load", "load_all")],
    *[
        Call("numpy", name, f"numpy.{name} {_UNEQUAL_ROWS}", other_bridges.numpy_array)
        for name in ("array", "asarray", "asanyarray")
    ],
    Call("numpy", "fromstring", "numpy.fromstring of bytes", other_bridges.numpy_fromstring),
    Call("numpy", "linspace", "numpy.linspace with a float number of points", other_bridges.numpy_linspace),
    Call("torch:Tensor", "view", "Tensor.view of a non-contiguous bool tensor (copied)", torch_bridges.view),
    *[
        Call(owner, f"{name}{suffix}", f"Tensor.{name} {_UINT8_MASK}", torch_bridges.uint8_mask)
        for name in ("masked_fill", "masked_select", "masked_scatter")
        for owner, suffix in (("torch", ""), ("torch:Tensor", ""), ("torch:Tensor", "_"))
    ],
    Call("torch:Tensor", "__rsub__", "subtraction of a bool tensor", torch_bridges.mask_subtraction),
    Call("torch.optim.adam:Adam", "__init__", "integer betas of Adam", torch_bridges.integer_betas),
    *[
        Call(f"torch.optim.lr_scheduler:{name}", "__init__", f"{name}{_NO_OUTPUT}", torch_bridges.verbose_scheduler)
        for name in _SCHEDULERS
    ],
    Call("torch.utils.data.sampler:Sampler", "__init__", "Sampler(data_source)", torch_bridges.sampler),
    _renamed(f"{_TRANSFORMS}:RandomRotation", "__init__", resample="interpolation"),
    _renamed(f"{_TRANSFORMS}:RandomAffine", "__init__", resample="interpolation", fillcolor="fill"),
    _renamed(_FUNCTIONS, "rotate", resample="interpolation"),
    _renamed(_FUNCTIONS, "affine", resample="interpolation", fillcolor="fill"),
    _renamed("torchvision.utils", "make_grid", range="value_range"),
]
