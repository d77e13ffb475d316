"""The handle of Apex's first API, ``amp.init`` (contract 1.7), and of O1 (``amp._amp_state.handle``).

    handle = amp.init()
    optimizer = handle.wrap_optimizer(optimizer)
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

It is O1 under another name: the same casts, scalers and skipped steps. Apex stopped supporting it before amp was
removed; scripts from that time run here. There is no weight cache, so the methods that concern one do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp import cast_engine, optimizer_patches
from harness.apex.amp.levels import LossScale
from harness.apex.amp.scale_loss import scaled
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.state import _amp_state


def init(
    enabled: bool = True,
    loss_scale: LossScale = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Turn O1's casts on for the process and return their handle; with ``enabled=False`` one that does nothing.

    ``loss_scale``: for ``handle.scale_loss`` and for every loss of wrapped optimizers. ``allow_banned``: compute
    ``binary_cross_entropy`` in float32 where it would raise. ``patch_type``: the reduced dtype (ROCm's argument).
    ``enable_caching`` is accepted; there is no cache. A later ``amp.initialize`` ends it.
    """
    handle = AmpHandle(loss_scale, verbose) if enabled else None  # raises for a wrong loss_scale
    cast_engine.engine.stop()
    if handle is None:
        return NoOpHandle()
    device_types = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    cast_engine.engine.start(patch_type, device_types, allow_banned=allow_banned, verbose=verbose)
    _amp_state.handle = handle
    return handle


class _Handle:
    """What both handles have: wrapped optimizers, and methods about a cache of cast weights, which does not exist."""

    verbose = False
    has_cache = False

    @property
    def cache(self) -> dict[Any, Any]:
        """Always empty."""
        return {}

    def remove_cache(self, param: Tensor) -> None:
        """Do nothing."""

    def _clear_cache(self) -> None:
        pass

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return ``optimizer`` with ``scale_loss``, for ``num_loss`` losses per step."""
        return OptimWrapper(optimizer, self, num_loss)

    def _new_scalers(self, num_loss: int) -> list[LossScaler]:
        """Return a scaler for each loss; none if losses are not scaled."""
        return []


class NoOpHandle(_Handle):
    """The handle of a disabled amp: has every method, and none has an effect."""

    def is_active(self) -> bool:
        """Return False: no operation is cast."""
        return False

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Return a context that yields ``loss``."""
        return nullcontext(loss)

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _deactivate(self) -> None:
        pass


class AmpHandle(_Handle):
    """The handle of active casts, until ``_deactivate`` or the next ``init`` or ``initialize``."""

    def __init__(self, loss_scale: LossScale = "dynamic", verbose: bool = False) -> None:
        self.verbose = verbose
        self._loss_scale = loss_scale
        self._default_scaler = LossScaler(loss_scale)

    def is_active(self) -> bool:
        """Return True while operations are cast."""
        return _amp_state.handle is self and cast_engine.engine.active

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Return a context that yields ``loss`` times the handle's scale and unscales the gradients at its end.

        ``optimizer``: one or several. After an overflow the next ``step()`` is skipped, also of one that is new to amp.
        """
        chosen = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in chosen:
            _adopt(each)
        return scaled(loss, chosen, self._default_scaler)

    def _new_scalers(self, num_loss: int) -> list[LossScaler]:
        return [LossScaler(self._loss_scale, index=i) for i in range(num_loss)]

    def _disable_casts(self) -> AbstractContextManager[None]:
        return cast_engine.disable_casts()

    def _deactivate(self) -> None:
        """Turn casts off and put replaced functions back."""
        if self.is_active():
            cast_engine.engine.stop()


class OptimWrapper:
    """``optimizer`` under a handle: ``scale_loss`` once for each of ``num_loss`` losses, then ``step``.

    Every loss has its own scaler. All other names are the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: _Handle, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._handle = amp_handle
        self._next_loss = 0
        self._scalers = amp_handle._new_scalers(num_loss)
        if self._scalers:
            _adopt(optimizer)

    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """Return a context that yields the next of this step's losses, scaled, for its ``backward()``."""
        if not self._scalers:
            return nullcontext(loss)
        if self._next_loss == len(self._scalers):
            raise RuntimeError(
                f"scale_loss was called {self._next_loss + 1} times before step(), but the optimizer was wrapped with "
                f"num_loss={len(self._scalers)}. Use handle.wrap_optimizer(optimizer, num_loss={self._next_loss + 1})."
            )
        scaler = self._scalers[self._next_loss]
        self._next_loss += 1
        return scaled(loss, [self._optimizer], scaler)

    def step(self, closure: Any = None) -> Any:
        """Step, or skip the step after an overflow in any of the losses."""
        if closure is not None:
            if not self._scalers:
                return self._optimizer.step(closure)
            raise NotImplementedError("A wrapped optimizer takes no closure: compute the loss first, then call step().")
        if self._next_loss < len(self._scalers):
            raise RuntimeError(
                f"step() was called too early, after {self._next_loss} of {len(self._scalers)} losses. Call "
                "scale_loss once per loss, or use handle.wrap_optimizer(optimizer, "
                f"num_loss={max(1, self._next_loss)})."
            )
        self._next_loss = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer" or name.startswith("__"):  # a copy under construction has none yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def _adopt(optimizer: Optimizer) -> None:
    if "_amp_stash" not in optimizer.__dict__:
        optimizer_patches.adopt(optimizer, master_weights=False, casts_functions=True)
        _amp_state.optimizers.add(optimizer)
