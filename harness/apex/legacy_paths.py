"""Module paths of Apex that scripts and old pickles import, and that have another name here or no longer exist.

The import machinery that uses them is in ``import_hook``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from typing import Any

# Old module: the names it had. They are taken from its package here, or from the modules in _ELSEWHERE. If a module of
# that path exists here, only the names that it lacks are added to it. Modules that exist here with all their names
# (apex.optimizers.fused_adam and so on) need no entry.
_MODULES = {
    "amp._amp_state": "AmpState _amp_state master_params maybe_print warn_or_err",
    "amp._initialize": "_amp_state LossScaler",
    "amp.amp": "init half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function",
    "amp.frontend": "O0 O1 O2 O3 O4 O5 Properties initialize load_state_dict opt_levels state_dict",
    "amp.handle": "AmpHandle NoOpHandle disable_casts scale_loss",
    "amp.opt": "OptimWrapper",
    "contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "contrib.optimizers.fused_adam": "FusedAdam",
    "contrib.optimizers.fused_lamb": "FusedLAMB",
    "contrib.optimizers.fused_sgd": "FusedSGD",
    "contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "parallel.distributed": "DistributedDataParallel Reducer ReduceOp apply_flat_dist_call extract_tensors "
    "flat_dist_call flatten split_by_type split_half_float_double unflatten",
    "parallel.optimized_sync_batchnorm": "SyncBatchNorm",
}
_ELSEWHERE = {
    "amp._amp_state": ("amp.state", "legacy_paths"),
    "amp._initialize": ("amp.scaler",),
    "amp.frontend": ("amp.levels",),
    "amp.opt": ("amp.handle",),
    "parallel.distributed": ("parallel.collectives",),
}

# Parts of Apex that do not exist here, and what to use today.
_ABSENT = {
    "RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN, which amp casts",
    "contrib.bottleneck": "torchvision's resnet blocks in torch.channels_last",
    "contrib.conv_bias_relu": "torch.nn.functional.conv2d followed by relu, under torch.compile",
    "contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm with a process group",
    "contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "contrib.group_norm": "torch.nn.GroupNorm, followed by torch.nn.SiLU for act='silu'",
    "contrib.groupbn": "apex.parallel.SyncBatchNorm with a process group, on torch.channels_last tensors",
    "contrib.index_mul_2d": "in1[idx] * in2",
    "contrib.layer_norm": "apex.normalization.FusedLayerNorm",
    "contrib.multihead_attn": "torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention",
    "contrib.openfold_triton": "torch.nn.functional.scaled_dot_product_attention and torch.nn.LayerNorm",
    "contrib.optimizers.distributed_fused_adam": "torch.distributed.fsdp, or ZeroRedundancyOptimizer",
    "contrib.optimizers.distributed_fused_lamb": "torch.distributed.optim.ZeroRedundancyOptimizer over FusedLAMB",
    "contrib.peer_memory": "torch.distributed.send and recv",
    "contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "contrib.transducer": "torchaudio.functional.rnnt_loss",
    "contrib": "torch itself; of apex.contrib, only clip_grad, optimizers and xentropy exist here",
    "parallel.multiproc": "torchrun or python -m torch.distributed.launch, both with -m harness.apex",
    "parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "its successor, Megatron-Core (megatron.core)",
}
_PRESENT_IN_CONTRIB = ("contrib", "contrib.clip_grad", "contrib.optimizers", "contrib.xentropy")


def find_module(name: str) -> Any:
    """Return the module for Apex's module ``name``: that of the same path, an empty one for an old path, or None."""
    path = f"harness.{name}"
    if _exists(path):
        return importlib.import_module(path)
    if name.partition(".")[2] not in _MODULES or not _exists(path.rpartition(".")[0]):
        return None
    return importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))


def missing_names(name: str, module: Any) -> dict[str, Any]:
    """Return {name: value} of the names that Apex's module ``name`` had and ``module``, its replacement, lacks."""
    path = name.partition(".")[2]
    found: dict[str, Any] = {}
    for each in set(_MODULES.get(path, "").split()) - set(vars(module)):
        for source in (path.rpartition(".")[0], *_ELSEWHERE.get(path, ())):
            held = vars(importlib.import_module(f"harness.apex.{source}"))
            if each in held:
                found[each] = held[each]
                break
    return found


def modules_in(package: str) -> list[str]:
    """Return the old modules of Apex's ``package``."""
    return [f"apex.{name}" for name in _MODULES if f"apex.{name}".rpartition(".")[0] == package]


def why_absent(name: str) -> str | None:
    """Return the error message for importing Apex's module ``name``, if it is known not to exist here."""
    path = name.partition(".")[2]
    if path in _MODULES or path in _PRESENT_IN_CONTRIB:
        return None
    for absent, instead in _ABSENT.items():
        if path == absent or path.startswith(f"{absent}."):
            return (
                f"No module named {name!r}: apex is harness.apex here, which has no {path}. Use {instead}. "
                f"If you need {path} itself, install NVIDIA's own Apex from source and run the script with python."
            )
    return None


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print ``msg`` unless amp's verbosity is 0; with ``rank0``, only on rank 0. Some scripts call it."""
    from harness.apex.amp.messages import is_rank_zero
    from harness.apex.amp.state import _amp_state

    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(msg)


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or log a warning under ``amp._amp_state.hard_override``. Some scripts call it."""
    from harness.apex.amp.state import _amp_state

    _amp_state.refuse(msg)


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # a parent does not exist or is not a package
        return False
