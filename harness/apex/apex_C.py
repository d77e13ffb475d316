"""The two functions of Apex's extension ``apex_C``, for scripts that flatten gradients themselves."""

from __future__ import annotations

from harness.apex.parallel.flat_collectives import flatten, unflatten

__all__ = ["flatten", "unflatten"]
