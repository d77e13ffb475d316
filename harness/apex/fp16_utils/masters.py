"""The float32 masters of an optimizer's float16 and bfloat16 parameters: made at once, and put in their place.

What ``amp`` does about the same is in ``amp.masters``: there masters are made late, and scaling works context by
context. The rule by which masters follow a model that somebody wrote to is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.casting import REDUCED
from harness.apex.amp.masters import recast_state
from harness.apex.fp16_utils.fp16util import master_params_to_model_params, model_grads_to_master_grads


class Masters:
    """The parameters of ``optimizer``, group by group: ``fp16`` (or bfloat16) with their masters ``of_fp16``, and
    ``fp32``, which are their own. Its ``param_groups`` hold the masters from now on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.fp16: list[list[Tensor]] = []
        self.of_fp16: list[list[Tensor]] = []
        self.fp32: list[list[Tensor]] = []
        self._frozen: list[Tensor] = []
        self._versions: list[int] = []
        self._fp32_grads_are_scaled = False
        for group in optimizer.param_groups:
            _check_dtypes(group)
        for group in optimizer.param_groups:
            self._adopt(group)

    def add_group(self, group: dict[str, Any]) -> None:
        """Add a group to the optimizer, with masters."""
        self.follow_model()
        self._optimizer.add_param_group(group)
        added = self._optimizer.param_groups[-1]
        try:
            _check_dtypes(added)
        except TypeError:
            self._optimizer.param_groups.pop()
            raise
        self._adopt(added)

    def _adopt(self, group: dict[str, Any]) -> None:
        state, fp16, of_fp16, fp32 = self._optimizer.state, [], [], []
        for i, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                self._frozen.append(parameter)
            elif parameter.dtype is torch.float32:
                fp32.append(parameter)
            else:
                master = parameter.detach().float().requires_grad_()
                fp16.append(parameter)
                of_fp16.append(master)
                group["params"][i] = master
                if parameter in state:
                    state[master] = recast_state(state.pop(parameter), master)
        self.fp16.append(fp16)
        self.of_fp16.append(of_fp16)
        self.fp32.append(fp32)
        self._record_versions()

    def all_fp16(self) -> list[Tensor]:
        """The model's parameters that have a master."""
        return [parameter for group in self.fp16 for parameter in group]

    def all_of_fp16(self) -> list[Tensor]:
        """Their masters, in the same order."""
        return [master for group in self.of_fp16 for master in group]

    def all_fp32(self) -> list[Tensor]:
        """The parameters that are their own masters."""
        return [parameter for group in self.fp32 for parameter in group]

    def in_optimizer(self) -> Iterator[Tensor]:
        """All that the optimizer holds."""
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    # Gradients

    def zero_grad(self, to_none: bool) -> None:
        """Gradients of model and masters to zero, or to None."""
        for parameter in (*self.all_fp16(), *self.in_optimizer()):
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def expect_scaled_grads(self, scale: float) -> None:
        """Before a backward times ``scale``: float32 gradients that were unscaled are scaled again, so that they and
        the new ones add up. (The float16 gradients of the model are never unscaled.)"""
        if not self._fp32_grads_are_scaled:
            _multiply_grads(self.all_fp32(), scale)
            self._fp32_grads_are_scaled = True

    def take_grads(self, scale: float) -> None:
        """Give the masters the model's gradients divided by ``scale``."""
        model_grads_to_master_grads(self.all_fp16(), self.all_of_fp16())
        _multiply_grads(self.all_of_fp16(), 1.0 / scale)
        if self._fp32_grads_are_scaled:
            _multiply_grads(self.all_fp32(), 1.0 / scale)
            self._fp32_grads_are_scaled = False

    def refuse_unfrozen(self) -> None:
        """Raise RuntimeError if a parameter that was frozen is so no more: it has no master."""
        if any(parameter.requires_grad and parameter.dtype in REDUCED for parameter in self._frozen):
            raise RuntimeError(
                "a parameter that was frozen when FP16_Optimizer was made now requires gradients, and has no master. "
                "Unfreeze it first and make the FP16_Optimizer after that, or give it to add_param_group."
            )

    # Values

    def copy_to_model(self) -> None:
        """The masters, rounded, into the model."""
        master_params_to_model_params(self.all_fp16(), self.all_of_fp16())
        self._record_versions()

    def _record_versions(self) -> None:
        self._versions = [parameter._version for parameter in self.all_fp16()]

    @torch.no_grad()
    def follow_model(self) -> None:
        """Where the model was written since, as by weights loaded late, bring the masters in line.

        An element of a master that does not round to the model's takes its value; the others keep their extra bits.
        """
        pairs = zip(self.all_fp16(), self.all_of_fp16(), self._versions, strict=True)
        for parameter, master in [(p, m) for p, m, version in pairs if p._version != version]:
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        self._record_versions()

    @torch.no_grad()
    def load(self, saved: Sequence[Sequence[Tensor]]) -> None:
        """Values for ``of_fp16``, in the same shapes, into the masters and the model."""
        for group, values in zip(self.of_fp16, saved, strict=True):
            for master, value in zip(group, values, strict=True):
                master.copy_(value)
        self.copy_to_model()


def _check_dtypes(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.requires_grad and parameter.dtype not in (*REDUCED, torch.float32):
            raise TypeError(
                f"the optimizer holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; "
                "FP16_Optimizer takes float32, float16 and bfloat16. Cast it with .float()."
            )


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
