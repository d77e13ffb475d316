"""The masters of ``FP16_Optimizer``: created at once, with gradients that carry the loss scale until a step.

``amp`` creates masters late and unscales context by context, see ``amp.stash``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.master_weights import MasterWeights, all_params
from harness.apex.amp.model_casts import REDUCED
from harness.apex.fp16_utils.fp16util import model_grads_to_master_grads


class EagerMasters(MasterWeights):
    """The masters of ``optimizer``, whose ``param_groups`` hold them from now on."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._fp32_grads_are_scaled = False
        self.adopt_all(optimizer)

    def zero_grad(self, optimizer: Optimizer, to_none: bool) -> None:
        """Set the gradients of model and masters to zero, or to None."""
        for parameter in (*self.all_fp16_params, *all_params(optimizer)):
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def expect_scaled_grads(self, scale: float) -> None:
        """Prepare for a backward pass times ``scale``: scale unscaled float32 gradients again, so that new ones add up.

        The float16 gradients of the model are never unscaled.
        """
        if not self._fp32_grads_are_scaled:
            _multiply_grads(self.all_fp32_from_fp32_params, scale)
            self._fp32_grads_are_scaled = True

    def take_grads(self, scale: float) -> None:
        """Set the masters' gradients to the model's divided by ``scale``."""
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        _multiply_grads(self.all_fp32_from_fp16_params, 1.0 / scale)
        if self._fp32_grads_are_scaled:
            _multiply_grads(self.all_fp32_from_fp32_params, 1.0 / scale)
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


@torch.no_grad()
def _multiply_grads(params: Sequence[Tensor], factor: float) -> None:
    gradients = [parameter.grad for parameter in params if parameter.grad is not None]
    if factor == 1.0:
        return
    if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor)
