"""``amp.initialize`` (contract 1.2) and ``amp.reset``: everything is checked before anything is changed.

Differences from Apex: models may be on the CPU; ``cudnn.enabled=False`` is allowed; an active O1 ends with the next
``initialize`` at any level; a model already in Apex's DistributedDataParallel is accepted with a warning.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from harness.apex.amp import cast_engine, cast_lists, model_casts, optimizer_patches
from harness.apex.amp.device_flags import flags
from harness.apex.amp.handle import AmpHandle
from harness.apex.amp.levels import BRIEFS, LossScale, Properties, apply_overrides, level_properties
from harness.apex.amp.messages import is_rank_zero, messages
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.state import _amp_state


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Prepare models and optimizers, in place, for ``opt_level`` and return the objects passed in.

    ``models``: a module or a list. ``optimizers``: None, an optimizer or a list. Returns the models alone if
    ``optimizers`` is None, else the pair. The settings hold for the process until the next call. Wrap a model in
    DistributedDataParallel after this: torch's is refused before it, and Apex's warns. An override that is None keeps
    the default of ``opt_level``.

    ``min_loss_scale``: floor of the dynamic scale, 1.0 unless given, 0 for none. ``num_losses``: number of independent
    scalers, chosen by ``scale_loss(..., loss_id=)``. Raises TypeError, ValueError, RuntimeError or (for
    ``keep_batchnorm_fp32``, as in Apex) AssertionError for what is not allowed, before anything is changed: an O1 that
    is active goes on.
    """
    if isinstance(enabled, str):
        raise TypeError(
            f"enabled={enabled!r}: the third argument of amp.initialize is `enabled`. Pass opt_level={enabled!r}."
        )
    if not enabled:
        _reset_for(verbosity)
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties, announcement = _select(opt_level, overrides)
    model_list = _checked_models(models, properties, cast_model_outputs)
    optimizer_list = _checked_optimizers(optimizers)
    scalers = _scalers(properties.loss_scale, num_losses, min_loss_scale, max_loss_scale)

    _reset_for(verbosity)
    messages.announce(announcement)
    _warn_of_wrappers(model_list)
    for model in model_list:
        _prepare_model(model, properties, cast_model_outputs)
    for each in optimizer_list:
        optimizer_patches.adopt(each, bool(properties.master_weights), bool(properties.patch_torch_functions))
        _amp_state.optimizers.add(each)
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    _amp_state.loss_scalers, _amp_state.opt_properties = scalers, properties
    if properties.patch_torch_functions:
        _start_casts(properties, model_list)
    return models if optimizers is None else (models, optimizers)


def reset() -> None:
    """Undo ``initialize``: end O1, remove hooks and patches from models and optimizers, drop the scalers.

    For a second run in one process, and for tests. Casts of weights and masters already created are not undone.
    """
    flags.read_flags()  # which corrects counts of steps
    cast_engine.engine.stop()
    cast_engine.engine.registered.clear()
    for each in list(_amp_state.optimizers):
        optimizer_patches.release(each)
    for model in list(_amp_state.models):
        _detach(model)
    _amp_state.clear()


def _reset_for(verbosity: int) -> None:
    """End what an earlier ``initialize`` or ``init`` started, and begin again with amp disabled."""
    flags.read_flags()
    cast_engine.engine.stop()
    _amp_state.handle = None
    _amp_state.verbosity, _amp_state.initialized = verbosity, True
    _amp_state.opt_properties = Properties()


def _select(opt_level: str, overrides: dict[str, Any]) -> tuple[Properties, str]:
    """Return the properties of ``opt_level`` with ``overrides``, and the text that announces them."""
    properties = level_properties(opt_level)
    text = f"Selected optimization level {opt_level}: {BRIEFS[opt_level]}\n{properties.table()}"
    if apply_overrides(properties, overrides, _amp_state.refuse):
        text += f"\nAfter applying overrides:\n{properties.table()}"
    return properties, text


def _checked_models(models: Any, properties: Properties, outputs: torch.dtype | None) -> list[nn.Module]:
    """Return ``models`` as a list; raise an error for one that amp cannot prepare."""
    result = [models] if isinstance(models, nn.Module) else models
    if not isinstance(result, list) or not all(isinstance(model, nn.Module) for model in result):
        raise TypeError(f"models must be either an nn.Module or a list of them; got {_describe(models)}.")
    for model in result:
        _check_model(model)
        _check_scripted(model, properties, outputs)
    return result


def _warn_of_wrappers(models: list[nn.Module]) -> None:
    """Warn, at the call of ``initialize``, of models that are already in Apex's DistributedDataParallel."""
    if is_rank_zero() and any(getattr(model, "wraps_module", False) for model in models):
        warnings.warn(
            "amp.initialize was given a model that is already in apex.parallel.DistributedDataParallel. It trains as "
            "in the documented order; call amp.initialize first, then wrap the model that it returns.",
            stacklevel=3,
        )


def _checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return ``optimizers`` as a list; raise an error for one that amp cannot adopt."""
    if optimizers is None:
        return []
    result = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if any(type(each).__name__ == "FP16_Optimizer" for each in (result if isinstance(result, list) else [result])):
        raise RuntimeError(
            "amp.initialize was given an FP16_Optimizer, which does amp's work itself. Pass the optimizer it wraps "
            "and drop FP16_Optimizer, or keep it and drop amp.initialize."
        )
    if not isinstance(result, list) or not all(isinstance(each, Optimizer) for each in result):
        raise TypeError(
            f"optimizers must be either a torch.optim.Optimizer or a list of them; got {_describe(optimizers)}."
        )
    if len({id(each) for each in result}) < len(result):
        raise RuntimeError("The same optimizer is in the list twice; each can only be passed to amp.initialize once.")
    for each in result:
        optimizer_patches.check_fresh(each)
    return result


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"an object of type {type(value).__name__}"


def _check_model(model: nn.Module) -> None:
    """Raise RuntimeError for a model in a parallel wrapper of torch, or in float16."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise RuntimeError(
            f"amp.initialize was given a model wrapped in {type(model).__name__}. Parallel wrappers should only be "
            "applied to the model(s) AFTER the model(s) have been returned from amp.initialize."
        )
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for kind, name, tensor in model_casts.floating_tensors(model):
        if tensor.dtype is torch.float16:
            _amp_state.refuse(
                f"Found {kind} {name} with dtype {tensor.dtype}, expected torch.float32 (on any device). Pass the "
                "model in float32, since amp.initialize casts it: remove the .half(), or set "
                "amp._amp_state.allow_incoming_model_not_fp32 = True."
            )


def _check_scripted(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    """Refuse modules of TorchScript where amp needs hooks, which they do not support."""
    casts_model = bool(properties.cast_model_type)
    hooked = model.modules() if casts_model else [model] if outputs is not None else []
    if any(isinstance(module, torch.jit.ScriptModule) for module in hooked):
        raise RuntimeError(
            f"amp.initialize was given a ScriptModule with opt_level={properties.opt_level!r}"
            f"{'' if casts_model else ' and cast_model_outputs'}, which needs hooks; TorchScript has none. Use "
            'opt_level="O1" without cast_model_outputs, or pass the Python module that was scripted or traced.'
        )


def _scalers(loss_scale: LossScale, count: int, minimum: float | None, maximum: float | None) -> list[LossScaler]:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_losses={count!r} must be a whole number, at least 1.")
    return [LossScaler(loss_scale, minimum, maximum, index) for index in range(count)]


def _prepare_model(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    """Cast ``model`` and attach the hooks of its level."""
    _detach(model)  # casts must not pile up
    dtype = properties.cast_model_type or None
    handles: list[RemovableHandle] = []
    if dtype is not None:
        if not properties.casts_functions:
            model_casts.cast_model(model, dtype, bool(properties.keep_batchnorm_fp32))
        handles = model_casts.attach(model, dtype, outputs or torch.float32, fp32_state=True)
    elif outputs is not None:
        handles = model_casts.attach(model, None, outputs, fp32_state=False)
    if properties.patch_torch_functions and not isinstance(model, torch.jit.ScriptModule):  # which has no hooks
        handles.append(model.register_forward_pre_hook(cast_engine.enter_model, with_kwargs=True))
    _amp_state.models[model] = handles


def _start_casts(properties: Properties, models: list[nn.Module]) -> None:
    """Start O1 or O4 on the devices of ``models``."""
    verbose = _amp_state.verbosity > 1
    device_types = {p.device.type for model in models for p in model.parameters()} - {"meta"} or {"cpu"}
    dtype = properties.patch_torch_functions_type or torch.float16
    lists = cast_lists.AUTOCAST if dtype is torch.bfloat16 else cast_lists.APEX
    cast_engine.engine.start(dtype, device_types, lists, verbose=verbose and is_rank_zero())
    _amp_state.handle = AmpHandle(properties.loss_scale, verbose)


def _detach(model: nn.Module) -> None:
    """Remove the hooks of an earlier ``initialize``."""
    for handle in _amp_state.models.pop(model, []):
        handle.remove()
