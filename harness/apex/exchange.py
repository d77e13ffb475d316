"""What amp and DistributedDataParallel must know of each other, and nothing more.

During a ``scale_loss`` context amp moves the gradients of earlier contexts out of the way, so that unscaling touches
the new ones only. Gradients that were accumulated without reduction would then never be reduced (contract 5.1.6). So:

- amp keeps what it moved on the parameter itself, through ``set_hidden`` and ``take_hidden``; a reducer that still owes
  a reduction reduces that tensor too;
- a reducer says that it holds local gradients; amp then leaves the overflow verdict to the context that reduces them,
  because a verdict taken from one rank's gradients would let the loss scales of the ranks drift apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

_HIDDEN = "_amp_hidden_grad"


class HoldsGradients(Protocol):
    """A reducer: ``holds_local`` while gradients of its parameters wait for a reduction."""

    holds_local: bool

    def owns(self, parameter: Tensor) -> bool: ...


_reducers: weakref.WeakSet[HoldsGradients] = weakref.WeakSet()


def register(reducer: HoldsGradients) -> None:
    """Make ``reducer`` known to amp, for as long as it lives."""
    _reducers.add(reducer)


def any_local(parameters: Iterable[Tensor]) -> bool:
    """Whether a gradient of one of ``parameters`` still waits for its reduction."""
    waiting = [reducer for reducer in _reducers if reducer.holds_local]
    return bool(waiting) and any(reducer.owns(parameter) for parameter in parameters for reducer in waiting)


def set_hidden(parameter: Tensor, accumulated: Tensor) -> None:
    """Remember ``accumulated`` as gradient of ``parameter`` that is not in ``parameter.grad`` now."""
    parameter.__dict__[_HIDDEN] = accumulated


def get_hidden(parameter: Tensor) -> Tensor | None:
    """The accumulated gradient of ``parameter`` outside ``parameter.grad``, in true units, or None."""
    hidden: Tensor | None = parameter.__dict__.get(_HIDDEN)
    return hidden


def take_hidden(parameter: Tensor) -> Tensor | None:
    """Like ``get_hidden``, and forget it."""
    hidden: Tensor | None = parameter.__dict__.pop(_HIDDEN, None)
    return hidden
