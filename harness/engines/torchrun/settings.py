"""Settings of engine torchrun."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.config.base import Matching, Positive, Seconds, Section

_PLACE = Matching(r"[^\s:\[\]]+:\d{1,5}", "write HOST:PORT, such as node1:29400, with a name or an IPv4 address")


class Settings(Section):
    """The section ``launch.torchrun``."""

    min_nodes: Positive | None = None
    """Continue with this many machines, such as 2, when others are lost, and with more when they join; null:
    launch.nnodes.
    """
    rendezvous: Annotated[str, _PLACE] | None = None
    """HOST:PORT of the first machine, such as node1:29400, where all machines meet; null: one machine."""
    join_s: Seconds = 600.0
    """Seconds to wait for the other machines, at the start and after one is lost."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Number of this machine, from 0, such as 1; null: in the order of the machines' addresses."""
