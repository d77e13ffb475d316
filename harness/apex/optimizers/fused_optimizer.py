"""``FusedOptimizer``, the base class of this package. Update rules are in the modules named after the optimizers.

The base class sorts parameters into batches that one kernel call can take, keeps state in float32 for reduced-precision
parameters (also across ``load_state_dict``), keeps master weights in the state, counts steps per group, and gives
``zero_grad`` Apex's default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.device_flags import flags
from harness.apex.amp.master_weights import Versions, follow
from harness.apex.dtypes import wide
from harness.apex.optimizers.batch import Group, ParameterBatch, copied_where_new, fitting, weight_buffer
from harness.apex.optimizers.step_count import StepCount
from harness.apex.tensor_groups import by_device_and_dtype

MASTER = "master_param"  # key in the state of a parameter
_NOT_NEGATIVE = ("lr", "step", "eps", "momentum", "weight_decay", "max_grad_norm")


class FusedOptimizer(Optimizer):
    """Base class. A subclass implements ``_update_batch``, or ``_update`` if its batches depend on each other or on a
    count of steps, and extends ``_adopt_loaded`` if its groups hold more state.

    A ``capturable`` optimizer keeps ``lr`` and ``step`` of each group in tensors, so that a CUDA graph can capture
    ``step()``, and does the unscaling and skipping for ``torch.amp.GradScaler`` without a host sync.
    """

    settings: tuple[str, ...] = ("set_grad_none",)  # attributes that copies and pickles keep
    capturable = False
    needs_whole_parameters = True  # fsdp then refuses it
    keeps_wide_state = True  # amp then leaves the state's dtypes alone
    state_key_for_device_skip: str | None = None
    """What each parameter must have in its state before the device may skip a step by itself (``found_inf``): the first
    step creates it even if it is skipped. Each class sets it for itself, not for classes derived from it. None if a
    skipped step may change something in any case."""
    found_inf: Tensor | None = None  # set by amp and by GradScaler during a step: not 0 if the step is to be skipped
    mastered: Collection[torch.dtype] = ()  # parameters of these dtypes have float32 masters in their state

    def __init__(
        self, params: Any, defaults: dict[str, Any], set_grad_none: bool = True, amsgrad: bool = False
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise RuntimeError(
                f"{name} has no AMSGrad variant: leave amsgrad out, or use torch.optim.AdamW(amsgrad=True)."
            )
        _check_options(name, defaults)
        self.set_grad_none = set_grad_none
        self._versions = Versions()
        self._steps = StepCount()
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        flags.read_flags()  # which corrects counts of steps
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions, self._steps = Versions(), StepCount()

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """The flag that scripts pass to the functions of ``amp_C``, which Apex's optimizers kept as attributes."""
        return torch.zeros(1, dtype=torch.int, device=self.param_groups[0]["params"][0].device)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler, which then sets ``grad_scale`` and ``found_inf`` instead of unscaling and skipping."""
        return self.capturable

    @property
    def _grad_scale(self) -> Tensor | None:
        """``grad_scale`` of GradScaler, during its step. It is no class attribute of None: GradScaler multiplies its
        scale by what it finds under that name."""
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        return grad_scale

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **unsupported: Any) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient. Returns the result of ``closure``, if given.

        Raises RuntimeError if another argument is not None. ``grad_scaler`` is one of them: with a parameter of that
        name, GradScaler would pass itself and warn at every step.
        """
        name = type(self).__name__
        unwanted = [argument for argument, value in unsupported.items() if value is not None]
        if unwanted:
            raise RuntimeError(
                f"{name}.step() was given {', '.join(unwanted)}; only a closure is allowed. Leave the rest to "
                "amp.scale_loss, or to torch.amp.GradScaler: scaler.step(optimizer)."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.capturable and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}.step() cannot be captured into a CUDA graph: the graph would repeat the same step count "
                "forever. Use FusedAdam(..., capturable=True) or FusedMixedPrecisionLamb."
            )
        self._update()
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop the gradients, or zero them with ``set_to_none=False``. The default is ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its own options; missing options default to the constructor's."""
        super().add_param_group(param_group)
        self._place_counters(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of Apex's, with moments and masters unrounded.

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
        for group in self.param_groups:
            self._update_group(group)

    def _update_group(self, group: Group) -> None:
        for batch in self._batches(group):
            self._update_batch(group, batch)
            self._write_back(batch)

    def _update_batch(self, group: Group, batch: ParameterBatch) -> None:
        raise NotImplementedError

    def _adopt_loaded(self, group: Group) -> None:
        """Convert a loaded ``group`` to the form that ``_update`` expects."""
        self._place_counters(group)

    def _restore(self, loaded: dict[str, Any]) -> None:
        indices = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            for key, value in loaded["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    self.state[param][key] = value.to(param.device, wide(param))
        for group in self.param_groups:
            for name, default in self.defaults.items():
                if name != "differentiable":  # load_state_dict adds it to the defaults; no group here has it
                    group.setdefault(name, default)
            self._adopt_loaded(group)

    # Step counts

    def _place_counters(self, group: Group) -> None:
        """Keep ``lr`` and ``step`` in tensors of the group's own if capturable, else a loaded ``step`` as a number."""
        if self.capturable:
            group["lr"] = _own_tensor(group["lr"], group, torch.float32)
            if "step" in group:
                group["step"] = _own_tensor(group["step"], group, torch.int32, (1,))
        elif isinstance(group.get("step"), Tensor):
            group["step"], group["lr"] = int(group["step"]), float(group["lr"])

    def _counted_groups(self) -> Iterator[Group]:
        """Count this step in every group that has parameters, and yield the group."""
        for group in self.param_groups:
            if group["params"]:
                yield self._steps.advance(group, self.found_inf, self.capturable)

    def uncount_step(self, groups: list[Group]) -> None:
        """Take back the count of a step of ``groups`` that was skipped on the device."""
        for group in groups:
            self._steps.take_back(group)

    # Batches

    def _batches(self, group: Group) -> list[ParameterBatch]:
        """Return the parameters of ``group`` that have a gradient, sorted by device and dtype."""
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        return [self._batch(alike) for alike in by_device_and_dtype(params)]

    def _batch(self, params: list[Tensor]) -> ParameterBatch:
        """Return ``params``, of one device and dtype, as a batch; raise an error for what the kernels do not take."""
        name = type(self).__name__
        if not params[0].is_floating_point():
            raise TypeError(
                f"{name} was given a {params[0].dtype} parameter of shape {tuple(params[0].shape)}; its dtype must "
                "be real and floating-point. Use torch.optim for others."
            )
        grads: list[Tensor] = []
        for param in params:
            assert param.grad is not None
            if param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} does not support sparse gradients: a parameter of shape {tuple(param.shape)} has a "
                    f"gradient with layout {param.grad.layout}. Create its embedding with sparse=False, or give that "
                    "parameter to torch.optim.SparseAdam or torch.optim.SGD."
                )
            grads.append(param.grad)
        if params[0].dtype in self.mastered:
            weights = [self._master(param) for param in params]
        else:
            weights = copied_where_new(params, [weight_buffer(param) for param in params])
        return ParameterBatch(
            params, weights, copied_where_new(grads, [fitting(g, w) for g, w in zip(grads, weights, strict=True)])
        )

    def _master(self, param: Tensor) -> Tensor:
        """Return the master of ``param``. If the parameter was written to since the last step, its new value wins."""
        state = self.state[param]
        master: Tensor | None = state.get(MASTER)
        if master is None or master.dtype is not torch.float32:
            state[MASTER] = master = (param if master is None else master).detach().float()
        elif self._versions.has_changed(param):
            follow(master, param)
        return master

    def _moments(self, batch: ParameterBatch, name: str) -> list[Tensor]:
        """Return the state ``name`` of each parameter of ``batch``, created as zeros."""
        moments: list[Tensor] = []
        for param, weight in zip(batch.params, batch.weights, strict=True):
            state = self.state[param]
            moment = state.get(name)
            if moment is None:
                state[name] = moment = torch.zeros_like(weight)
            elif (fresh := fitting(moment, weight)) is not moment:
                state[name] = moment = fresh.copy_(moment)
            moments.append(moment)
        return moments

    def _write_back(self, batch: ParameterBatch) -> None:
        """Round weights that are not the parameters themselves into the parameters."""
        copied_where_new(batch.weights, batch.params)
        if batch.params[0].dtype in self.mastered:
            self._versions.record(batch.params)


def _check_options(name: str, options: dict[str, Any]) -> None:
    for option in _NOT_NEGATIVE:
        value = options.get(option)
        # None switches max_grad_norm off; FusedSGD's lr may be torch's marker for a required option
        if isinstance(value, (int, float, Tensor)) and not value >= 0.0:
            raise ValueError(f"{name} was given {option}={value}; it must be at least 0.")
    betas = options.get("betas", ())
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name} was given betas={betas}; both must be at least 0 and below 1, as in (0.9, 0.999).")


def _own_tensor(value: Any, group: Group, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
    """Return a copy of ``value`` as a tensor, on the device of the group's first parameter."""
    device = group["params"][0].device if group["params"] else None
    return torch.as_tensor(value).detach().to(device, dtype, copy=True).reshape(shape)
