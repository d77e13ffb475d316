"""``FP16_Optimizer``: an optimizer with float32 master weights and loss scaling, before there was ``amp``.

Where it differs from Apex's: it is a ``torch.optim.Optimizer``, so schedulers take it; it works on any device and also
for bfloat16; several ``backward`` calls before a step add up in float32 parameters as in the others; model weights
written after it was made are not lost at the next step; ``state_dict`` holds plain data, and what Apex saved loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.state import is_rank_zero, logger
from harness.apex.fp16_utils.fp16util import clip_grad_norm
from harness.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, scaler_from, scaler_state
from harness.apex.fp16_utils.masters import Masters


class FP16_Optimizer(Optimizer):
    """``init_optimizer`` with a float32 master in place of each of its trainable float16 or bfloat16 parameters.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()

    ``static_loss_scale``: unless ``dynamic_loss_scale``, which starts at 2**32, halves on overflow and doubles after
    1000 steps without; ``dynamic_loss_args`` are arguments of ``DynamicLossScaler``. (``amp`` has 2**16 and 2000.)
    ``verbose``: say so when a step is skipped, on rank 0.

    float32 parameters are their own masters; others raise TypeError. Attributes: ``optimizer``, the one given;
    ``loss_scaler``; ``overflow``, whether the newest gradients hold an inf or NaN.
    """

    _step_supports_amp_scaling = False  # a GradScaler must not leave unscaling to this step

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        # Without the constructor of Optimizer: parameters, state and hooks are those of the optimizer inside.
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(f"init_optimizer must be a torch.optim.Optimizer; seen: {type(init_optimizer).__name__}")
        if isinstance(init_optimizer, FP16_Optimizer) or hasattr(init_optimizer, "_amp_stash"):
            raise RuntimeError(
                "the optimizer has masters already, of another FP16_Optimizer or of amp; use one of them"
            )
        self.optimizer, self.verbose = init_optimizer, verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**dict(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.overflow, self.first_closure_call_this_step = False, True
        self._masters = Masters(init_optimizer)

    # What the optimizer inside answers

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer inside, with masters in place of float16 parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer inside, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by; may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = scale

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's parameters that have a master, group by group."""
        return self._masters.fp16

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters, in the same places."""
        return self._masters.of_fp16

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that are their own masters, group by group."""
        return self._masters.fp32

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose float16 parameters get masters."""
        self._masters.add_group(param_group)

    # One step

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = False, set_to_none: bool | None = None
    ) -> None:
        """Zero, or set to None, the gradients of model parameters and masters. ``set_to_none`` is torch's name."""
        self._masters.zero_grad(set_grads_to_None if set_to_none is None else set_to_none)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of ``loss`` times the scale; gradients add up until ``zero_grad``.

        ``update_master_grads=False`` for all but the last of several losses saves work; call ``update_master_grads``
        before the step then.
        """
        self._masters.expect_scaled_grads(self.loss_scale)
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Bring the model's gradients, unscaled, to the masters; on overflow note it and leave masters' as they were.

        The model's float16 gradients keep the scale. With a dynamic scale this waits for the device.
        """
        self._masters.refuse_unfrozen()
        self.overflow = self.loss_scaler.has_overflow((*self._masters.all_fp16(), *self._masters.all_fp32()))
        if not self.overflow:
            self._masters.take_grads(self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients together to ``max_norm``; return their norm before, or -1 on overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm(list(self._masters.in_optimizer()), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The masters' gradients, unscaled, group by group; None on overflow, when they are not to be trusted."""
        if self.overflow:
            self._say("the newest gradients overflowed, so there are none to inspect")
            return None
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the masters and copy them to the model; return what the optimizer inside returns.

        After an overflow nothing is stepped, the scale is reduced, and None is returned. ``closure`` must call
        ``zero_grad`` and ``backward`` of this object and return the loss; no ``backward`` is then needed before. If
        its gradients overflow it is called again at a smaller scale.
        """
        self._masters.follow_model()
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
                self._masters.copy_to_model()  # the optimizer inside has moved the masters
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self._reduce_scale("the closure is called again")
                if self.loss_scale == before:
                    raise FloatingPointError(
                        f"the closure's gradients hold an inf or NaN at every loss scale down to {before:g}: "
                        "look at the loss, the data and the learning rate"
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
        self._say(f"gradient overflow: {consequence}; loss scale {before:g}, now {self.loss_scale:g}")

    def _say(self, text: str) -> None:
        if self.verbose and is_rank_zero():
            logger.warning("FP16_Optimizer: %s", text)

    # Saving

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Plain data under Apex's keys: the optimizer inside, the scaler, the masters group by group (not copies)."""
        self._masters.follow_model()
        return {
            "loss_scaler": scaler_state(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over what ``state_dict`` saved, here or in Apex, and copy the masters to the model.

        The saved scaler replaces the present one, static or dynamic. The model's other weights and buffers are loaded
        with the model, before or after. Raises ValueError, before anything is changed, if the masters do not fit.
        """
        saved = [list(group) for group in state_dict["fp32_from_fp16"]]
        shapes = [[tuple(master.shape) for master in group] for group in self.fp32_from_fp16_groups]
        if (seen := [[tuple(master.shape) for master in group] for group in saved]) != shapes:
            raise ValueError(
                f"the saved masters do not fit: shapes {seen} in the file, {shapes} here. Build the optimizer from "
                "the same model, in the same precision, with the same groups."
            )
        scaler = scaler_from(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_scale = scaler, isinstance(scaler, DynamicLossScaler)
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self._masters.load(saved)
