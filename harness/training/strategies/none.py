"""No parallelism: one process on one device."""

from __future__ import annotations

from harness.training.strategies.base import ParallelStrategy


class Strategy(ParallelStrategy):
    """The bare model in one process."""

    one_process = True
