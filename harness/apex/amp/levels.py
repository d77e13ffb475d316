"""Opt levels: their properties, and the overrides that ``initialize`` accepts (contract 1.2 and 8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

LossScale = float | Literal["dynamic"]


@dataclass
class Properties:
    """The settings in force. ``None`` means that a property does not apply at this level."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool | None = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0

    @property
    def casts_functions(self) -> bool:
        """True for O1 and O4, which cast functions, not the model, and refuse the overrides that cast the model."""
        return self.patch_torch_functions_type is not None

    def table(self) -> str:
        """Return one ``name : value`` line per property, as Apex prints them."""
        names = [field.name for field in fields(self) if field.name != "opt_level"]
        return "\n".join(f"{name:<22} : {getattr(self, name)}" for name in names)


BRIEFS = {
    "O0": "Pure FP32 training.",
    "O1": "Insert automatic casts around torch functions and tensor methods.",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "Pure FP16 training.",
    "O4": "O1 in BFLOAT16: automatic casts around torch functions and tensor methods.",
    "O5": "O2 in BFLOAT16: BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}


_LEVELS = {
    "O0": Properties(cast_model_type=torch.float32, master_weights=False),
    "O1": Properties(patch_torch_functions=True, patch_torch_functions_type=torch.float16, loss_scale="dynamic"),
    "O2": Properties(
        cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"
    ),
    "O3": Properties(cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False),
    "O4": Properties(patch_torch_functions=True, patch_torch_functions_type=torch.bfloat16),
    "O5": Properties(cast_model_type=torch.bfloat16, keep_batchnorm_fp32=True, master_weights=True),
}


def level_properties(opt_level: str) -> Properties:
    """Return the defaults of ``opt_level``; raise RuntimeError for an unknown one."""
    if not isinstance(opt_level, str) or opt_level not in _LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. It must be one of {', '.join(map(repr, _LEVELS))}: a "
            'capital letter O and a digit. Use amp.initialize(model, optimizer, opt_level="O1").'
        )
    return replace(_LEVELS[opt_level], enabled=True, opt_level=opt_level)


class _Level:
    """An opt level as Apex kept it in ``amp.frontend``. Calling it sets the level's properties."""

    name = brief = more = ""

    def __call__(self, properties: Properties) -> Properties:
        vars(properties).update(vars(level_properties(self.name)))
        return properties


O0, O1, O2, O3, O4, O5 = (
    type(name, (_Level,), {"name": name, "brief": f"{name}:  {brief}"}) for name, brief in BRIEFS.items()
)
opt_levels = {level.__name__: level() for level in (O3, O2, O1, O0, O4, O5)}


def apply_overrides(properties: Properties, overrides: dict[str, Any], refuse: Callable[[str], None]) -> list[str]:
    """Write every override that is not None into ``properties``, in order; return the names written.

    ``refuse`` is called with a message for an override that the level does not allow. It raises, or warns under
    ``_amp_state.hard_override``.
    """
    in_use = {name: value for name, value in overrides.items() if value is not None}
    for name, value in in_use.items():
        reason = _why_refused(properties, name, value)
        if reason is not None:
            refuse(f"{name}={value!r} was given with {properties.opt_level}, {reason}")
        if not (name == "keep_batchnorm_fp32" and properties.casts_functions):
            setattr(properties, name, _checked(name, value))
    return list(in_use)


def _why_refused(properties: Properties, name: str, value: Any) -> str | None:
    """Return why the level does not allow an override; None if it does."""
    expected = properties.patch_torch_functions_type
    if name == "patch_torch_functions_type" and value is not expected:
        return f"which uses {expected}. Leave it out, or use opt_level O1 for torch.float16 and O4 for torch.bfloat16."
    if not properties.casts_functions:
        if name == "patch_torch_functions" and _flag(name, value):
            return "and only O1 and O4 cast functions. Leave it out, or use opt_level O1 (float16) or O4 (bfloat16)."
    elif name == "cast_model_type" and value is not False and value is not torch.float32:
        return "which leaves the model in float32. Leave it out, or use opt_level O2, O3 or O5 to cast the model."
    elif name == "keep_batchnorm_fp32":
        return "where batch norm is always float32. Leave it out (None, not the string 'None')."
    elif name == "master_weights":
        return "whose weights are float32 and therefore their own masters. Leave it out."
    return None


def _checked(name: str, value: Any) -> Any:
    """Return the value of an override as ``Properties`` has it; raise an error for one that no level allows."""
    if name == "cast_model_type" and value is not False:
        if not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise TypeError(
                f"cast_model_type={value!r} is neither False nor a floating-point torch.dtype such as torch.float16."
            )
    elif name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        return _flag(name, value)
    elif name == "loss_scale" and value != "dynamic":
        try:
            scale = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            scale = math.nan
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(
                f"loss_scale={value!r} is neither 'dynamic' nor a finite number above 0 such as 128.0 or '128.0'."
            )
        return scale
    return value


def _flag(name: str, value: Any) -> bool:
    flags: dict[Any, bool] = {True: True, False: False, "True": True, "False": False}
    apex_checks = name == "keep_batchnorm_fp32"  # and takes no 0 and 1, as it does for the others
    if isinstance(value, bool | str if apex_checks else int | str) and value in flags:
        return flags[value]
    raise (AssertionError if apex_checks else ValueError)(
        f"{name}={value!r} is not allowed. Use True, False, 'True', 'False' or None."
    )
