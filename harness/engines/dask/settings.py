"""Settings of engine dask."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.config.base import NullIsEmpty, Seconds, Section


class Settings(Section):
    """The section ``launch.dask``."""

    scheduler: str | None = None
    """Scheduler address, such as tcp://10.0.0.1:8786; null: a cluster on this machine, for this run only."""
    resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], NullIsEmpty] = {}
    """Worker resources per rank, such as {GPU: 1} on workers that announce GPUs."""
    timeout_s: Seconds = 60.0
    """Seconds to wait for the scheduler, and for a free thread of a worker for each rank."""
