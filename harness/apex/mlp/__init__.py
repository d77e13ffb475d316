"""Apex's ``mlp``: a multi-layer perceptron."""

from __future__ import annotations

from harness.apex.mlp.mlp import MLP, mlp_function

__all__ = ["MLP", "mlp_function"]
