"""Settings of engine local."""

from __future__ import annotations

from harness.config.base import Positive, Section


class Settings(Section):
    """The section ``launch.local``."""

    min_ranks: Positive | None = None
    """Continue on this many ranks, such as 2, when others are lost, and on more at a later checkpoint; null:
    launch.nproc.
    """
