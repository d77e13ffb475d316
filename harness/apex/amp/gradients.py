"""The gradients around one ``scale_loss`` context (contract 3.3).

``prepare`` sets the gradients of earlier contexts aside, without loss scale. ``finish`` unscales the new ones, adds the
earlier ones back and lets the scaler look for overflow. Each gradient is read and written in as few passes as its case
allows: one when nothing was accumulated, two otherwise. In the second case the *sum* is checked, even of a parameter
that the context did not reach: an inf left behind by a skipped step, or by a context that checked nothing, is found.

``parameter`` below is what the model computes with. ``target`` is what the optimizer steps on: the master of a
reduced-precision parameter, or the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.accumulated_gradients import announce_aside, set_aside, take_aside, withdraw_aside
from harness.apex.amp.master_weights import all_params
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.stash import AmpStash, stash_of
from harness.apex.dtypes import REDUCED


def own_params(optimizer: Optimizer, stash: AmpStash) -> list[Tensor]:
    """Return the parameters that the optimizer steps on directly."""
    return stash.all_fp32_from_fp32_params if stash.master_weights else list(all_params(optimizer))


def _with_targets(optimizer: Optimizer, stash: AmpStash) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter, target) of every parameter."""
    own = [(parameter, parameter) for parameter in own_params(optimizer, stash)]
    return [*own, *zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)]


def prepare(optimizer: Optimizer, scale: float | Tensor = 1.0, delayed: bool = False) -> None:
    """Make ``optimizer`` ready for a backward pass of a loss multiplied by ``scale``.

    ``delayed``: the context will not unscale, so existing gradients are multiplied by ``scale`` and stay in place.
    """
    stash = stash_of(optimizer)
    if stash.master_weights:
        stash.create_masters(optimizer)
        stash.adopt_unfrozen(optimizer)
        stash.refresh()
    own = own_params(optimizer, stash)
    if stash.params_have_scaled_gradients:
        rescale(own + stash.all_fp16_params, scale, stash.scaled_by)
        stash.scaled_by = scale
        return
    if stash.already_patched:
        # The coming step will be skipped: its gradients, perhaps inf, must not count in the next overflow check.
        for parameter in own:
            parameter.grad = None
        stash.drop_master_gradients()
    for parameter, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        parameter.grad = None  # the scaled gradient of the last context, already in the master
        if master.grad is not None:
            set_aside(parameter, master.grad)
    if stash.master_weights or not delayed:
        announce_aside(stash, own + stash.all_fp16_params)
    if delayed:
        rescale(own, scale)
        return
    for parameter in own:
        if parameter.grad is not None:
            set_aside(parameter, parameter.grad.clone() if _is_shared(parameter.grad) else parameter.grad)
            parameter.grad = None


def mark_delayed(optimizer: Optimizer, scale: float | Tensor) -> None:
    """End a delayed context: the gradients carry ``scale``."""
    stash = stash_of(optimizer)
    stash.params_have_scaled_gradients, stash.scaled_by = True, scale


def finish(optimizer: Optimizer, scaler: LossScaler, scale: float | Tensor) -> None:
    """Unscale the gradients of the context that ends into their targets."""
    stash = stash_of(optimizer)
    fresh: list[Tensor] = []  # scaled, to unscale in place
    copies: list[tuple[Tensor, Tensor]] = []  # a new gradient of a master, and what is copied into it
    sums: list[tuple[Tensor, Tensor]] = []  # one accumulated before, unscaled, and what is added to it
    unchecked: list[Tensor] = []  # accumulated before, perhaps in contexts that checked nothing, and not in the others
    for parameter, target in _with_targets(optimizer, stash):
        earlier, new = take_aside(parameter), parameter.grad
        if earlier is None and target is not parameter:
            earlier = target.grad
        if new is None:
            if earlier is not None:
                target.grad = earlier = earlier.to(target.dtype)
                unchecked.append(values_of(earlier))
        elif new.is_sparse or (earlier is not None and earlier.is_sparse):
            target.grad = total = _finish_sparse(parameter, target, earlier, new, scaler, scale)
            if earlier is not None:
                unchecked.append(values_of(total))
        elif earlier is not None:
            target.grad = earlier = earlier.to(target.dtype)
            sums.append((earlier, new))
        elif target is parameter:
            fresh.append(new)
        else:
            target.grad = torch.empty_like(target)
            copies.append((target.grad, new))
    if copies:
        torch._foreach_copy_(*_columns(copies))
    scaler.unscale_(fresh + [copy for copy, _ in copies], scale)
    if sums:
        _add(sums, float(1.0 / scale))
    scaler.unscale_([total for total, _ in sums] + unchecked, 1.0)
    withdraw_aside(stash)
    stash.params_have_scaled_gradients = False


def restore(optimizer: Optimizer) -> None:
    """Put back what ``prepare`` set aside, after the body of a context raised; its new gradients are dropped."""
    stash = stash_of(optimizer)
    for parameter, target in _with_targets(optimizer, stash):
        earlier = take_aside(parameter)
        if not stash.params_have_scaled_gradients:  # else the gradients of delayed contexts are in it, too
            parameter.grad = None
        if earlier is not None:  # perhaps reduced over ranks by now, in float32
            target.grad = earlier.to(target.dtype)
    withdraw_aside(stash)


def _add(pairs: list[tuple[Tensor, Tensor]], inverse: float) -> None:
    """Add the second of each pair, times ``inverse``, to the first. In reduced precision multiply first, in place, with
    a float32 factor."""
    wide = [pair for pair in pairs if pair[0].dtype not in REDUCED]
    narrow = [pair for pair in pairs if pair[0].dtype in REDUCED]
    if wide:
        torch._foreach_add_(*_columns(wide), alpha=inverse)
    if narrow:
        sums, added = _columns(narrow)
        torch._foreach_mul_(added, inverse)
        torch._foreach_add_(sums, added)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _finish_sparse(
    parameter: Tensor, target: Tensor, earlier: Tensor | None, new: Tensor, scaler: LossScaler, scale: float | Tensor
) -> Tensor:
    """Return the gradient for ``target``: sparse for a parameter that is its own target, dense for a master."""
    new = new.coalesce() if new.is_sparse else new
    if target is not parameter:
        new = (new.to_dense() if new.is_sparse else new.clone()).to(target.dtype)
    scaler.unscale_([values_of(new)], scale)
    if earlier is not None:
        new = earlier + new if not earlier.is_sparse else new + earlier
    return new


def _is_shared(gradient: Tensor) -> bool:
    """Return whether other tensors use the memory of ``gradient``, as where it is a view of a buffer in which a wrapper
    reduces gradients, and which the coming backward pass will overwrite."""
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    return _num_users(gradient) > _ALONE


def _num_users(tensor: Tensor) -> int:
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users


_ALONE = _num_users(torch.empty(0, device="cpu"))  # 1 in torch 2.9, 2 in later versions


def values_of(gradient: Tensor) -> Tensor:
    """Return the dense tensor that holds the elements of ``gradient``, to compute on in place."""
    return gradient._values() if gradient.is_sparse else gradient  # values() demands a coalesced tensor, and copies


@torch.no_grad()
def rescale(parameters: Iterable[Tensor], scale: float | Tensor, before: float | Tensor = 1.0) -> None:
    """Multiply gradients that carry the scale ``before`` until they carry ``scale``."""
    gradients = [values_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and scale is not before and (factor := float(scale / before)) != 1.0:
        torch._foreach_mul_(gradients, factor)
