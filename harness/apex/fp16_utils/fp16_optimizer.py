"""``FP16_Optimizer``: an optimizer with float32 master weights and loss scaling, the predecessor of ``amp``.

``optimizers.fp16_optimizer`` has the one of Apex's fused optimizers; ``ScalingOptimizer`` is the base of both.

Differences from Apex: it is a ``torch.optim.Optimizer``, so schedulers accept it; it works on any device and with
bfloat16; several ``backward`` calls before a step add up in float32 parameters as in the others; model weights written
after its creation survive the next step; ``state_dict`` holds plain data, and what Apex saved loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.gradients import rescale
from harness.apex.amp.master_weights import MasterWeights, all_params
from harness.apex.amp.messages import is_rank_zero, logger
from harness.apex.amp.scaler import INITIAL_SCALE, MAXIMUM, WINDOW
from harness.apex.dtypes import REDUCED
from harness.apex.fp16_utils.fp16util import clip_grad_norm, model_grads_to_master_grads
from harness.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, scaler_from
from harness.apex.optimizer_proxy import OptimizerProxy

DYNAMIC: dict[str, Any] = {"init_scale": INITIAL_SCALE, "scale_window": WINDOW, "max_loss_scale": MAXIMUM}  # as in amp


class ScalingOptimizer(OptimizerProxy):
    """``init_optimizer`` with masters in its ``param_groups`` and a loss scale."""

    inner_name = "optimizer"
    drops_gradients: bool  # the default of zero_grad
    fp16_groups: Any  # the model's parameters that have a master, group by group

    def __init__(self, init_optimizer: Optimizer, loss_scaler: LossScaler, dynamic: bool, verbose: bool) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(f"init_optimizer must be a torch.optim.Optimizer; got {type(init_optimizer).__name__}")
        if isinstance(init_optimizer, ScalingOptimizer) or hasattr(init_optimizer, "_amp_stash"):
            raise RuntimeError(
                "The optimizer already has masters, from another FP16_Optimizer or from amp; use only one of them."
            )
        self.optimizer, self.verbose, self.overflow = init_optimizer, verbose, False
        self.loss_scaler, self.dynamic_loss_scale = loss_scaler, dynamic

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

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool | None = None, set_to_none: bool | None = None
    ) -> None:
        """Zero, or set to None, the gradients of model parameters and masters. ``set_to_none`` is torch's name."""
        chosen = set_grads_to_None if set_to_none is None else set_to_none
        to_none = self.drops_gradients if chosen is None else chosen
        for parameter in (*sum(self.fp16_groups, []), *all_params(self.optimizer)):
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def _reduce_scale(self, consequence: str) -> None:
        before = self.loss_scale
        self._update_scale(True)
        self._warn(f"gradient overflow: {consequence}; loss scale {before:g}, now {self.loss_scale:g}")

    def _update_scale(self, overflow: bool) -> None:
        self.loss_scaler.update_scale(overflow)

    def _warn(self, text: str) -> None:
        if self.verbose and is_rank_zero():
            logger.warning("FP16_Optimizer: %s", text)


def check_fit(saved: Sequence[Sequence[Tensor]], masters: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError if the shapes of ``saved`` are not those of ``masters``, group by group."""
    seen, shapes = ([[tuple(tensor.shape) for tensor in group] for group in groups] for groups in (saved, masters))
    if seen != shapes:
        raise ValueError(
            f"The saved masters do not fit: shapes {seen} in the file, {shapes} here. Build the optimizer from "
            "the same model, in the same precision, with the same groups."
        )


class FP16_Optimizer(ScalingOptimizer):
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

    drops_gradients = False

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        arguments = {**DYNAMIC, **(dynamic_loss_args or {})}
        scaler = DynamicLossScaler(**arguments) if dynamic_loss_scale else LossScaler(static_loss_scale)
        super().__init__(init_optimizer, scaler, dynamic_loss_scale, verbose)
        self.first_closure_call_this_step = True
        self._masters = EagerMasters(init_optimizer)

    @property
    def fp16_groups(self) -> list[list[Tensor]]:  # type: ignore[override]
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
        self._update_scale(False)
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

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return plain data under Apex's keys: inner optimizer, scaler, masters by group (aliases, not copies)."""
        self._masters.refresh()
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
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
        check_fit(saved, self.fp32_from_fp16_groups)
        scaler = scaler_from(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_scale = scaler, isinstance(scaler, DynamicLossScaler)
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self._masters.load_values(saved)


class EagerMasters(MasterWeights):
    """The masters of ``optimizer``, created at once, with gradients that carry the loss scale until a step.

    ``amp`` creates masters late and unscales context by context, see ``amp.stash``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._fp32_grads_are_scaled = False
        self.adopt_all(optimizer)

    def expect_scaled_grads(self, scale: float) -> None:
        """Prepare for a backward pass times ``scale``: scale unscaled float32 gradients again, so that new ones add up.

        The float16 gradients of the model are never unscaled.
        """
        if not self._fp32_grads_are_scaled:
            rescale(self.all_fp32_from_fp32_params, scale)
            self._fp32_grads_are_scaled = True

    def take_grads(self, scale: float) -> None:
        """Set the masters' gradients to the model's divided by ``scale``."""
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        rescale(self.all_fp32_from_fp16_params, 1.0, before=scale)
        if self._fp32_grads_are_scaled:
            rescale(self.all_fp32_from_fp32_params, 1.0, before=scale)
            self._fp32_grads_are_scaled = False

    def refuse_unfrozen(self) -> None:
        """Raise RuntimeError if a parameter frozen at creation now requires gradients: it has no master."""
        if any(parameter.requires_grad and parameter.dtype in REDUCED for parameter in self.frozen):
            raise RuntimeError(
                "A parameter that was frozen when FP16_Optimizer was created now requires gradients, and has no "
                "master. Unfreeze it first and create the FP16_Optimizer after that, or pass it to add_param_group."
            )

    @torch.no_grad()
    def load_values(self, saved: Sequence[Sequence[Tensor]]) -> None:
        """Copy values, in the shapes of ``fp32_from_fp16_groups``, into the masters and the model."""
        for group, values in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(group, values, strict=True):
                master.copy_(value)
        self.copy_to_model()
