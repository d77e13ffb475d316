"""Settings of engine flyte."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from harness.config.base import Matching, Section

# A quantity in Kubernetes notation: 2, 500m, 0.5, 16Gi.
Quantity = Annotated[
    str,
    Matching(r"\d+(\.\d+)?(m|[kMGTPE]i?)?", "write a Kubernetes quantity, such as 2, 500m or 16Gi"),
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
]


class Settings(Section):
    """The section ``launch.flyte``."""

    image: str | None = None
    """Container image with the project in it, such as ghcr.io/me/train:1; null: Flyte's own. Runs on this machine use
    none.
    """
    cpu: Quantity | None = None
    """CPU cores per machine, such as 500m or 4; null: the cluster's default."""
    memory: Quantity | None = None
    """Memory per machine, such as 16Gi; null: the cluster's default."""
    gpu: Annotated[int, Field(ge=0)] = 0
    """GPUs per machine."""
