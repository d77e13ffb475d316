"""The state of amp in this process, and how amp speaks to the user.

``amp._amp_state`` is read and written by scripts under the names below (contract 1.10), so they are fixed.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from harness.apex.amp.levels import Properties

if TYPE_CHECKING:
    from harness.apex.amp.scaler import LossScaler

logger = logging.getLogger("harness.apex")


class AmpState:
    """All that ``initialize`` decides for the process; one instance, ``_amp_state``.

    ``hard_override``: refused overrides become warnings. ``allow_incoming_model_not_fp32``: skip the check that
    models arrive in float32. Both are set by the script, before ``initialize``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Back to the state before any ``initialize``."""
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.initialized = False
        self.opt_properties = Properties()
        self.loss_scalers: list[LossScaler] = []
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self.handle: Any = None
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


_amp_state = AmpState()


def is_rank_zero() -> bool:
    """Whether this process speaks for the run: rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def announce(text: str) -> None:
    """Print ``text`` on rank 0, unless verbosity is 0."""
    if _amp_state.verbosity > 0 and is_rank_zero():
        print(text)


def warn(text: str, *, always: bool = False) -> None:
    """Log ``text`` as a warning on rank 0, unless verbosity is 0 and it need not be heard ``always``."""
    if (always or _amp_state.verbosity > 0) and is_rank_zero():
        logger.warning(text)
