"""The state of amp in this process. Scripts read and write it as ``amp._amp_state`` (contract 1.10)."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from harness.apex.amp.levels import Properties
from harness.apex.amp.messages import messages
from harness.apex.amp.scaler import LossScaler


class AmpState:
    """Everything ``initialize`` decides for the process; one instance, ``_amp_state``. Scripts fix the names.

    ``hard_override`` turns refused overrides into warnings. ``allow_incoming_model_not_fp32`` skips the check that
    models arrive in float32. Scripts set both before ``initialize``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Return to the state before any ``initialize``."""
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.initialized = False
        self.opt_properties = Properties()
        self.loss_scalers: list[LossScaler] = []
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self.handle: Any = None
        self.models: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        """The initialized models, with the handles of their hooks."""
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def refuse(self, message: str) -> None:
        """Raise RuntimeError, or warn under ``hard_override``."""
        if not self.hard_override:
            raise RuntimeError(message)
        messages.warn(f"Warning: {message}", always=True)

    @property
    def verbosity(self) -> int:
        """0 is silent, 1 normal, 2 also prints every cast."""
        return messages.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        messages.verbosity = value


_amp_state = AmpState()
