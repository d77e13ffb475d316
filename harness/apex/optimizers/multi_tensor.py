"""The updates of the optimizers other than LAMB under the names and with the arguments of Apex's extension ``amp_C``.

All take ``(chunk_size, noop_flag, tensor_lists, ...)``, as described in ``amp_C``; ``chunk_size`` has no effect. In the
lists, g are gradients, p parameters, m and v moments. Apart from the lists that a docstring names as changed, tensors
keep their values. ``mode`` is 0 for weight decay as a part of the gradient, 1 for decoupled weight decay.

Only some skip the update if ``noop_flag`` is set; the others let inf and NaN through, as in Apex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.batch import copied_where_new, like, writable
from harness.apex.optimizers.fused_adagrad import adagrad_update
from harness.apex.optimizers.fused_adam import adam_update
from harness.apex.optimizers.fused_novograd import blended_norms, novograd_update
from harness.apex.optimizers.fused_sgd import sgd_update
from harness.apex.tensor_groups import TensorLists, checked_lists, chosen, indices_by_kind, norms

Lists = list[list[Tensor]]


def apply(lists: Lists, weights: int, changed: str, update: Callable[[list[int], Lists], None]) -> None:
    """Call ``update(indices, wide)`` for each kind of tensors in ``lists``, then copy results back.

    ``wide`` holds the tensors with these indices, list by list, in the dtype and layout that kernels need for those of
    the list number ``weights``. ``changed``: the numbers of the lists to copy back.
    """
    for indices in indices_by_kind(*lists):
        indices = [i for i in indices if lists[weights][i].numel()]
        if not indices:
            continue
        given = [[tensors[i] for i in indices] for tensors in lists]
        targets = [writable(tensor) for tensor in given[weights]]
        layouts = [[like(*pair) for pair in zip(tensors, targets, strict=True)] for tensors in given]
        layouts[weights] = targets
        wide = [copied_where_new(*pair) for pair in zip(given, layouts, strict=True)]
        update(indices, wide)
        for number in map(int, changed):
            copied_where_new(wide[number], given[number])


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD for ``[g, p, m]`` or ``[g, p, m, copy]`` with gradients ``g * scale``. Changes p, m and copy, a copy of p.

    ``first_run``: m starts as the gradient. Does nothing if ``noop_flag`` is set.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_sgd", 3, 4)
    group = dict(weight_decay=wd, momentum=momentum, dampening=dampening, lr=lr, nesterov=nesterov)

    def update(indices: list[int], wide: Lists) -> None:
        grads, weights, buffers = wide[:3]
        skip = is_set(noop_flag, weights[0])
        if scale != 1.0:
            grads = list(torch._foreach_mul(grads, scale))
        sgd_update(group, weights, grads, buffers if momentum else [], first_run, wd_after_momentum, skip)
        for old, new in zip(*wide[3:], weights, strict=True) if wide[3:] else ():
            old.copy_(torch.where(skip, old, new))

    apply(lists, 1, "123"[: len(lists) - 1], update)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor | int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam for ``[g, p, m, v]``. Changes p, m and v. ``step`` counts from 1."""
    lists = checked_lists(tensor_lists, "multi_tensor_adam", 4)
    group = adam_group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    apply(lists, 1, "123", lambda _, wide: adam_update(group, wide[1], wide[0], wide[2], wide[3], bool(mode)))


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Adam for ``[g, p, m, v]`` with gradients ``g * inv_scale``. Changes all lists; none if the flag is set."""
    lists = checked_lists(tensor_lists, "multi_tensor_adam_capturable", 4)
    group = adam_group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    apply(lists, 1, "0123", lambda _, wide: _unscale_and_update(group, wide, mode, inv_scale, noop_flag))


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As ``multi_tensor_adam_capturable`` for ``[g, p, m, v, master]``: updates the masters and rounds them into p."""
    lists = checked_lists(tensor_lists, "multi_tensor_adam_capturable_master", 5)
    group = adam_group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)

    def update(indices: list[int], wide: Lists) -> None:
        grads, weights, exp_avgs, exp_avg_sqs, masters = wide
        _unscale_and_update(group, [grads, masters, exp_avgs, exp_avg_sqs], mode, inv_scale, noop_flag)
        for old, new in zip(weights, masters, strict=True):
            old.copy_(torch.where(is_set(noop_flag, old), old, new))

    apply(lists, 4, "01234", update)


def _unscale_and_update(group: dict[str, Any], wide: Lists, mode: int, inv_scale: Tensor, noop_flag: Tensor) -> None:
    skip = is_set(noop_flag, wide[1][0])
    torch._foreach_mul_(wide[0], torch.where(skip, 1.0, inv_scale.to(skip.device).reshape(())))
    adam_update(group, wide[1], wide[0], wide[2], wide[3], bool(mode), found_inf=skip)


def is_set(noop_flag: Tensor, tensor: Tensor) -> Tensor:
    """Whether the flag is set, as a scalar on the device of ``tensor``."""
    return (noop_flag != 0).to(tensor.device).reshape(())


def adam_group(
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor | int,
    bias_correction: int,
    weight_decay: Tensor | float,
) -> dict[str, Any]:
    """The options of a kernel as the group of an optimizer."""
    return dict(
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step.reshape(()) if isinstance(step, Tensor) else step,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        grad_averaging=1,
    )


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Adagrad for ``[g, p, sums of squares]``. Changes p and the sums."""
    lists = checked_lists(tensor_lists, "multi_tensor_adagrad", 3)
    group = dict(lr=lr, eps=epsilon, weight_decay=weight_decay)
    apply(lists, 1, "12", lambda _, wide: adagrad_update(group, wide[1], wide[0], wide[2], bool(mode)))


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """NovoGrad for ``[g, p, m]`` and their running norms ``grad_norms``, shape ``(len(g),)``. Changes p, m and norms.

    ``moment_mode`` 0 accumulates normalized gradients plus weight decay, 1 raw gradients. ``norm_type`` is 2, or 0 for
    the largest absolute value. ``step`` counts from 1.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_novograd", 3)
    group = adam_group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    group |= dict(grad_averaging=grad_averaging, norm_type=norm_type)

    def update(indices: list[int], wide: Lists) -> None:
        new = norms(wide[0], 2 if norm_type == 2 else float("inf"))
        blend = blended_norms(group, chosen(grad_norms, indices).to(new.device), new)
        torch._foreach_copy_([grad_norms[i] for i in indices], list(blend.to(grad_norms).unbind()))
        novograd_update(group, wide[1], wide[0], wide[2], blend, moment_mode == 0)

    apply(lists, 1, "12", update)
