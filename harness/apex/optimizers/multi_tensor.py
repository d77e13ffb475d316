"""The functions of Apex's extension ``amp_C`` on torch's fused and foreach kernels: operations on lists of tensors.

All take ``(chunk_size, noop_flag, tensor_lists, ...)`` and are usually called through ``multi_tensor_applier``. The
chunk size has no effect. ``noop_flag``, a tensor of one element, is set to 1 if an inf or NaN is found and never reset;
there is no host sync. Arithmetic is in float32 or wider; the lists may mix devices and dtypes.

In the lists of the optimizers' updates, g are gradients, p parameters, m and v moments. Apart from the lists that a
docstring names as changed, tensors keep their values. ``mode`` is 0 for weight decay as a part of the gradient, 1 for
decoupled weight decay. Only some updates are skipped if ``noop_flag`` is set; the others let inf and NaN through, as in
Apex.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.apex.dtypes import wide
from harness.apex.optimizers.batch import Group, copied_where_new, fitting, weight_buffer
from harness.apex.optimizers.fused_adagrad import adagrad_update
from harness.apex.optimizers.fused_adam import adam_update
from harness.apex.optimizers.fused_lamb import lamb_stage1, lamb_stage2
from harness.apex.optimizers.fused_novograd import next_norms, novograd_update
from harness.apex.optimizers.fused_sgd import sgd_update
from harness.apex.tensor_groups import TensorLists, checked_lists, elements, indices_by_kind, norms

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Tensors = list[Tensor]
Lists = list[Tensors]


# Scaling, sums and norms


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Compute ``out = x * scale`` for ``tensor_lists = [xs, outs]``, which may be the same list. Every x is checked."""
    xs, outs = checked_lists(tensor_lists, "multi_tensor_scale", 2)
    for indices in indices_by_kind(xs, outs):
        scaled = _scaled([xs[i] for i in indices], scale, noop_flag)
        torch._foreach_copy_([outs[i] for i in indices], scaled)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Compute ``out = a * x + b * y`` for ``tensor_lists = [xs, ys, outs]``.

    ``arg_to_check`` selects the tensors to check for inf and NaN: 0 the xs, 1 the ys, -1 both.
    """
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(f"arg_to_check is {arg_to_check!r}; it must be 0 (check x), 1 (check y) or -1 (both).")
    xs, ys, outs = checked_lists(tensor_lists, "multi_tensor_axpby", 3)
    for indices in indices_by_kind(xs, ys, outs):
        sums = _scaled([xs[i] for i in indices], a, None if arg_to_check == 1 else noop_flag)
        added = _scaled([ys[i] for i in indices], b, None if arg_to_check == 0 else noop_flag)
        torch._foreach_add_(sums, added)
        torch._foreach_copy_([outs[i] for i in indices], sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the Euclidean norm over all of ``tensor_lists = [xs]``, shape ``(1,)``, and the norm of each x.

    The second has shape ``(len(xs),)``, or ``(0,)`` without ``per_tensor``. Both are float32 (float64 if an x is), on
    the flag's device.
    """
    (xs,) = checked_lists(tensor_lists, "multi_tensor_l2norm", 1)
    each = torch.zeros(len(xs), dtype=torch.float32, device=noop_flag.device)
    groups = indices_by_kind(xs)
    found = [norms([xs[i] for i in indices], dtype=wide(xs[indices[0]])) for indices in groups]
    if found:
        flat = torch.cat([part.to(each.device, non_blocking=True) for part in found])  # in the widest dtype
        places = sum(groups, [])
        each = elements(flat, sorted(range(len(places)), key=places.__getitem__))
    total = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.masked_fill_(~total.isfinite().to(noop_flag.device).reshape(()), 1)
    return total, each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor | float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Return what ``multi_tensor_l2norm`` does, for ``x * inv_scale``. The tensors are not changed."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    if not isinstance(inv_scale, Tensor):
        inv_scale = torch.full((), inv_scale, device=total.device)  # not as_tensor, which waits for its copy
    factor = inv_scale.to(total.device).abs().reshape(())
    return total * factor, each * factor


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return what ``multi_tensor_l2norm`` does, but zeros if ``noop_flag`` is set already."""
    skip = noop_flag != 0
    return tuple(  # type: ignore[return-value]
        found.masked_fill(skip.to(found.device), 0)
        for found in multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    )


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale like ``torch._amp_update_scale_``, but shrink it only at the ``hysteresis``-th overflow.

    All tensors have one element; the first three are changed in place. Overflows count until a step without one.
    Returns ``current_scale``.
    """
    overflow = found_inf > 0
    hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker - 1, hysteresis))
    tolerated = overflow & (hysteresis_tracker > 0)
    before = current_scale.clone()
    torch._amp_update_scale_(current_scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    current_scale.copy_(torch.where(tolerated, before, current_scale))
    normal = current_scale >= torch.finfo(current_scale.dtype).smallest_normal
    return current_scale.mul_(normal)  # Apex's kernel is compiled to flush subnormal numbers to zero


def _scaled(tensors: list[Tensor], scale: float, noop_flag: Tensor | None) -> list[Tensor]:
    """Return ``tensors`` (of one kind) times ``scale``, as new ones; set ``noop_flag`` if one holds an inf or NaN."""
    scaled = [torch.empty_like(tensor, dtype=wide(tensor)) for tensor in tensors]
    torch._foreach_copy_(scaled, tensors)
    factor = 1.0
    if noop_flag is not None:
        device, dtype = scaled[0].device, scaled[0].dtype
        factor = scale if dtype is torch.float32 else 1.0  # the kernel's factor is float32, too coarse for float64
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(scaled, found_inf, torch.full_like(found_inf, factor))
        noop_flag.masked_fill_((found_inf != 0).to(noop_flag.device), 1)
    if factor != scale:
        torch._foreach_mul_(scaled, scale)
    return scaled


# Updates of optimizers


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
    """Do SGD for ``[g, p, m]`` or ``[g, p, m, copy]`` with gradients ``g * scale``. Changes p, m and its copy.

    ``first_run``: m starts as the gradient. Does nothing if ``noop_flag`` is set.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_sgd", 3, 4)
    group = dict(weight_decay=wd, momentum=momentum, dampening=dampening, lr=lr, nesterov=nesterov)

    def update(indices: list[int], grads: Tensors, weights: Tensors, buffers: Tensors, *copies: Tensors) -> None:
        skip = _is_set(noop_flag, weights[0])
        if scale != 1.0:
            grads = list(torch._foreach_mul(grads, scale))
        sgd_update(group, weights, grads, buffers if momentum else [], first_run, wd_after_momentum, skip)
        for old, new in zip(*copies, weights, strict=True) if copies else ():
            old.copy_(torch.where(skip, old, new))

    _apply(lists, "g p m copy", "p m copy", update)


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
    """Do Adam for ``[g, p, m, v]``. Changes p, m and v. ``step`` counts from 1."""
    lists = checked_lists(tensor_lists, "multi_tensor_adam", 4)
    group = _group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    _apply(lists, "g p m v", "p m v", lambda _, g, p, m, v: adam_update(group, p, g, m, v, bool(mode)))


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
    """Do Adam for ``[g, p, m, v]`` or ``[g, p, m, v, master]`` with gradients ``g * inv_scale``.

    Masters are updated in place of p, and rounded into it. Changes all lists; none if the flag is set.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_adam_capturable", 4, 5)
    group = _group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)

    def update(indices: list[int], grads: Tensors, params: Tensors, m: Tensors, v: Tensors, *masters: Tensors) -> None:
        weights = masters[0] if masters else params
        skip = _is_set(noop_flag, weights[0])
        torch._foreach_mul_(grads, torch.where(skip, 1.0, inv_scale.to(skip.device).reshape(())))
        adam_update(group, weights, grads, m, v, bool(mode), found_inf=skip)
        if weights is not params:
            for old, new in zip(params, weights, strict=True):
                old.copy_(torch.where(skip, old, new))

    _apply(lists, "g p m v master", "g p m v master", update, weights="p" if len(lists) == 4 else "master")


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


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
    """Do Adagrad for ``[g, p, sums of squares]``. Changes p and the sums."""
    lists = checked_lists(tensor_lists, "multi_tensor_adagrad", 3)
    group = dict(lr=lr, eps=epsilon, weight_decay=weight_decay)
    _apply(lists, "g p sum", "p sum", lambda _, g, p, sums: adagrad_update(group, p, g, sums, bool(mode)))


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
    """Do NovoGrad for ``[g, p, m]`` and their norms ``grad_norms``, shape ``(len(g),)``. Changes p, m and norms.

    ``moment_mode`` 0 accumulates normalized gradients plus weight decay, 1 raw gradients. ``norm_type`` is 2, or 0 for
    the largest absolute value. ``step`` counts from 1.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_novograd", 3)
    group = _group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    group |= dict(grad_averaging=grad_averaging, norm_type=norm_type)

    def update(indices: list[int], g: Tensors, p: Tensors, m: Tensors) -> None:
        new = norms(g, 2 if norm_type == 2 else float("inf"))
        blend = next_norms(group, elements(grad_norms, indices).to(new.device), new)
        torch._foreach_copy_([grad_norms[i] for i in indices], list(blend.to(grad_norms).unbind()))
        novograd_update(group, p, g, m, blend, moment_mode == 0)

    _apply(lists, "g p m", "p m", update)


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
    """Do LAMB for ``[g, p, m, v]`` or ``[g, p, m, v, copy]``. Changes all lists.

    g becomes the update without ``lr`` and trust ratio, copy a copy of p. Gradients are ``g * inv_scale``, divided by
    ``global_grad_norm / max_grad_norm`` if that is above 1. ``step`` counts from 1.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb", 4, 5)
    group = _group(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    group["grad_averaging"] = grad_averaging
    factor = _clip_factor(global_grad_norm, max_grad_norm) * (1.0 if inv_scale is None else inv_scale.reshape(()))

    def update(indices: list[int], grads: Tensors, weights: Tensors, m: Tensors, v: Tensors, *copies: Tensors) -> None:
        updates = lamb_stage1(group, weights, grads, m, v, factor, bool(mode))
        torch._foreach_copy_(grads, updates)
        both = (norms(weights), norms(updates)) if weight_decay != 0 or use_nvlamb else None
        lamb_stage2(weights, updates, group["lr"], both)
        for each in copies:
            torch._foreach_copy_(each, weights)

    _apply(lists, "g p m v copy", "g p m v copy", update)


@torch.no_grad()
def multi_tensor_lamb_mp(
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
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """Do ``multi_tensor_lamb``, but nothing if ``noop_flag`` is set. ``found_inf`` is not read, as in Apex."""
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_mp", 4, 5)
    results = [[tensor.clone() for tensor in one] for one in lists]
    adam = (lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    lamb = (grad_averaging, mode, global_grad_norm, max_grad_norm, use_nvlamb, inv_scale)
    multi_tensor_lamb(chunk_size, noop_flag, results, *adam, *lamb)
    for old, new in zip(sum(lists, []), sum(results, []), strict=True):
        old.copy_(torch.where(_is_set(noop_flag, old), old, new))


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
    """Do the first half of LAMB for ``[g, p, m, v, update]``. Changes m, v and update. Weight decay is decoupled.

    ``per_tensor_decay`` has the shape ``(len(g),)``. ``step`` counts from 0.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_stage1_cuda", 5)
    factor = _clip_factor(global_grad_norm, max_global_grad_norm)

    def update(indices: list[int], g: Tensors, p: Tensors, m: Tensors, v: Tensors, updates: Tensors) -> None:
        decay = elements(per_tensor_decay, indices).to(p[0])
        group = _group(1.0, beta1, beta2, epsilon, step + 1, 1, decay)
        torch._foreach_copy_(updates, lamb_stage1(group, p, g, m, v, factor, True))

    _apply(lists, "g p m v update", "m v update", update)


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
    """Do the second half of LAMB for ``[p, update]``. Changes p. The norms have the shape ``(len(p),)``.

    The trust ratio, the quotient of the norms, applies if ``weight_decay`` is not 0 or with ``use_nvlamb``.
    """
    lists = checked_lists(tensor_lists, "multi_tensor_lamb_stage2_cuda", 2)
    adapted = bool(use_nvlamb) or weight_decay != 0

    def update(indices: list[int], weights: Tensors, updates: Tensors) -> None:
        both = [elements(each, indices).to(weights[0]) for each in (per_tensor_param_norm, per_tensor_update_norm)]
        lamb_stage2(weights, [each.clone() for each in updates], lr, (both[0], both[1]) if adapted else None)

    _apply(lists, "p update", "p", update)


def _apply(lists: Lists, names: str, changed: str, update: Callable[..., None], weights: str = "p") -> None:
    """Call ``update(indices, *alike)`` for each kind of tensors in ``lists``, then copy results back.

    ``names`` are those of the lists, of which the last may be absent, and ``changed`` those of the lists to copy back.
    ``alike`` holds the tensors with these indices, list by list, in the dtype and layout that kernels need for those
    of the list ``weights``.
    """
    numbers = {name: number for number, name in enumerate(names.split()[: len(lists)])}
    main = numbers[weights]
    for indices in indices_by_kind(*lists):
        indices = [i for i in indices if lists[main][i].numel()]
        if not indices:
            continue
        originals = [[one[i] for i in indices] for one in lists]
        targets = [weight_buffer(tensor) for tensor in originals[main]]
        layouts = [[fitting(*pair) for pair in zip(one, targets, strict=True)] for one in originals]
        layouts[main] = targets
        alike = [copied_where_new(*pair) for pair in zip(originals, layouts, strict=True)]
        update(indices, *alike)
        for number in (numbers[name] for name in changed.split() if name in numbers):
            copied_where_new(alike[number], originals[number])


def _is_set(noop_flag: Tensor, tensor: Tensor) -> Tensor:
    """Return whether the flag is set, as a scalar on the device of ``tensor``."""
    return (noop_flag != 0).to(tensor.device).reshape(())


def _group(
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor | int,
    bias_correction: int,
    weight_decay: Tensor | float,
) -> Group:
    """Return the options of a kernel as the group of an optimizer."""
    return dict(
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step.reshape(()) if isinstance(step, Tensor) else step,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        grad_averaging=1,
    )


def _clip_factor(norm: Tensor, max_norm: Tensor | float) -> Tensor:
    """Return the factor that clips gradients of this global norm, as a scalar."""
    return torch.where(norm > max_norm, max_norm / norm, 1.0).reshape(())
