"""Messages to the user: printed or logged by rank 0 alone, subject to ``verbosity``."""

from __future__ import annotations

import logging
import sys
import warnings

import torch.distributed as dist

logger = logging.getLogger("harness.apex")

_NOT_THE_SCRIPT = ("torch", "harness.apex", "contextlib", "functools")  # modules between a script and amp


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

    def warn_at_script(self, text: str) -> None:
        """Issue ``text`` as a Python warning on rank 0, at the line of the script that called amp or an optimizer."""
        if not is_rank_zero():
            return
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
            level, frame = level + 1, frame.f_back
        warnings.warn(text, stacklevel=level)


def _is_library(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _NOT_THE_SCRIPT)


messages = Messages()
