"""The updates of LAMB, and the norm that it needs, as functions of Apex's extension ``amp_C``. See ``multi_tensor``."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.apex.optimizers.batch import wide
from harness.apex.optimizers.fused_lamb import lamb_stage1, lamb_stage2
from harness.apex.optimizers.multi_tensor import Lists, adam_group, apply, is_set
from harness.apex.tensor_groups import TensorLists, checked_lists, chosen, indices_by_kind, norms


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm over all of ``tensor_lists = [xs]``, shape ``(1,)``, and the norm of each x.

    The second has shape ``(len(xs),)``, or ``(0,)`` without ``per_tensor``. Both are float32 (float64 if an x is), on
    the flag's device.
    """
    (xs,) = checked_lists(tensor_lists, "multi_tensor_l2norm", 1)
    each = torch.zeros(len(xs), device=noop_flag.device)
    groups = indices_by_kind(xs)
    found = [norms([xs[i] for i in indices], dtype=wide(xs[indices[0]])) for indices in groups]
    if found:
        flat = torch.cat([part.to(each.device, non_blocking=True) for part in found])  # in the widest dtype
        places = sum(groups, [])
        each = chosen(flat, sorted(range(len(places)), key=places.__getitem__))
    total = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.masked_fill_(~total.isfinite().to(noop_flag.device).reshape(()), 1)
    return total, each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor | int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor | float,
    use_nvlamb: bool | None = False,
    inv_scale: Tensor | None = None,
) -> None:
    """LAMB for ``[g, p, m, v]`` or ``[g, p, m, v, copy]``. Changes all lists.

    g becomes the update without ``lr`` and trust ratio, copy a copy of p. Gradients are ``g * inv_scale``, divided by
    ``global_grad_norm / max_grad_norm`` if that is above 1. ``step`` counts from 1.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb", 4, 5)
    group = adam_group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    group["grad_averaging"] = grad_averaging
    factor = _clip_factor(global_grad_norm, max_grad_norm) * (1.0 if inv_scale is None else inv_scale.reshape(()))

    def update(indices: list[int], given: Lists) -> None:
        grads, weights = given[:2]
        updates = lamb_stage1(group, weights, grads, given[2], given[3], factor, bool(mode))
        torch._foreach_copy_(grads, updates)
        both = (norms(weights), norms(updates)) if weight_decay != 0 or use_nvlamb else None
        lamb_stage2(weights, updates, group["lr"], both)
        for copies in given[4:]:
            torch._foreach_copy_(copies, weights)

    apply(lists, 1, "01234"[: len(lists)], update)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """As ``multi_tensor_lamb``, but does nothing if ``noop_flag`` is set. ``found_inf`` is not read, as in Apex."""
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_mp", 4, 5)
    results = [[tensor.clone() for tensor in tensors] for tensors in lists]
    options = lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging, mode
    multi_tensor_lamb(chunk_size, noop_flag, results, *options, global_grad_norm, max_grad_norm, use_nvlamb, inv_scale)
    for old, new in zip(sum(lists, []), sum(results, []), strict=True):
        old.copy_(torch.where(is_set(noop_flag, old), old, new))


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """The first half of LAMB for ``[g, p, m, v, update]``: changes m, v and update. Weight decay is decoupled.

    ``per_tensor_decay`` has the shape ``(len(g),)``. ``step`` counts from 0.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_stage1_cuda", 5)
    factor = _clip_factor(global_grad_norm, max_global_grad_norm)

    def update(indices: list[int], given: Lists) -> None:
        grads, weights, exp_avgs, exp_avg_sqs, targets = given
        decay = chosen(per_tensor_decay, indices).to(weights[0])
        group = adam_group(1.0, beta1, beta2, epsilon, step + 1, 1, decay)
        torch._foreach_copy_(targets, lamb_stage1(group, weights, grads, exp_avgs, exp_avg_sqs, factor, True))

    apply(lists, 1, "234", update)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """The second half of LAMB for ``[p, update]``: changes p. The norms have the shape ``(len(p),)``.

    The trust ratio, the quotient of the norms, applies if ``weight_decay`` is not 0 or with ``use_nvlamb``.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_stage2_cuda", 2)
    adapted = bool(use_nvlamb) or weight_decay != 0

    def update(indices: list[int], given: Lists) -> None:
        weights, updates = given
        both = [chosen(each, indices).to(weights[0]) for each in (per_tensor_param_norm, per_tensor_update_norm)]
        lamb_stage2(weights, [each.clone() for each in updates], lr, (both[0], both[1]) if adapted else None)

    apply(lists, 0, "0", update)


def _clip_factor(norm: Tensor, max_norm: Tensor | float) -> Tensor:
    """The factor that clips gradients of this global norm, as a scalar."""
    return torch.where(norm > max_norm, max_norm / norm, 1.0).reshape(())
