"""Where Apex kept what scripts and old pickles import: module paths that are named otherwise here, or gone.

Not here: how an import finds its way, see ``import_hook``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from typing import Any

# Old module, names it had, modules of harness.apex to take them from. Where a module of the same name exists here,
# that is the module, and the names it lacks are added to it while installed.
_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "amp._amp_state": (
        "AmpState _amp_state master_params maybe_print warn_or_err",
        ("amp.state", "amp", "legacy_paths"),
    ),
    "amp._initialize": ("_amp_state LossScaler", ("amp", "amp.scaler")),
    "amp.amp": (
        "init half_function float_function promote_function register_half_function register_float_function "
        "register_promote_function",
        ("amp",),
    ),
    "amp.frontend": ("Properties initialize state_dict load_state_dict", ("amp.levels", "amp")),
    "amp.handle": ("AmpHandle NoOpHandle disable_casts scale_loss", ("amp.handle", "amp")),
    "amp.opt": ("OptimWrapper", ("amp.handle",)),
    "amp.scaler": ("LossScaler", ("amp.scaler",)),
    "fp16_utils.fp16_optimizer": ("FP16_Optimizer", ("fp16_utils",)),
    "fp16_utils.fp16util": (
        "BN_convert_float FP16Model clip_grad_norm convert_module convert_network master_params_to_model_params "
        "model_grads_to_master_grads network_to_half prep_param_lists to_python_float tofp16",
        ("fp16_utils",),
    ),
    "fp16_utils.loss_scaler": ("DynamicLossScaler LossScaler", ("fp16_utils",)),
    "fused_dense.fused_dense": ("FusedDense FusedDenseGeluDense", ("fused_dense",)),
    "mlp.mlp": ("MLP", ("mlp",)),
    "multi_tensor_apply.multi_tensor_apply": ("MultiTensorApply", ("multi_tensor_apply",)),
    "normalization.fused_layer_norm": (
        "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
        ("normalization",),
    ),
    "optimizers.fused_adagrad": ("FusedAdagrad", ("optimizers",)),
    "optimizers.fused_adam": ("FusedAdam", ("optimizers",)),
    "optimizers.fused_lamb": ("FusedLAMB", ("optimizers",)),
    "optimizers.fused_mixed_precision_lamb": ("FusedMixedPrecisionLamb", ("optimizers",)),
    "optimizers.fused_novograd": ("FusedNovoGrad", ("optimizers",)),
    "optimizers.fused_sgd": ("FusedSGD", ("optimizers",)),
    "parallel.LARC": ("LARC", ("parallel.LARC",)),
    "optimizers.fp16_optimizer": ("FP16_Optimizer", ("fp16_utils",)),
    "parallel.distributed": (
        "DistributedDataParallel Reducer ReduceOp apply_flat_dist_call extract_tensors flat_dist_call flatten "
        "split_by_type split_half_float_double unflatten",
        ("parallel.distributed", "parallel", "parallel.flat_collectives"),
    ),
    "parallel.optimized_sync_batchnorm": ("SyncBatchNorm", ("parallel",)),
    "parallel.sync_batchnorm": ("SyncBatchNorm", ("parallel",)),
}

# What Apex had and this does not, and what does it today.
_ABSENT = {
    "RNN": "torch.nn.LSTM and torch.nn.GRU, which amp casts",
    "contrib": "the layers of torch.nn, and torch.nn.functional.scaled_dot_product_attention",
    "parallel.multiproc": "torchrun or python -m torch.distributed.launch, both with -m harness.apex",
    "pyprof": "torch.profiler",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "Megatron-Core (megatron.core), where it was taken further",
}


def place_of(name: str) -> str:
    """The module of harness.apex whose name is that of Apex's module ``name``, existing or not."""
    return f"harness.{name}"


def module_of(name: str) -> Any:
    """The module that Apex's module ``name`` is found as; None where there is no such module."""
    place, old = place_of(name), _MODULES.get(name.partition(".")[2])
    if _exists(place):
        return importlib.import_module(place)
    if old is None or not _exists(place.rpartition(".")[0]):
        return None
    return importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))


def names_lacking(name: str, module: Any) -> dict[str, Any]:
    """What Apex's module ``name`` held and ``module``, which is found under that name, does not."""
    names, sources = _MODULES.get(name.partition(".")[2], ("", ()))
    found: dict[str, Any] = {}
    for each in set(names.split()) - set(vars(module)):
        for source in sources:
            place = f"harness.apex.{source}"
            if _exists(place) and each in (held := vars(importlib.import_module(place))):
                found[each] = held[each]
                break
    return found


def modules_in(package: str) -> list[str]:
    """The historical modules of Apex's ``package``."""
    return [f"apex.{name}" for name in _MODULES if f"apex.{name}".rpartition(".")[0] == package]


def why_absent(name: str) -> str | None:
    """What to say to an import of Apex's module ``name``, where it is known that there is none."""
    path = name.partition(".")[2]
    for gone, instead in _ABSENT.items():
        if path == gone or path.startswith(f"{gone}."):
            return (
                f"No module named {name!r}: apex is harness.apex here, which has no {gone}. Instead: {instead}. "
                f"For {path} itself, install NVIDIA's own Apex from source and run the script with python."
            )
    return None


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print ``msg`` unless amp's verbosity is 0; with ``rank0``, on rank 0 alone. Apex's, for scripts that call it."""
    from harness.apex.amp.messages import is_rank_zero
    from harness.apex.amp.state import _amp_state

    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(msg)


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or print a warning under ``amp._amp_state.hard_override``. Apex's, like ``maybe_print``."""
    from harness.apex.amp.state import _amp_state

    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print(f"Warning: {msg}")


def _exists(place: str) -> bool:
    try:
        return importlib.util.find_spec(place) is not None
    except ModuleNotFoundError:  # a parent that does not exist, or is no package
        return False
