"""The Apex recipe on torch alone: ``from harness.apex import amp, parallel``.

Mixed precision by opt level (``amp``), gradient averaging over ranks (``parallel``), and the names that Apex scripts
import beside them, on CPU and accelerators alike. Written from the Apex contract, a point-by-point description of
what Apex did; nothing here knows the rest of the harness. Where this code differs from Apex on purpose the docstring
says so.

Scripts that say ``import apex`` run as they are:

    python -m harness.apex train.py --its args
    python -m harness.apex --device cpu train.py --its args     # a script written for GPUs, on the CPU
    python -m torch.distributed.launch --nproc_per_node=2 -m harness.apex train.py --its args

In a program of your own, ``harness.apex.install()`` before the first ``import apex`` does the same. Subpackages are
imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from harness.apex.import_hook import install, uninstall

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
    "fp16_utils",
    "fused_dense",
    "install",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall",
]

__harness__ = True  # tells this package from NVIDIA's, under whatever name it was imported

_SUBPACKAGES = {name for name in __all__ if name.islower()} - {"install", "uninstall"}


class DeprecatedFeatureWarning(FutureWarning):
    """What Apex warned with; here so that scripts can filter it. It is never emitted."""


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"harness.apex.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
