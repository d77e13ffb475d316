"""The parts of Apex's ``contrib`` that are short in plain torch. Importing another one names its replacement.

They are imported on first use, as in ``apex.contrib.optimizers.FP16_Optimizer`` after nothing but ``import apex``.
"""

from __future__ import annotations

from typing import Any

from harness.apex.import_hook import import_part


def __getattr__(name: str) -> Any:
    if name in ("clip_grad", "optimizers", "xentropy"):
        return import_part(f"contrib.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
