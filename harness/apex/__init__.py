"""The Apex API on plain PyTorch, on CPU and GPU: ``from harness.apex import amp, parallel``.

Mixed precision by opt level (``amp``), gradient averaging across ranks (``parallel``), and the other names that Apex
scripts import. Written from the Apex contract, a point-by-point description of Apex's behavior; tests/apex/contract.py
lists the points that docstrings name ("contract 5.1.5"). Docstrings also name the deliberate differences. Imports
nothing else from the harness. Start reading in ``amp/initialize.py``.

Scripts that ``import apex`` run unmodified:

    python -m harness.apex train.py --its args
    python -m harness.apex --device cpu train.py --its args     # a script written for GPUs, on the CPU
    python -m torch.distributed.launch --nproc_per_node=2 -m harness.apex train.py --its args

In your own program, call ``harness.apex.install()`` before the first ``import apex``. Subpackages are imported on first
use.
"""

from __future__ import annotations

from typing import Any

from harness.apex.import_hook import import_part, install, uninstall

__all__ = [
    "DeprecatedFeatureWarning",
    "amp",
    "contrib",
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

__harness__ = True  # distinguishes this package from NVIDIA's, under whatever name it was imported


class DeprecatedFeatureWarning(FutureWarning):
    """Apex's warning category, so that scripts can filter it. Never emitted here."""


def __getattr__(name: str) -> Any:
    if name in __all__:  # a subpackage: the other names exist
        return import_part(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
