"""``FP16_Optimizer`` and ``network_to_half``, the interface before amp."""

from __future__ import annotations

import ast

from harness.tools.port import precision
from harness.tools.port.context import CHANGED, SAME, Context, arguments, constant, is_unpacked

_CLASSES = ("apex.fp16_utils.FP16_Optimizer", "apex.optimizers.FP16_Optimizer")
_CONVERTERS = ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network")
_PARAMETERS = ("init_optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args", "verbose")
_NOT_PORTED = ("update_master_grads", "inspect_master_grad_data", "backward_no_update")


def rewrite(context: Context) -> None:
    """Replace each wrapper by a gradient scaler, unless the script halves its model itself."""
    source = context.source
    attributes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    halved = [node for node in attributes if node.attr == "half" and isinstance(source.parents[node], ast.Call)]
    by_hand = [node for node in attributes if node.attr in _NOT_PORTED]
    for call in [call for path in _CLASSES for call in context.names.calls(path)]:
        statement = source.parents[call]
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and source.is_alone(statement)
        given = arguments(call, _PARAMETERS)
        if halved or by_hand:
            for node in halved + by_hand:
                do = (
                    "the weights stay float32 under autocast: remove it, then port FP16_Optimizer as in docs/migrate.md"
                )
                context.by_hand(node, ast.unparse(node), do)
        elif plain and not is_unpacked(call) and "init_optimizer" in given and "**" not in given:
            _replace(context, statement, call, given)  # type: ignore[arg-type]
    for call in [call for path in _CONVERTERS for call in context.names.calls(path)]:
        _keep_float(context, call)


def _replace(context: Context, statement: ast.Assign, call: ast.Call, given: dict[str, ast.expr]) -> None:
    target, inner = ast.unparse(statement.targets[0]), context.source.source(given["init_optimizer"])
    lines = precision.scaler_lines(context.scaler, _scale(given), context.source.unit)
    lines += [f"{target} = {inner}"] if target != inner else []
    context.edits.replace_statement(statement, lines)
    context.finish(call)
    context.optimizers.add(target)
    context.fp16_optimizers.add(target)
    precision.declare(context, statement, "O2")
    do = "a GradScaler; the weights stay float32 and autocast casts operations. --to harness keeps FP16_Optimizer"
    context.note(call, CHANGED, "FP16_Optimizer", do)


def _scale(given: dict[str, ast.expr]) -> list[str]:
    """The scaler's arguments."""
    dynamic, static = given.get("dynamic_loss_scale"), given.get("static_loss_scale")
    fixed = "1.0" if static is None else ast.unparse(static)
    words = ['"cuda"']
    if dynamic is None or constant(dynamic) is False:
        words += [f"init_scale={fixed}", "growth_interval=10**9"]
    elif constant(dynamic) is not True:
        text = ast.unparse(dynamic)
        words += [f"init_scale=2.0**16 if {text} else {fixed}", f"growth_interval=2000 if {text} else 10**9"]
    return words


def _keep_float(context: Context, call: ast.Call) -> None:
    """``network_to_half(model)`` becomes the model itself."""
    statement = context.source.statement(call)
    if len(call.args) != 1 or call.keywords:
        return
    model = ast.unparse(call.args[0])
    context.models.add(model)
    if isinstance(statement, ast.Assign) and statement.value is call:
        context.models |= {ast.unparse(target) for target in statement.targets}
    if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == model:
        context.edits.replace_statement(statement, [])
    else:
        start, end = context.source.span(call)
        first, last = context.source.span(call.args[0])
        context.edits.replace_span(start, first, "")
        context.edits.replace_span(last, end, "")
    context.finish(call)
    context.note(call, CHANGED, ast.unparse(call), "removed: the weights stay float32 and autocast casts operations")


def backwards(context: Context) -> list[tuple[ast.Call, ast.expr]]:
    """The calls ``optimizer.backward(loss)``, with the loss, replaced by the scaled backward pass."""
    found = []
    for node in ast.walk(context.source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) not in context.fp16_optimizers:
            continue
        optimizer = context.source.source(node.func.value)
        if node.func.attr == "backward" and node.args:
            loss = node.args[0]
            context.edits.replace(node, f"{context.scaler}.scale({context.source.source(loss)}).backward()")
            context.note(node, SAME, ast.unparse(node), "the scaled backward pass")
            found.append((node, loss))
        elif node.func.attr == "clip_master_grads" and node.args:
            parameters = f'(p for group in {optimizer}.param_groups for p in group["params"])'
            rest = ", ".join(context.source.source(each) for each in node.args)
            context.edits.replace(node, f"torch.nn.utils.clip_grad_norm_({parameters}, {rest})")
        elif node.func.attr in ("state_dict", "load_state_dict"):
            do = "the optimizer's own: checkpoints of FP16_Optimizer need --to harness"
            context.note(node, CHANGED, ast.unparse(node.func), do)
    return found
