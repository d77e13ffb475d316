"""float32 master weights of an optimizer's float16 and bfloat16 parameters (contract 3.2).

``param_groups`` holds the masters in place of the parameters, in the same dictionaries and lists. ``amp`` creates them
at the first use of an optimizer (see ``stash``), ``fp16_utils`` at once.

The model's weights decide. The version counter of a tensor shows that other code wrote to it (``load_state_dict``, an
EMA swap); each element of its master that no longer rounds to the model's element then takes the model's value, and the
others keep their extra bits. This makes every order of loading right: masters saved with the optimizer are kept when
the matching rounded weights are loaded, and replaced when any others are. Writes through ``.data`` are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.dtypes import REDUCED

SAVED = "master_params"  # key in each param group of a saved optimizer: one tensor or None per parameter


def all_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of ``optimizer``, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


class MasterWeights:
    """The masters of one optimizer, under the names scripts use (contract 1.10).

    ``all_fp16_params`` and ``all_fp32_from_fp16_params`` are parallel lists: model parameter and its master.
    ``all_fp32_from_fp32_params`` are float32 parameters, which are their own masters. The lists called ``..._groups``
    hold the same per parameter group. ``frozen`` parameters have no master.
    """

    def __init__(self) -> None:
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp32_params: list[Tensor] = []
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        self.frozen: list[Tensor] = []
        self._saved: dict[Tensor, Tensor] = {}  # master -> the value loaded for it, until the first step
        self._versions = Versions()

    def adopt_all(self, optimizer: Optimizer) -> None:
        """Put masters into all groups of ``optimizer``; on TypeError nothing has changed."""
        for group in optimizer.param_groups:
            _check_dtypes(group)
        for group in optimizer.param_groups:
            self._adopt_group(optimizer, group)

    def add_group(self, optimizer: Optimizer, add: Callable[[dict[str, Any]], Any], group: dict[str, Any]) -> None:
        """Call ``add(group)`` and put masters into the new group; on TypeError it is removed again."""
        add(group)
        added = optimizer.param_groups[-1]
        try:
            _check_dtypes(added)
        except TypeError:
            optimizer.param_groups.pop()
            raise
        self._adopt_group(optimizer, added)

    def adopt_unfrozen(self, optimizer: Optimizer) -> None:
        """Create masters for parameters that were frozen when their group was adopted and now require gradients."""
        ids = {id(parameter) for parameter in self.frozen if parameter.requires_grad}
        if not ids:
            return
        for place, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in ids:
                    _check_dtypes({"params": [parameter]})
                    group["params"][i] = self._adopt(optimizer, parameter, place)
        self.frozen = [parameter for parameter in self.frozen if id(parameter) not in ids]

    def _adopt_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        for groups in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            groups.append([])
        for i, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                group["params"][i] = self._adopt(optimizer, parameter, -1)
            else:
                self.frozen.append(parameter)

    def _adopt(self, optimizer: Optimizer, parameter: Tensor, place: int) -> Tensor:
        """Return what the optimizer steps on in place of ``parameter`` of group ``place``."""
        if parameter.dtype is torch.float32:
            self.all_fp32_from_fp32_params.append(parameter)
            self.fp32_from_fp32_groups[place].append(parameter)
            return parameter
        master = parameter.detach().float().requires_grad_()
        self.all_fp16_params.append(parameter)
        self.all_fp32_from_fp16_params.append(master)
        self.fp16_groups[place].append(parameter)
        self.fp32_from_fp16_groups[place].append(master)
        self._versions.record([parameter])
        if parameter in optimizer.state:
            optimizer.state[master] = recast_state(optimizer.state.pop(parameter), master)
        return master

    def refresh(self) -> None:
        """Update the masters of model weights that were written since they were last seen."""
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        self._reconcile([pair for pair in pairs if self._versions.has_changed(pair[0])])

    def take_saved(self, optimizer: Optimizer) -> bool:
        """Move saved values out of the groups of ``optimizer`` into its masters, as far as they round to the weights.

        They are kept until the first step, because the weights they belong to may be loaded after them. Returns False
        if there are none (a checkpoint of Apex or of another level): the masters then follow the weights.
        """
        masters = {id(master) for master in self.all_fp32_from_fp16_params}
        self._saved = {}
        for group in optimizer.param_groups:
            for master, value in zip(group["params"], group.pop(SAVED, None) or [], strict=False):
                if value is not None and id(master) in masters and value.shape == master.shape:
                    self._saved[master] = value.to(master.device, master.dtype)
        self._reconcile(list(zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)))
        return bool(self._saved)

    def forget_saved(self) -> None:
        """Drop the saved values, after a step: the masters have moved on from them."""
        self._saved = {}

    def _reconcile(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, master in pairs:
            follow(master, parameter, self._saved.get(master))
            self._versions.record([parameter])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters into the model."""
        if self.all_fp16_params:
            torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)
            self._versions.record(self.all_fp16_params)


class Versions:
    """The versions of model weights when they last matched their masters: they tell whether other code wrote since."""

    def __init__(self) -> None:
        self._recorded: dict[Tensor, int] = {}

    def record(self, weights: Iterable[Tensor]) -> None:
        """Note that ``weights`` match their masters as they are now."""
        self._recorded.update((weight, weight._version) for weight in weights)

    def has_changed(self, weight: Tensor) -> bool:
        """Return True if ``weight`` was written to since ``record``, or never recorded."""
        return self._recorded.get(weight) != weight._version


@torch.no_grad()
def follow(master: Tensor, weight: Tensor, candidate: Tensor | None = None) -> None:
    """Give ``master`` the value of ``weight``, which other code may have written to.

    Elements of ``candidate``, by default the master itself, that round to the weight's are kept, with their extra bits.
    """
    candidate = master if candidate is None else candidate
    master.copy_(torch.where(candidate.to(weight.dtype) == weight, candidate, weight.float()))


def recast_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the ``state`` of one parameter with its element-wise tensors in the parameter's dtype.

    Counters stay as they are: rounded to float16, a step count would stop at 2048.
    """
    return {
        key: value.to(parameter.dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and key != "step"
        else value
        for key, value in state.items()
    }


def _check_dtypes(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.requires_grad and parameter.dtype not in (*REDUCED, torch.float32):
            raise TypeError(
                f"The optimizer holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; with master "
                "weights only float32, float16 and bfloat16 are allowed. Cast it with .float() first; with amp, "
                'opt_level="O1" accepts it unchanged.'
            )
