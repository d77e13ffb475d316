"""``FP16_Optimizer``: an optimizer with float32 master weights and loss scaling, the predecessor of ``amp``.

Differences from Apex: it is a ``torch.optim.Optimizer``, so schedulers accept it; it works on any device and with
bfloat16; several ``backward`` calls before a step add up in float32 parameters as in the others; model weights written
after its creation survive the next step; ``state_dict`` holds plain data, and what Apex saved loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.master_weights import all_params
from harness.apex.amp.messages import is_rank_zero, logger
from harness.apex.amp.scaler import INITIAL_SCALE, MAXIMUM, WINDOW
from harness.apex.fp16_utils.eager_masters import EagerMasters
from harness.apex.fp16_utils.fp16util import clip_grad_norm
from harness.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, scaler_from, scaler_state
from harness.apex.optimizer_proxy import OptimizerProxy

DYNAMIC: dict[str, Any] = {"init_scale": INITIAL_SCALE, "scale_window": WINDOW, "max_loss_scale": MAXIMUM}  # as in amp


class FP16_Optimizer(OptimizerProxy):
    """``init_optimizer`` with a float32 master in place of each of its trainable float16 or bfloat16 parameters.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()

    The scale is ``static_loss_scale``, or with ``dynamic_loss_scale`` that of ``amp``: it starts at 2**16, halves on
    overflow and doubles after 2000 steps without, up to 2**24. ``dynamic_loss_args`` are arguments of
    ``DynamicLossScaler``. ``verbose``: log skipped steps, on rank 0.

    float32 parameters are their own masters; other dtypes raise TypeError. Attributes: ``optimizer``, the one given;
    ``loss_scaler``; ``overflow``, True if the latest gradients hold an inf or NaN.
    """

    inner_name = "optimizer"

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(f"init_optimizer must be a torch.optim.Optimizer; got {type(init_optimizer).__name__}")
        if isinstance(init_optimizer, FP16_Optimizer) or hasattr(init_optimizer, "_amp_stash"):
            raise RuntimeError(
                "The optimizer already has masters, from another FP16_Optimizer or from amp; use only one of them."
            )
        self.optimizer, self.verbose = init_optimizer, verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**{**DYNAMIC, **(dynamic_loss_args or {})})
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.overflow, self.first_closure_call_this_step = False, True
        self._masters = EagerMasters(init_optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # without the hook registries of Optimizer: hooks are the inner optimizer's

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = scale

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's parameters that have a master, group by group."""
        return self._masters.fp16_groups

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters, in the same positions."""
        return self._masters.fp32_from_fp16_groups

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that are their own masters, group by group."""
        return self._masters.fp32_from_fp32_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose float16 parameters get masters."""
        self._masters.refresh()
        self._masters.add_group(self.optimizer, self.optimizer.add_param_group, param_group)

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = False, set_to_none: bool | None = None
    ) -> None:
        """Zero, or set to None, the gradients of model parameters and masters. ``set_to_none`` is torch's name."""
        self._masters.zero_grad(self.optimizer, set_grads_to_None if set_to_none is None else set_to_none)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss`` times the scale; gradients add up until ``zero_grad``.

        ``update_master_grads=False`` for all but the last of several losses saves work; call ``update_master_grads``
        before the step then.
        """
        self._masters.expect_scaled_grads(self.loss_scale)
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients, unscaled, to the masters; on overflow set ``overflow`` and copy nothing.

        The model's float16 gradients keep the scale. With a dynamic scale this waits for the device.
        """
        masters = self._masters
        masters.refuse_unfrozen()
        self.overflow = self.loss_scaler.has_overflow((*masters.all_fp16_params, *masters.all_fp32_from_fp32_params))
        if not self.overflow:
            masters.take_grads(self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients together to ``max_norm``; return their norm before, or -1 on overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm(list(all_params(self.optimizer)), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients, unscaled, group by group; None on overflow, when they are invalid."""
        if self.overflow:
            self._warn("the latest gradients overflowed, so there are none to inspect")
            return None
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the masters and copy them to the model; return what the inner optimizer returns.

        After an overflow it only reduces the scale and returns None. ``closure`` must call ``zero_grad`` and
        ``backward`` of this object and return the loss; no ``backward`` is needed before. If its gradients overflow it
        is called again at a smaller scale.
        """
        self._masters.refresh()
        if closure is not None:
            result = self._step_with_closure(closure)
        elif self.overflow:
            self._reduce_scale("the step is skipped")
            return None
        else:
            result = self.optimizer.step()
        self.loss_scaler.update_scale(False)
        self._masters.copy_to_model()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._masters.copy_to_model()  # the inner optimizer has moved the masters since the last call
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self._reduce_scale("the closure is called again")
                if self.loss_scale == before:
                    raise FloatingPointError(
                        f"The closure's gradients hold an inf or NaN at every loss scale down to {before:g}: "
                        "check the loss, the data and the learning rate."
                    )
                loss = closure()
            return loss

        try:
            return self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def _reduce_scale(self, consequence: str) -> None:
        before = self.loss_scale
        self.loss_scaler.update_scale(True)
        self._warn(f"gradient overflow: {consequence}; loss scale {before:g}, now {self.loss_scale:g}")

    def _warn(self, text: str) -> None:
        if self.verbose and is_rank_zero():
            logger.warning("FP16_Optimizer: %s", text)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return plain data under Apex's keys: inner optimizer, scaler, masters by group (aliases, not copies)."""
        self._masters.refresh()
        return {
            "loss_scaler": scaler_state(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what ``state_dict`` saved, here or in Apex, and copy the masters to the model.

        The saved scaler replaces the present one, static or dynamic. The model's other weights and buffers are loaded
        with the model, before or after. Raises ValueError, before anything is changed, if the masters do not fit.
        """
        saved = [list(group) for group in state_dict["fp32_from_fp16"]]
        shapes = [[tuple(master.shape) for master in group] for group in self.fp32_from_fp16_groups]
        if (seen := [[tuple(master.shape) for master in group] for group in saved]) != shapes:
            raise ValueError(
                f"The saved masters do not fit: shapes {seen} in the file, {shapes} here. Build the optimizer from "
                "the same model, in the same precision, with the same groups."
            )
        scaler = scaler_from(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_scale = scaler, isinstance(scaler, DynamicLossScaler)
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self._masters.load_values(saved)
