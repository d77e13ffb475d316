"""The other parts of Apex, name by name: state dicts, ``parallel``, optimizers, layers, decorators, fp16_utils."""

from __future__ import annotations

import ast
from collections.abc import Callable

from harness.tools.port.context import AS_IS, BY_HAND, CHANGED, SAME, Context, arguments, constant, is_unpacked

# ApexNames that keep theirs in the script; the import statement changes.
REPLACED_IMPORTS = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.ReduceOp": "torch.distributed.ReduceOp",
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.MixedFusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.FusedRMSNorm": "torch.nn.RMSNorm",
    "apex.normalization.MixedFusedRMSNorm": "torch.nn.RMSNorm",
}
_OPTIMIZERS = {
    "apex.optimizers.FusedAdam": (
        *("params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none"),
        *("capturable", "master_weights"),
    ),
    "apex.optimizers.FusedSGD": (
        *("params", "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum"),
        *("materialize_master_grads", "set_grad_none"),
    ),
    "apex.optimizers.FusedAdagrad": ("params", "lr", "eps", "weight_decay", "set_grad_none", "adagrad_w_mode"),
}
_OPTIMIZER_DROPPED = {"set_grad_none", "materialize_master_grads", "capturable", "master_weights", "adam_w_mode"}
# Arguments that torch's optimizers lack: allowed with this value only.
_OPTIMIZER_FIXED = {"bias_correction": True, "wd_after_momentum": False, "adagrad_w_mode": False}
_DDP_KEPT = ("module",)
_NO_LAMB = (
    "torch has no such optimizer: `from harness.apex.optimizers import {0}` keeps it, or use torch.optim.AdamW and "
    "tune again"
)
_MASTERS = "the weights stay float32 under autocast, so no master weights are needed: remove it"
_ELSEWHERE = "amp.initialize is in another file: pass the torch.amp.GradScaler created there to this file"
ADVICE = {
    "apex.optimizers.FusedLAMB": _NO_LAMB.format("FusedLAMB"),
    "apex.optimizers.FusedNovoGrad": _NO_LAMB.format("FusedNovoGrad"),
    "apex.optimizers.FusedMixedPrecisionLamb": _NO_LAMB.format("FusedMixedPrecisionLamb"),
    "apex.optimizers.FP16_Optimizer": "remove the wrapper; torch.amp.GradScaler scales the loss and autocast does "
    "the casting",
    "apex.fp16_utils.FP16_Optimizer": "remove the wrapper; torch.amp.GradScaler scales the loss and autocast does "
    "the casting",
    "apex.amp.initialize": "its arguments are unknown: create a torch.amp.GradScaler here",
    "apex.amp.scale_loss": f"{_ELSEWHERE}, then call scaler.scale(loss).backward(), scaler.step(optimizer) and "
    "scaler.update()",
    "apex.amp.master_params": f"{_ELSEWHERE}; call scaler.unscale_(optimizer) and use the optimizer's parameters",
    "apex.amp.state_dict": f"{_ELSEWHERE}, and write scaler.state_dict()",
    "apex.amp.load_state_dict": f"{_ELSEWHERE}, and write scaler.load_state_dict(...)",
    "apex.parallel.Reducer": "let torch.nn.parallel.DistributedDataParallel reduce the gradients",
    "apex.amp.init": "this is the 2018 interface: follow docs/migrate.md, starting at amp.initialize",
    "apex.amp.promote_function": "cast the arguments to one dtype in the function",
    "apex.amp.register_promote_function": "cast the arguments to one dtype in the function",
    "apex.amp._amp_state": "read the scale with scaler.get_scale(); set the initial scale with "
    "GradScaler(init_scale=...)",
    "apex.multi_tensor_apply.multi_tensor_applier": "use torch._foreach functions or a loop over the tensors",
    "apex.amp": "amp is used as a value: pass the scaler instead",
    "apex": "apex is used as a value: remove it",
    **{f"apex.fp16_utils.{name}": _MASTERS for name in ("prep_param_lists", "model_grads_to_master_grads", "tofp16")},
    **{
        f"apex.fp16_utils.{name}": _MASTERS
        for name in ("master_params_to_model_params", "BN_convert_float", "FP16Model")
    },
}
_FALLBACK = "torch has no equivalent; --to harness keeps this call working"


def advice(path: str) -> str:
    """The advice for a part of Apex that is left to the user."""
    while path and path not in ADVICE:
        path = path.rpartition(".")[0] if path.rpartition(".")[0] not in ("apex", "apex.amp") else ""
    return ADVICE.get(path, _FALLBACK)


def rewrite(context: Context) -> None:
    for node, path in list(context.names.references()):
        if node not in context.done:
            above = context.source.parents[node]
            call = above if isinstance(above, ast.Call) and above.func is node else None
            if (rule := _RULES.get(path)) is not None and rule(context, node, path, call):
                context.done.add(node)
            elif path in ("apex.amp.autocast", "apex.amp.GradScaler"):
                context.note(node, AS_IS, ast.unparse(node), "torch's amp, which has the same name in this script")
                context.done.add(node)
            elif rule is None:
                _part_of_replaced(context, node, path)


def _part_of_replaced(context: Context, node: ast.expr, path: str) -> None:
    """``ReduceOp.SUM`` and the like: an attribute of a name whose import changes."""
    inner = node
    while isinstance(inner, ast.Attribute) and path not in REPLACED_IMPORTS:
        inner, path = inner.value, path.rpartition(".")[0]
    if path in REPLACED_IMPORTS:
        _name(context, inner, REPLACED_IMPORTS[path])
        context.done.add(node)


def _name(context: Context, node: ast.expr, new: str) -> None:
    """Write ``new`` for ``node``, unless the script imports it under a name of its own."""
    if not isinstance(node, ast.Name) or context.names.bound[node.id] not in REPLACED_IMPORTS:
        context.edits.replace(node, new)


# Each rule edits what it can and returns whether the reference is ported.


def _state_dict(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None or call.args or not context.has_scaler:
        return False
    outer = context.source.parents[call]
    inner = context.source.parents[outer] if isinstance(outer, ast.Subscript) and outer.value is call else None
    if isinstance(inner, ast.Subscript) and inner.value is outer:
        wanted = {"loss_scale": "get_scale()", "unskipped": 'state_dict().get("_growth_tracker", 0)'}
        key = constant(inner.slice)
        if key not in wanted or not isinstance(inner.ctx, ast.Load):
            return False
        context.edits.replace(inner, f"{context.scaler}.{wanted[str(key)]}")
        context.note(call, CHANGED, ast.unparse(inner), "now read from the single scaler that serves all losses")
        return True
    context.edits.replace(call, f"{context.scaler}.state_dict()")
    do = "GradScaler's format: Apex's checkpoints need a conversion (docs/migrate.md)"
    context.note(call, CHANGED, "amp.state_dict()", do)
    return True


def _load_state_dict(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None or not context.has_scaler:
        return False
    context.edits.replace(node, f"{context.scaler}.load_state_dict")
    do = "reads GradScaler's format only; convert the amp entry of an old checkpoint first (docs/migrate.md)"
    context.note(call, CHANGED, "amp.load_state_dict", do)
    return True


def _disable_casts(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None:
        return False
    context.edits.replace(call, 'torch.amp.autocast("cuda", enabled=False)')
    context.note(call, SAME, "amp.disable_casts()", "becomes autocast with enabled=False")
    return True


def _distributed(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    new = REPLACED_IMPORTS[path]
    if call is None:
        _name(context, node, new)
        return True
    given = arguments(call, ("module",))
    for name in ("gradient_average", "gradient_predivide_factor", "shared_param"):
        if name in given and constant(given[name]) not in (True, 1, None):
            context.by_hand(call, f"DistributedDataParallel({name}=)", "use register_comm_hook of torch's class")
            return False
    if is_unpacked(call) or "**" in given or "module" not in given:
        context.by_hand(call, "DistributedDataParallel with unpacked arguments", "pass only the module")
        return False
    _name(context, node, new)
    dropped = [keyword for keyword in call.keywords if keyword.arg != "module"]
    start, end = context.source.span(given["module"])
    close = context.source.span(call)[1] - 1
    if len(call.args) + len(call.keywords) == 1 or dropped or len(call.args) > 1:
        context.edits.replace_span(end, close, ", broadcast_buffers=False")
    unused = "; if parameters may go unused, add find_unused_parameters=True" if dropped else ""
    do = (
        "torch's class, which overlaps communication with the backward pass; broadcast_buffers=False as in "
        f"Apex{unused}"
    )
    context.note(call, CHANGED, f"{ast.unparse(call.func)}({', '.join(k.arg or '' for k in dropped)})", do)
    return True


def _convert_syncbn(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    given = arguments(call, ("module", "process_group", "channel_last")) if call else {}
    if call is not None and ("channel_last" in given or "**" in given):
        context.by_hand(call, "convert_syncbn_model(channel_last=)", "torch uses torch.channels_last tensors instead")
        return False
    context.edits.replace(node, "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
    context.note(node, SAME, "convert_syncbn_model", "the same arithmetic over all ranks")
    return True


def _syncbn_group(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None or len(call.args) + len(call.keywords) != 1:
        return False
    size = call.args[0] if call.args else call.keywords[0].value
    text = ast.unparse(size)
    new = f"torch.distributed.new_subgroups({text})[0]"
    value = constant(size)
    if value is None:
        new = f"{new} if {text} else None"
        new = new if isinstance(context.source.parents[call], (ast.Assign, ast.keyword)) else f"({new})"
    context.edits.replace(call, new if value is None or value else "None")
    context.note(call, SAME, "create_syncbn_process_group", "new_subgroups makes the same groups of adjacent ranks")
    return True


def _larc(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if (
        path == "apex.parallel.LARC"
        and isinstance(node, ast.Attribute)
        or isinstance(node, ast.Name)
        and node.id != "LARC"
    ):
        context.edits.replace(node, "LARC")
    context.snippets.add("LARC")
    context.note(node, SAME, "LARC", "torch has no LARC: the patch adds one (25 lines)")
    return True


def _optimizer(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None or is_unpacked(call):
        return False
    given = arguments(call, _OPTIMIZERS[path])
    wrong = [name for name, only in _OPTIMIZER_FIXED.items() if name in given and constant(given[name]) is not only]
    wrong += [name for name in given if name not in _OPTIMIZERS[path]]
    name = path.rpartition(".")[2]
    if wrong:
        context.by_hand(call, f"{name}({wrong[0]}=)", "torch's optimizer lacks it: remove it, or use --to harness")
        return False
    kind = {"FusedSGD": "SGD", "FusedAdagrad": "Adagrad"}.get(name, "AdamW")
    if name == "FusedAdam" and "adam_w_mode" in given:
        mode = constant(given["adam_w_mode"])
        if mode not in (True, False, 0, 1):
            context.by_hand(
                call, "FusedAdam(adam_w_mode=) from a variable", "use torch.optim.AdamW or torch.optim.Adam"
            )
            return False
        kind = "AdamW" if mode else "Adam"
    allowed = ("params", "lr", *(["momentum", "dampening", "weight_decay", "nesterov"] if kind == "SGD" else []))
    words = []
    for key, value in given.items():
        if key not in _OPTIMIZER_DROPPED and key not in _OPTIMIZER_FIXED:
            text = context.source.source(value)
            words.append(text if key in allowed[:2] and value in call.args else f"{key}={text}")
    if kind == "AdamW" and "weight_decay" not in given:
        words.append("weight_decay=0.0")
    if kind == "Adagrad" and "eps" not in given:
        words.append("eps=1e-10")
    context.edits.replace(call, f"torch.optim.{kind}({', '.join(words)})")
    context.note(call, SAME, name, f"torch.optim.{kind}; on a GPU, fused=True makes it just as fast")
    return True


def _norm(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    _name(context, node, REPLACED_IMPORTS[path])
    context.note(node, SAME, path.rpartition(".")[2], f"{REPLACED_IMPORTS[path]}, which is just as fast")
    if call is None:
        return True
    for keyword in call.keywords:
        if keyword.arg == "memory_efficient":
            context.note(call, BY_HAND, "memory_efficient=", "remove it: torch's class has no such argument")
    if path.endswith("RMSNorm") and len(call.args) < 2 and "eps" not in {k.arg for k in call.keywords}:
        end = context.source.span((call.args + [k.value for k in call.keywords])[-1])[1]
        context.edits.replace_span(end, end, ", eps=1e-5")
    return True


def _to_python_float(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    if call is None or len(call.args) != 1:
        return False
    text = context.source.source(call.args[0])
    simple = isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    # Only around the argument, which may itself be edited.
    start, end = context.source.span(call)
    first, last = context.source.span(call.args[0])
    context.edits.replace_span(start, first, "" if simple else "(")
    context.edits.replace_span(last, end, ".item()" if simple else ").item()")
    context.note(call, SAME, f"to_python_float({text})", ".item()")
    return True


def _available(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    statement = context.source.statement(node)
    if isinstance(statement, ast.Assert):
        context.edits.replace_statement(statement, [])
    else:
        context.edits.replace(node, "True")
    context.note(node, SAME, "multi_tensor_applier.available", "torch's optimizers need no extension")
    return True


def _casting(context: Context, node: ast.expr, path: str, call: ast.Call | None) -> bool:
    name = path.rpartition(".")[2]
    dtype = "torch.float16" if "half" in name else "torch.bfloat16" if "bfloat16" in name else "torch.float32"
    context.imports.add("functools")
    context.snippets.add("cast_inputs")
    context.note(node, SAME, f"amp.{name}", "torch has no such decorator: the patch adds one (15 lines)")
    if not name.startswith("register"):
        context.edits.replace(node, f"cast_inputs({dtype})")
        return True
    if call is None or len(call.args) != 2 or not isinstance(constant(call.args[1]), str):
        return False
    target = f"{context.source.source(call.args[0])}.{constant(call.args[1])}"
    context.edits.replace(call, f"{target} = cast_inputs({dtype})({target})")
    return True


Rule = Callable[[Context, ast.expr, str, ast.Call | None], bool]
_RULES: dict[str, Rule] = {
    "apex.amp.state_dict": _state_dict,
    "apex.amp.load_state_dict": _load_state_dict,
    "apex.amp.disable_casts": _disable_casts,
    "apex.parallel.DistributedDataParallel": _distributed,
    "apex.parallel.convert_syncbn_model": _convert_syncbn,
    "apex.parallel.create_syncbn_process_group": _syncbn_group,
    "apex.parallel.LARC": _larc,
    "apex.multi_tensor_apply.multi_tensor_applier.available": _available,
    **dict.fromkeys(_OPTIMIZERS, _optimizer),
    **{path: _norm for path in REPLACED_IMPORTS if "normalization" in path},
    "apex.fp16_utils.to_python_float": _to_python_float,
    **{f"apex.amp.{kind}_function": _casting for kind in ("half", "float", "bfloat16")},
    **{f"apex.amp.register_{kind}_function": _casting for kind in ("half", "float", "bfloat16")},
}
