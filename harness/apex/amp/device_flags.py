"""Overflow flags that stay on the GPU: a fused optimizer reads them there at once, the host later.

Otherwise the host waits, at the end of each ``scale_loss``, for the backward pass, to learn whether gradients
overflowed. Where every optimizer of the context can skip a step by itself, the flag goes to it as ``found_inf``, and
the loss scale changes on the device, too. The host repeats these changes from the flags that it reads a window later,
or when asked: by ``amp.state_dict``, an optimizer's ``state_dict``, ``already_patched``, or a read of the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

READ_EVERY = 32  # flags
_MOST = 16 * READ_EVERY  # flags that may wait: the host is then so far ahead that a wait costs nothing
_TORCH_FUSED: dict[type[Optimizer], str] = {
    torch.optim.SGD: "momentum_buffer",
    torch.optim.Adam: "exp_avg",
    torch.optim.AdamW: "exp_avg",
}


class _Copy(NamedTuple):
    """The copy of the first ``number`` waiting flags to the host, complete after ``event``."""

    number: int
    values: Tensor
    event: torch.cuda.Event


class Flags:
    """Flags in the order in which they were raised, and who is to hear each. One instance, ``flags``."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all flags."""
        self._waiting: list[tuple[Tensor, Callable[[bool], None]]] = []
        self._copy: _Copy | None = None

    def push(self, flag: Tensor, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` with whether ``flag``, a scalar on a GPU, is not 0, once the host knows it."""
        if self._waiting and self._waiting[0][0].device != flag.device:
            self.read_flags()
        self._waiting.append((flag, heard))
        if self._copy is not None and self._copy.event.query():
            copy, self._copy = self._copy, None
            self._tell(copy.values[: copy.number].tolist())
        elif len(self._waiting) >= _MOST:
            self.read_flags()
        if self._copy is None and len(self._waiting) >= READ_EVERY:
            values = self._stacked().to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flag.device))
            self._copy = _Copy(len(self._waiting), values, event)

    def read_flags(self) -> None:
        """Read all flags now. The host waits for the device, if there are any."""
        if self._waiting:
            values, self._copy = self._stacked().tolist(), None
            self._tell(values)

    def _stacked(self) -> Tensor:
        return torch.stack([flag for flag, _ in self._waiting])

    def _tell(self, values: list[float]) -> None:
        told, self._waiting = self._waiting[: len(values)], self._waiting[len(values) :]
        for value, (_, heard) in zip(values, told, strict=True):
            heard(value != 0)


flags = Flags()


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether ``optimizer.step()`` changes nothing where ``found_inf`` is not 0, as if it had not been called.

    It is not so before its state exists, which a step that is not called does not create.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any(hooks) or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return False
    state_key: str | None = None
    # Asked of the class itself: a class derived from it, or a wrapper like LARC, may do more in its step.
    if "state_key_for_device_skip" in vars(type(optimizer)):
        state_key = optimizer.state_key_for_device_skip  # type: ignore[attr-defined]
    elif type(optimizer) in _TORCH_FUSED and all(group.get("fused") for group in optimizer.param_groups):
        state_key = _TORCH_FUSED[type(optimizer)]
    if state_key is None:
        return False
    for group in optimizer.param_groups:
        needs_state = group.get("momentum") != 0  # SGD without it has no state; the others have no momentum
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.device != device or param.grad.layout is not torch.strided or hasattr(param, "placements"):
                return False  # a DTensor has placements: its flag is not that of all shards
            if needs_state and optimizer.state[param].get(state_key) is None:
                return False
    return True


def step_with_flag(optimizer: Optimizer, flag: Tensor, step: Callable[[], Any]) -> Any:
    """Call ``step``, that of ``optimizer``, which does nothing where ``flag`` is not 0."""
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    try:
        result = step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
    uncount = getattr(optimizer, "uncount_step", None)
    if uncount is not None:
        groups = list(optimizer.param_groups)
        flags.push(flag, lambda skipped: uncount(groups) if skipped else None)
    return result
