"""float32 master weights for reduced-precision models: O2, O5 and ``master_weights=True`` (contract 3.2, 3.5).

Masters are created at the first use of the optimizer, so model weights may be loaded after ``initialize``. From then
on ``param_groups`` holds them in place of the float16 or bfloat16 parameters, in the same dictionaries and lists.

The model's weights are the truth: whoever writes to them (``load_state_dict``, an EMA swap) is noticed by the tensor's
version, and each element of a master that no longer rounds to the model's element takes the model's value. Elements
that still round to it keep the master's extra bits. That one rule makes every order of loading right: masters saved
with the optimizer survive the loading of the (rounded) weights they belong to, and yield to any others. The one write
it cannot see goes through ``.data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.casting import REDUCED
from harness.apex.exchange import take_hidden

SAVED = "master_params"  # key in each param group of a saved optimizer: one tensor or None per parameter


class AmpStash:
    """What amp keeps about one optimizer, as ``optimizer._amp_stash``.

    ``already_patched``: the next ``step()`` will be skipped. ``params_have_scaled_gradients``: gradients of delayed
    contexts wait for their unscaling; they carry the scale ``scaled_by``. ``all_fp16_params`` and
    ``all_fp32_from_fp16_params`` are parallel lists: model parameter, its master.
    """

    def __init__(self, master_weights: bool) -> None:
        self.master_weights = master_weights
        self.already_patched = False
        self.lazy_init_called = not master_weights
        self.params_have_scaled_gradients = False
        self.scaled_by = 1.0
        self.owed: Any = None  # the scaler whose verdict waits for a reduction, see exchange
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self.all_fp32_params: list[Tensor] = []
        self.fp16_groups: list[list[Tensor]] = []
        self.frozen: list[Tensor] = []
        self.versions: list[int] = []
        self.saved: dict[Tensor, Tensor] = {}  # master -> the value loaded for it, until the first step
        self.undo: list[Any] = []

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """Apex's name for ``all_fp32_params`` where there are masters."""
        return self.all_fp32_params


def all_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter of ``optimizer``, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def lazy_init(optimizer: Optimizer) -> None:
    """Create the masters of ``optimizer``, once; gradients that already exist are kept."""
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    if stash.lazy_init_called:
        return
    stash.lazy_init_called = True
    for group in optimizer.param_groups:
        adopt_group(optimizer, group)
    take_saved(optimizer, optimizer.param_groups)


def adopt_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Put masters into ``group["params"]``, in place, for the parameters that need one."""
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    stash.fp16_groups.append([])
    for i, parameter in enumerate(group["params"]):
        if parameter.requires_grad:
            group["params"][i] = _adopt(optimizer, parameter, stash.fp16_groups[-1])
        else:
            stash.frozen.append(parameter)


def adopt_unfrozen(optimizer: Optimizer) -> None:
    """Give masters to parameters that were frozen when their group was adopted and are not any more."""
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    ids = {id(parameter) for parameter in stash.frozen if parameter.requires_grad}
    if not ids:
        return
    for group, fp16_group in zip(optimizer.param_groups, stash.fp16_groups, strict=True):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) in ids:
                group["params"][i] = _adopt(optimizer, parameter, fp16_group)
    stash.frozen = [parameter for parameter in stash.frozen if id(parameter) not in ids]


def _adopt(optimizer: Optimizer, parameter: Tensor, fp16_group: list[Tensor]) -> Tensor:
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    if parameter.dtype is torch.float32:
        stash.all_fp32_params.append(parameter)
        return parameter
    if parameter.dtype not in REDUCED:
        raise TypeError(
            f"The optimizer holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; with master weights "
            "only float32, float16 and bfloat16 are allowed. Cast it with .float() before amp.initialize, or use "
            'opt_level="O1".'
        )
    master = parameter.detach().float().requires_grad_()
    stash.all_fp16_params.append(parameter)
    stash.all_fp32_from_fp16_params.append(master)
    stash.versions.append(parameter._version)
    fp16_group.append(parameter)
    state = optimizer.state
    if parameter in state:
        state[master] = recast_state(state.pop(parameter), master)
    return master


def recast_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """``state`` of one parameter with its element-wise tensors in the parameter's dtype; counters stay as they are."""
    return {
        key: value.to(parameter.dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and key != "step"
        else value
        for key, value in state.items()
    }


def record_versions(stash: AmpStash) -> None:
    """Note that model weights and masters belong together as they are now."""
    stash.versions = [parameter._version for parameter in stash.all_fp16_params]


@torch.no_grad()
def refresh(stash: AmpStash) -> None:
    """Where model weights were written since they were last seen, bring their masters in line."""
    pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, stash.versions, strict=True)
    stale = [(parameter, master) for parameter, master, version in pairs if parameter._version != version]
    if stale:
        for parameter, master in stale:
            _reconcile(parameter, master, stash.saved.get(master, master))
        record_versions(stash)


def _reconcile(parameter: Tensor, master: Tensor, candidate: Tensor) -> None:
    master.copy_(torch.where(candidate.to(parameter.dtype) == parameter, candidate, parameter.float()))


@torch.no_grad()
def take_saved(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Move the saved masters out of ``groups`` (see ``SAVED``) into the masters of ``optimizer``.

    They are kept aside until the first step as well, because the weights they belong to may be loaded after them.
    Without saved masters (a checkpoint of Apex's or of another level) the masters follow the model's weights.
    """
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    model_of = dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
    stash.saved = {}
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        saved = group.pop(SAVED, None) or []
        for master, value in zip(own["params"], saved, strict=False):
            if value is not None and master in model_of and value.shape == master.shape:
                stash.saved[master] = value.to(master.device, torch.float32)
    for master, parameter in model_of.items():
        _reconcile(parameter, master, stash.saved.get(master, master))


def saved_masters(optimizer: Optimizer) -> list[list[Tensor | None]]:
    """Per group, per parameter: the master (an alias, like the rest of a state dict), or None where there is none."""
    masters = {id(master) for master in optimizer._amp_stash.all_fp32_from_fp16_params}  # type: ignore[attr-defined]
    return [[p.detach() if id(p) in masters else None for p in group["params"]] for group in optimizer.param_groups]


@torch.no_grad()
def copy_to_model(stash: AmpStash) -> None:
    """Round the masters into the model."""
    if stash.all_fp16_params:
        torch._foreach_copy_(stash.all_fp16_params, stash.all_fp32_from_fp16_params)
        record_versions(stash)


def drop_master_gradients(stash: AmpStash) -> None:
    """Forget the gradients of masters that were made from model parameters."""
    for parameter, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        master.grad = None
        take_hidden(parameter)
