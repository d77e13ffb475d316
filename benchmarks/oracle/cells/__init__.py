"""The cells of the comparison, by name: small training runs that use nothing but ``apex`` and torch.

A cell returns what it computed: ``{label: tensor, number, text, or a list or dictionary of such}``.
"""

from __future__ import annotations

from benchmarks.oracle.cells import (
    distributed,
    fp16_utils,
    functions,
    fused,
    networks,
    options,
    situations,
)
from benchmarks.oracle.cells.kit import CELLS

__all__ = ["CELLS", "distributed", "fp16_utils", "functions", "fused", "networks", "options", "situations"]
