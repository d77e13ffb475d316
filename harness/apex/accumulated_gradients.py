"""Gradients accumulated before the current ``scale_loss`` context, shared between amp and the reducers.

During a ``scale_loss`` context amp sets earlier gradients aside, so that it unscales only the new ones. Gradients that
were accumulated without reduction would then never be reduced (contract 5.1.6). Therefore:

- amp keeps what it sets aside on the parameter itself, where a reducer that still has to reduce it finds it;
- a reducer reports that it holds unreduced gradients. amp then defers the overflow check to the context that reduces
  them: checked on one rank's gradients, the loss scales of the ranks would drift apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

_ATTRIBUTE = "_amp_accumulated_grad"


class HoldsGradients(Protocol):
    """A reducer, as amp sees it. While ``holds_local``, gradients of its parameters wait for a reduction.

    ``asides`` has the stash of each optimizer for which amp may have set some of them aside, on this rank or another.
    The set keeps them alive: ranks collect garbage at different times, and all must find the same stashes in it.
    """

    holds_local: bool
    asides: set[object]

    def owns(self, parameter: Tensor) -> bool: ...


_reducers: weakref.WeakSet[HoldsGradients] = weakref.WeakSet()


def register_reducer(reducer: HoldsGradients) -> None:
    """Register ``reducer`` with amp for as long as it exists."""
    _reducers.add(reducer)


def any_unreduced(parameters: Iterable[Tensor]) -> bool:
    """Return True if a gradient of one of ``parameters`` still waits for its reduction."""
    waiting = [reducer for reducer in _reducers if reducer.holds_local]
    return bool(waiting) and any(reducer.owns(parameter) for parameter in parameters for reducer in waiting)


def announce_aside(stash: object, parameters: Sequence[Tensor]) -> None:
    """Tell the reducers of ``parameters`` that amp sets earlier gradients aside for ``stash``, if there are any.

    They do not hear whether there are: ranks run the same contexts, but may differ in the parameters that these reach,
    and all must come to the same decision without asking each other.
    """
    for reducer in _reducers:
        if reducer.holds_local and any(reducer.owns(parameter) for parameter in parameters):
            reducer.asides.add(stash)


def withdraw_aside(stash: object) -> None:
    """Tell all reducers that amp has put back what it had set aside for ``stash``."""
    for reducer in _reducers:
        reducer.asides.discard(stash)


def set_aside(parameter: Tensor, gradient: Tensor) -> None:
    """Keep ``gradient``, without loss scale, as accumulated for ``parameter`` outside ``parameter.grad``."""
    parameter.__dict__[_ATTRIBUTE] = gradient


def get_aside(parameter: Tensor) -> Tensor | None:
    """Return the gradient set aside for ``parameter``, or None."""
    gradient: Tensor | None = parameter.__dict__.get(_ATTRIBUTE)
    return gradient


def take_aside(parameter: Tensor) -> Tensor | None:
    """Return the gradient set aside for ``parameter``, or None, and remove it."""
    gradient: Tensor | None = parameter.__dict__.pop(_ATTRIBUTE, None)
    return gradient
