"""``LARC``: layer-wise adaptive rate control around any optimizer (contract 5.4; You, Gitman and Ginsburg 2017).

Old scripts write ``from apex.parallel.LARC import LARC`` and also ``from apex.parallel import LARC``, which gives this
module. So the module can be used as the class: called, in ``isinstance``, as a base class.

Differences from Apex: LARC is a torch optimizer, so learning-rate schedulers accept it; ``step`` takes a closure;
weight decay is restored even if ``step`` raises; norms of half-precision tensors are computed in float32.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.dtypes import wide
from harness.apex.optimizer_proxy import OptimizerProxy
from harness.apex.tensor_groups import by_device_and_dtype, norms, one_for_each


class LARC(OptimizerProxy):
    """``optimizer`` whose gradients are scaled, before its step, by each parameter's own rate.

    With weights ``p``, gradient ``g`` and the group's ``lr`` and ``weight_decay``, for each parameter

        rate = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)
        rate = min(rate / lr, 1)                       with ``clip``
        g    = (g + weight_decay * p) * rate

    and then ``optimizer`` steps without weight decay of its own. Where ``|p|`` or ``|g|`` is 0, ``g`` stays as it is,
    without weight decay. Gradients are changed in place.

    ``param_groups``, ``state``, ``defaults`` and state dicts are those of the wrapped optimizer, ``.optim``. Give LARC
    to ``amp.initialize``, or wrap an optimizer that it returned; call LARC's own ``step`` either way. Raises
    RuntimeError for sparse gradients.
    """

    inner_name = "optim"

    def __init__(self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"LARC wraps a torch optimizer; got an object of type {type(optimizer).__name__}. Use "
                "LARC(torch.optim.SGD(model.parameters(), lr=0.1))."
            )
        # Optimizer.__setstate__ creates the hook registries that Optimizer.__init__ would, and nothing else.
        self.__setstate__({"optim": optimizer, "trust_coefficient": trust_coefficient, "clip": clip, "eps": eps})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __repr__(self) -> str:
        return f"LARC(trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}) of {self.optim!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and step; return what the wrapped ``step`` returns."""
        with self._without_weight_decay() as decays:
            if closure is None:
                self._scale_gradients(decays)
                return self.optim.step()

            def scaled_closure() -> Any:
                loss = closure()
                self._scale_gradients(decays)
                return loss

            return self.optim.step(scaled_closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's, as in Apex: each can load the other's."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.optim.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.optim.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @contextmanager
    def _without_weight_decay(self) -> Iterator[list[float]]:
        """Set the groups' weight decay to 0 inside; yield the former values (0 for a group without one)."""
        groups = [group for group in self.param_groups if "weight_decay" in group]
        decays = [group["weight_decay"] for group in groups]
        former = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group in groups:
                group["weight_decay"] = 0.0
            yield former
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _scale_gradients(self, decays: list[float]) -> None:
        for group, decay in zip(self.param_groups, decays, strict=True):
            for parameters in by_device_and_dtype(p for p in group["params"] if p.grad is not None):
                self._scale(parameters, group["lr"], decay)

    def _scale(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """Scale the gradients of ``parameters``, of one device and dtype, without waiting for the device."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise RuntimeError(
                "LARC needs dense gradients, and one is sparse. Create the embedding with sparse=False, or give its "
                "parameters to a separate optimizer."
            )
        weight_norms = norms(parameters, 2, wide(parameters[0]))
        gradient_norms = norms(gradients, 2, wide(parameters[0]))
        rates = self.trust_coefficient * weight_norms / (gradient_norms + decay * weight_norms + self.eps)
        if self.clip:
            rates = (rates / lr).clamp(max=1.0)
        # Where the weights are zero, weight decay adds nothing; where the gradient is zero, the rate of 0 removes it.
        rates = torch.where(weight_norms == 0, 1.0, rates)
        rates = torch.where(gradient_norms == 0, 0.0, rates)
        if decay != 0:
            # Two roundings, as in Apex; with alpha the product would not be rounded.
            torch._foreach_add_(gradients, torch._foreach_mul(parameters, decay))
        torch._foreach_mul_(gradients, one_for_each(rates, gradients))


class _LARCModule(types.ModuleType):
    """A module that can be used as the class of the same name in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> LARC:
        return LARC(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, LARC)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, LARC)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (LARC,)


sys.modules[__name__].__class__ = _LARCModule
