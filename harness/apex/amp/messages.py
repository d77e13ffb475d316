"""Messages to the user: printed or logged by rank 0 alone, subject to ``verbosity``."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger("harness.apex")


def is_rank_zero() -> bool:
    """Return True on rank 0, or without a process group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Messages:
    """``verbosity``: 0 is silent, 1 normal, 2 also prints every cast. One instance, ``messages``."""

    verbosity = 1

    def announce(self, text: str) -> None:
        """Print ``text`` on rank 0, unless verbosity is 0."""
        if self.verbosity > 0 and is_rank_zero():
            print(text)

    def warn(self, text: str, *, always: bool = False) -> None:
        """Log ``text`` as a warning on rank 0, unless verbosity is 0 and ``always`` is False."""
        if (always or self.verbosity > 0) and is_rank_zero():
            logger.warning(text)


messages = Messages()
