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
    """Worker resources per rank, such as {GPU: 1}. On workers that announce GPUs, a rank always takes one."""
    timeout_s: Seconds = 60.0
    """Seconds to wait for the scheduler, and for enough free workers."""
    shared: bool | None = None
    """true: the workers share this machine's run folder; false: its files are copied; null: detected."""
    working_folder: str | None = None
    """Working folder of the ranks, in which relative data paths are resolved; null: the current one if the disk is
    shared, else the folder in which the worker was started.
    """
