"""Everything that ``--modernize`` restores: ``NAMES`` that are gone, and ``CALLS`` that are refused.

A name or call that the installed version still has is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.apex.modernize import other_bridges, torch_bridges

_TORCH, _OTHER = torch_bridges.__name__, other_bridges.__name__


@dataclass(frozen=True)
class Names:
    """Names that a module, or a class of it, has lost.

    ``owner`` is ``module`` or ``module:Class``. ``mapping`` holds ``old`` or ``old=new`` for each: ``new`` is an
    attribute of the module or class ``source`` (by default the owner), or a path for ``pkgutil.resolve_name``. A
    mapping of ``*`` stands for all names of ``source``.
    """

    owner: str
    mapping: str
    source: str = ""

    @cached_property
    def names(self) -> dict[str, str]:
        return {old: new or old for old, _, new in (each.partition("=") for each in self.mapping.split())}

    def target(self, name: str) -> str | None:
        """The path of what ``name`` means, for ``pkgutil.resolve_name``; None if the row does not have the name."""
        new = self.names.get(name, name if "*" in self.names and not name.startswith("__") else None)
        if new is None or "." in new or ":" in new:
            return new
        source = self.source or self.owner
        return f"{source}.{new}" if ":" in source else f"{source}:{new}"


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


NAMES = [
    Names(
        "collections",
        "Awaitable Coroutine AsyncIterable AsyncIterator AsyncGenerator Hashable Iterable Iterator Generator "
        "Reversible Sized Container Callable Collection Set MutableSet Mapping MutableMapping MappingView KeysView "
        "ItemsView ValuesView Sequence MutableSequence ByteString",
        "collections.abc",
    ),
    Names("time", f"clock={'perf_counter' if sys.platform == 'win32' else 'process_time'}"),
    Names("inspect", "getargspec ArgSpec", _OTHER),
    Names("numpy", "bool complex float int object str long=int unicode=str", "builtins"),
    Names(
        "numpy",
        "Inf=inf Infinity=inf infty=inf PINF=inf NaN=nan float_=float64 complex_=complex128 cfloat=complex128 "
        "string_=bytes_ unicode_=str_ bool8=bool_ int0=intp uint0=uintp round_=round product=prod cumproduct=cumprod "
        "sometrue=any alltrue=all mat=asmatrix row_stack=vstack trapz=trapezoid",
    ),
    Names("numpy", "NINF asscalar in1d", _OTHER),
    Names("torch.distributed", "dist_backend=Backend DistBackend=Backend"),
    Names("torch.distributed", "_backend", _TORCH),
    Names("torch._six", "string_classes int_classes container_abcs=collections.abc PY3 PY37", _TORCH),
    Names("torch._six", "inf nan", "math"),
    Names("torch.utils.data._utils.collate", "string_classes int_classes container_abcs=collections.abc", _TORCH),
    *[Names(f"torch.utils.data.{each}", "T_co=_T_co") for each in ("dataset", "sampler", "dataloader", "distributed")],
    Names("torch.utils.data.dataloader:_BaseDataLoaderIter", "next=__next__"),
    *[
        Names(each, "_download_url_to_file=download_url_to_file", "torch.hub")
        for each in ("torch.hub", "torch.utils.model_zoo")
    ],
    Names("torchvision.transforms", "Scale=Resize RandomSizedCrop=RandomResizedCrop"),
    Names("torchvision.transforms.functional_tensor", "*", "torchvision.transforms._functional_tensor"),
    Names("torchvision.models.utils", "load_state_dict_from_url", "torch.hub"),
    *[
        Names(f"torchvision.models.{each}", f"model_urls=urls_of_{each}", _TORCH)
        for each in torch_bridges.MODELS_WITH_URLS.split()
    ],
    Names("torchvision.ops", "_new_empty_tensor", _TORCH),
    Names("torchvision.ops.misc", "_new_empty_tensor _output_size", _TORCH),
    Names("PIL", "PILLOW_VERSION=__version__"),
    Names("PIL.Image", "PILLOW_VERSION=__version__ ANTIALIAS=LANCZOS LINEAR=BILINEAR CUBIC=BICUBIC"),
    Names("PIL.ImageFont:ImageFont", "getsize", _OTHER),
    Names("PIL.ImageFont:FreeTypeFont", "getsize", _OTHER),
    Names("matplotlib.backends.backend_agg:FigureCanvasAgg", "tostring_rgb", _OTHER),
    Names("scipy.misc", "imresize", _OTHER),
]

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
        for name in torch_bridges.SCHEDULERS.split()
    ],
    Call("torch.utils.data.sampler:Sampler", "__init__", "Sampler(data_source)", torch_bridges.sampler),
    _renamed(f"{_TRANSFORMS}:RandomRotation", "__init__", resample="interpolation"),
    _renamed(f"{_TRANSFORMS}:RandomAffine", "__init__", resample="interpolation", fillcolor="fill"),
    _renamed(_FUNCTIONS, "rotate", resample="interpolation"),
    _renamed(_FUNCTIONS, "affine", resample="interpolation", fillcolor="fill"),
    _renamed("torchvision.utils", "make_grid", range="value_range"),
]
