"""Data parallelism under the names of Apex's ``parallel``; wrap after ``amp.initialize``."""

from __future__ import annotations

from harness.apex.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
