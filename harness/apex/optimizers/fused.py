"""``FusedOptimizer``: what all optimizers of this package share. The update rules are in the modules named after them.

That is: sorting parameters into batches that one kernel call can take, state in float32 for reduced-precision
parameters (also across ``load_state_dict``), master weights inside the state, ``zero_grad`` with Apex's default.

Everything is computed in the *wide* dtype: float32 for float16 and bfloat16 parameters, else the parameter's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MASTER = "master_param"  # key in the state of a parameter
REDUCED = (torch.float16, torch.bfloat16)


class Batch(NamedTuple):
    """Parameters of one group on one device and of one dtype, ready for the kernels.

    ``weights`` are what is computed on: the parameters themselves, their masters, or wide copies to be written back.
    Every gradient and moment has the dtype and the strides of its weight, because torch's fused kernels walk through
    memory without looking at strides.
    """

    params: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype


class FusedOptimizer(Optimizer):
    """Base class: a subclass implements ``_update``, and ``_adopt_loaded`` if its groups hold more than numbers."""

    settings: tuple[str, ...] = ("set_grad_none",)  # attributes that copies and pickles carry along
    capturable = False
    keeps_wide_state = True  # amp leaves it as it is when it adopts the optimizer
    mastered: Collection[torch.dtype] = ()  # parameters of these dtypes have float32 masters in their state

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool = True) -> None:
        self.set_grad_none = set_grad_none
        self._seen: dict[Tensor, int] = {}  # version of a parameter when its master was last rounded into it
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient. Returns what ``closure``, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.capturable and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() is being captured into a CUDA graph, which would repeat this one step "
                "count for ever. Use FusedAdam(..., capturable=True) or FusedMixedPrecisionLamb."
            )
        self._update()
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Forget the gradients, or zero them with ``set_to_none=False``; without it ``set_grad_none`` decides."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of Apex's; moments and masters are taken over unrounded.

        ``Optimizer.load_state_dict`` alone would round the state of a float16 parameter to float16.
        """
        final: dict[str, Any] = {}
        before = self.register_load_state_dict_pre_hook(lambda _, seen: final.update(seen))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(final), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _update(self) -> None:
        raise NotImplementedError

    def _adopt_loaded(self, group: dict[str, Any]) -> None:
        """Bring what was loaded into ``group`` into the form ``_update`` expects."""

    def _restore(self, loaded: dict[str, Any]) -> None:
        indices = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            for key, value in loaded["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    self.state[param][key] = value.to(param.device, wide(param))
        for group in self.param_groups:
            for name, default in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults of what was loaded; no group has it
                    group.setdefault(name, default)
            self._adopt_loaded(group)

    def _batches(self, group: dict[str, Any]) -> list[Batch]:
        """The parameters of ``group`` that have a gradient, sorted by device and dtype."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None and param.numel() > 0:
                kinds.setdefault((param.device, param.dtype), []).append(param)
        return [self._batch(params) for params in kinds.values()]

    def _batch(self, params: list[Tensor]) -> Batch:
        name = type(self).__name__
        if not params[0].is_floating_point():
            raise TypeError(
                f"{name} was given a {params[0].dtype} parameter of shape {tuple(params[0].shape)}; allowed are real "
                "floating-point dtypes. Use torch.optim for others."
            )
        grads: list[Tensor] = []
        for param in params:
            assert param.grad is not None
            if param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} does not support sparse gradients: a parameter of shape {tuple(param.shape)} has a "
                    f"{param.grad.layout} one. Make its embedding with sparse=False, or give that parameter to "
                    "torch.optim.SparseAdam or torch.optim.SGD."
                )
            grads.append(param.grad)
        if params[0].dtype in self.mastered:
            weights = [self._master(param) for param in params]
        else:
            weights = _copied_where_new(params, [_writable(param) for param in params])
        return Batch(
            params, weights, _copied_where_new(grads, [_like(g, w) for g, w in zip(grads, weights, strict=True)])
        )

    def _master(self, param: Tensor) -> Tensor:
        """The master of ``param``; where the parameter was written to since, it takes the parameter's value."""
        state = self.state[param]
        master: Tensor | None = state.get(MASTER)
        if master is None or master.dtype is not torch.float32:
            state[MASTER] = master = (param if master is None else master).detach().float()
        elif self._seen.get(param) != param._version:
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        return master

    def _moments(self, batch: Batch, name: str) -> list[Tensor]:
        """The state ``name`` of each parameter of ``batch``; zeros at first."""
        moments: list[Tensor] = []
        for param, weight in zip(batch.params, batch.weights, strict=True):
            state = self.state[param]
            moment = state.get(name)
            if moment is None:
                state[name] = moment = torch.zeros_like(weight)
            elif (like := _like(moment, weight)) is not moment:
                state[name] = moment = like.copy_(moment)
            moments.append(moment)
        return moments

    def _write_back(self, batch: Batch) -> None:
        """Round weights that are not the parameters themselves into the parameters."""
        pairs = [pair for pair in zip(batch.params, batch.weights, strict=True) if pair[0] is not pair[1]]
        if pairs:
            torch._foreach_copy_([param for param, _ in pairs], [weight for _, weight in pairs])
        if batch.params[0].dtype in self.mastered:
            self._seen.update((param, param._version) for param in batch.params)


def wide(param: Tensor) -> torch.dtype:
    """The dtype that updates of ``param`` are computed in."""
    return torch.promote_types(param.dtype, torch.float32)


def check_options(name: str, betas: tuple[float, float] | None = None, **others: float) -> None:
    """Raise ValueError unless ``betas`` are in [0, 1) and the others, by their names, are at least 0."""
    for option, value in others.items():
        if not value >= 0.0:
            raise ValueError(f"{name} was given {option}={value}; it must be at least 0.")
    if betas is not None and not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name} was given betas={betas}; both must be at least 0 and below 1, as in (0.9, 0.999).")


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise RuntimeError if ``amsgrad`` is set, which no optimizer of this package has."""
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant: leave amsgrad out, or use torch.optim.AdamW(amsgrad=True).")


def own_tensor(value: Any, group: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
    """``value`` as a tensor that belongs to ``group`` alone, on the device of its first parameter."""
    device = group["params"][0].device if group["params"] else None
    return torch.as_tensor(value).detach().to(device, dtype, copy=True).reshape(shape)


def count_for_kernel(group: dict[str, Any], device: torch.device) -> Tensor:
    """``group["step"]`` for torch's fused Adam kernels; infinity, where ``1 - beta**step`` is 1, to correct no bias."""
    if not group["bias_correction"]:
        return torch.full((), math.inf, device=device)
    step = group["step"]
    return step.to(device, torch.float32) if isinstance(step, Tensor) else torch.full((), float(step), device=device)


def _writable(param: Tensor) -> Tensor:
    """``param``, or an empty wide tensor for it if it is narrow or its memory has gaps."""
    dense = param.is_contiguous() or torch.empty_like(param).stride() == param.stride()
    return param if dense and param.dtype is wide(param) else torch.empty_like(param, dtype=wide(param))


def _like(tensor: Tensor, weight: Tensor) -> Tensor:
    """``tensor``, or an empty one for it if its dtype or strides are not those of ``weight``."""
    fits = tensor.dtype is weight.dtype and tensor.stride() == weight.stride()
    return tensor if fits else torch.empty_like(weight)


def _copied_where_new(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """``new``, with the values of ``old`` in those that are not the old ones themselves."""
    pairs = [pair for pair in zip(old, new, strict=True) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
    return new
