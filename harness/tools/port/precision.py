"""``amp.initialize`` and ``FP16_Optimizer``: the gradient scaler that takes their place."""

from __future__ import annotations

import ast

from harness.tools.port.context import BY_HAND, CHANGED, SAME, Context, arguments, constant, elements, is_unpacked

INITIALIZE = (
    *("models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity"),
    *("min_loss_scale", "max_loss_scale"),
)
_LEVELS = {
    "O0": "O0 is float32: the scaler and autocast are off",
    "O1": "O1 becomes autocast around the forward pass and the loss; torch's lists of operations differ slightly from "
    "Apex's",
    "O2": "torch has no O2: the weights stay float32 and autocast casts operations as at O1. Memory and speed are "
    "those of O1. --to harness keeps O2",
    "O3": "torch has no O3: the weights stay float32 and autocast casts operations as at O1. --to harness keeps O3",
    "O4": "O4 becomes autocast in bfloat16 around the forward pass and the loss, without a loss scale",
    "O5": "torch has no O5: the weights stay float32 and autocast casts operations to bfloat16. --to harness keeps O5",
}
_LIMITS = "GradScaler has no lower or upper limit for the loss scale; the argument is dropped"
_DROPPED = {
    "keep_batchnorm_fp32": "autocast always keeps batch norm's weights in float32; the argument is dropped",
    "master_weights": "the weights themselves are float32; the argument is dropped",
    "cast_model_type": "autocast casts operations, not the model; the argument is dropped",
    "patch_torch_functions": "autocast casts operations; the argument is dropped",
    "cast_model_outputs": "autocast does not cast the model's outputs; cast them where you use them",
    "num_losses": "one scaler serves all losses: an overflow in one lowers the scale of all",
    "min_loss_scale": _LIMITS,
    "max_loss_scale": _LIMITS,
}


def find_models(context: Context) -> None:
    """Collect the texts of models and optimizers that are initialized, before and after."""
    for call in context.names.calls("apex.amp.initialize"):
        given = arguments(call, INITIALIZE)
        models, optimizers = elements(given.get("models")), elements(given.get("optimizers"))
        statement = context.source.parents[call]
        if isinstance(statement, ast.Assign):
            first, second = _targets(statement, bool(given.get("optimizers")))
            models, optimizers = [*models, *elements(first)], [*optimizers, *elements(second)]
        context.models |= {text for node in models for text in _texts(context, node)}
        context.optimizers |= {text for node in optimizers for text in _texts(context, node)}


def find_wrapped_models(context: Context) -> None:
    """Add the names that are assigned a model, or a parallel wrapper of one."""
    assignments = [node for node in ast.walk(context.source.tree) if isinstance(node, ast.Assign)]
    before = -1
    while before < len(context.models):
        before = len(context.models)
        for node in assignments:
            value = node.value.args[0] if is_wrapper(node.value) else node.value  # type: ignore[attr-defined]
            if ast.unparse(value) in context.models:
                context.models |= {text for target in node.targets for text in _texts(context, target)}


def is_wrapper(node: ast.AST) -> bool:
    """Return True if ``node`` is a call such as ``nn.DataParallel(model)``."""
    return isinstance(node, ast.Call) and bool(node.args) and ast.unparse(node.func).endswith(("DataParallel", "DDP"))


def _targets(statement: ast.Assign, with_optimizers: bool) -> tuple[ast.expr | None, ast.expr | None]:
    target = statement.targets[0]
    if not with_optimizers:
        return target, None
    if isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == 2:
        return target.elts[0], target.elts[1]
    return None, None


def _texts(context: Context, node: ast.expr) -> list[str]:
    """The text of ``node``, and of the model in ``model.cuda()``."""
    found = [ast.unparse(node)] if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) else []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
        found += [ast.unparse(node)] if isinstance(node, (ast.Name, ast.Attribute)) else []
    return found


def rewrite(context: Context) -> None:
    calls = [call for call in context.names.calls("apex.amp.initialize") if not is_unpacked(call)]
    makers = [call for call in calls if arguments(call, INITIALIZE).get("optimizers") is not None] or calls
    seen: set[object] = set()
    optional = len(makers) > 1
    for call in calls:
        given = arguments(call, INITIALIZE)
        level = _level(context, call, given)
        enabled, always = _enabled(given, level)
        statement = context.source.statement(call)
        scaler = scaler_lines(context.scaler, _words(given, level, enabled), context.source.unit)
        key = context.source.function(call), *scaler
        lines = scaler if call in makers and key not in seen else []
        seen |= {key} if lines else set()
        _replace(context, call, given, lines)
        context.finish(call)
        if lines:
            declare(context, statement, level, always and not optional)
            if next(context.names.calls("apex.amp.scale_loss"), None) is None and "optimizers" in given:
                do = f"pass {context.scaler} to the file that calls scale_loss, and use the same name when you port it"
                context.note(call, BY_HAND, "amp.initialize without a scale_loss in this file", do)
        _explain(context, call, given, level)


def _level(context: Context, call: ast.Call, given: dict[str, ast.expr]) -> str | ast.expr:
    """The opt level if it is certain, else its expression."""
    node = given.get("opt_level")
    if node is None and "**" in given:
        options = f'{context.source.source(given["**"])}.get("opt_level", "O1")'
        return ast.parse(options, mode="eval").body
    if isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(context.source.tree)
            if isinstance(each, ast.Assign) and any(ast.unparse(target) == node.id for target in each.targets)
        ]
        node = values[0] if len(values) == 1 and isinstance(constant(values[0]), str) else node
    value = "O1" if node is None else constant(node)
    return value if isinstance(value, str) else node or "O1"


def _enabled(given: dict[str, ast.expr], level: str | ast.expr) -> tuple[str, bool]:
    """The expression for "amp is on", and whether it is certain."""
    parts = []
    switch = given.get("enabled")
    if switch is not None and constant(switch) is not True:
        parts.append(_operand(switch))
    if not isinstance(level, str):
        parts.append(f'{_operand(level)} != "O0"')
    elif level == "O0":
        parts = ["False"]
    return " and ".join(parts), not parts


def _operand(node: ast.expr) -> str:
    text = ast.unparse(node)
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant))
    return text if simple else f"({text})"


def _words(given: dict[str, ast.expr], level: str | ast.expr, enabled: str) -> list[str]:
    """The arguments of the scaler."""
    words = ['"cuda"']
    scale = given.get("loss_scale")
    value = constant(scale)
    static = "growth_interval=10**9"
    if level in ("O4", "O5"):
        enabled = "False"
    elif isinstance(value, (int, float)) or (isinstance(value, str) and value != "dynamic"):
        words += [f"init_scale={float(value)!r}", static]
    elif scale is not None and not isinstance(scale, ast.Constant):
        text = ast.unparse(scale)
        dynamic = f'{text} in (None, "dynamic")'
        words.append(f"init_scale=2.0**16 if {dynamic} else float({text})")
        words.append(f"growth_interval=2000 if {dynamic} else 10**9")
    if enabled:
        words.append(f"enabled={enabled}")
    return words


def scaler_lines(name: str, words: list[str], unit: str) -> list[str]:
    """The lines that make a scaler from the arguments ``words``."""
    line = f"{name} = torch.amp.GradScaler({', '.join(words)})"
    if len(line) <= 96:
        return [line]
    return [f"{name} = torch.amp.GradScaler(", *(f"{unit}{word}," for word in words), ")"]


def _replace(context: Context, call: ast.Call, given: dict[str, ast.expr], lines: list[str]) -> None:
    """Put ``lines`` in the place of a call, and assign what it returned if that was something else."""
    source, statement = context.source, context.source.statement(call)
    values = [given[name] for name in ("models", "optimizers") if name in given and given[name] is not None]
    returned = ", ".join(source.source(value) for value in values)
    comments = [source.comments[n] for n in range(call.lineno, (call.end_lineno or 0) + 1) if n in source.comments]
    lines = [*(comment for comment in comments if "noqa" not in comment), *lines]
    is_assigned = isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1
    if is_assigned and source.is_alone(statement):
        context.edits.replace_statement(statement, lines + _assignments(statement, values))  # type: ignore[arg-type]
    elif isinstance(statement, ast.Expr) and statement.value is call:
        context.edits.replace_statement(statement, lines)
    else:
        whole = isinstance(statement, (ast.Return, ast.Assign)) and statement.value is call
        context.edits.replace(call, returned if whole else f"({returned})")
        context.edits.insert_before(statement, lines)


def _assignments(statement: ast.Assign, values: list[ast.expr]) -> list[str]:
    """Assignments of ``values`` to the targets of ``statement``, except to themselves."""
    target = statement.targets[0]
    pairs = [(target, values[0])] if len(values) == 1 else []
    if not pairs:
        if not isinstance(target, (ast.Tuple, ast.List)) or len(target.elts) != 2:
            return [f"{ast.unparse(target)} = {', '.join(map(ast.unparse, values))}"]
        pairs = list(zip(target.elts, values, strict=True))
    lines = []
    for left, right in pairs:
        if ast.unparse(left).strip("()[]") != ast.unparse(right).strip("()[]"):
            lines.append(f"{ast.unparse(left)} = {ast.unparse(right)}")
    return lines


def _is_certain(context: Context, statement: ast.stmt) -> bool:
    """Return True if a statement runs whenever its function does."""
    for node in context.source.above(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            return True
        if not isinstance(node, ast.With):
            return False
    return True


def declare(context: Context, statement: ast.stmt, level: str | ast.expr, always: bool = True) -> None:
    """Make the scaler that ``statement`` makes a global name, and set the expression for autocast.

    ``always``: whether the scaler is on wherever it is made.
    """
    conditional = not always or not _is_certain(context, statement)
    context.has_scaler = True
    context.autocast = "" if level == "O0" else _autocast(context, level, conditional)
    function = context.source.function(statement)
    if isinstance(function, ast.Module) and _is_certain(context, statement):
        return
    context.snippets.add("scaler")
    if not isinstance(function, ast.Module) and function not in context.done:
        context.done.add(function)
        first = function.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(constant(first.value), str)
        if is_docstring and len(function.body) > 1:
            first = function.body[1]
        context.edits.insert_before(first, [f"global {context.scaler}"])


def _autocast(context: Context, level: str | ast.expr, conditional: bool) -> str:
    dtype = "torch.bfloat16" if level in ("O4", "O5") else "torch.float16"
    words = ['"cuda"', f"dtype={dtype}"]
    if level not in ("O4", "O5") and conditional:
        words.append(f"enabled={context.scaler}.is_enabled()")
    return f"torch.amp.autocast({', '.join(words)})"


def _explain(context: Context, call: ast.Call, given: dict[str, ast.expr], level: str | ast.expr) -> None:
    if isinstance(level, str):
        known = _LEVELS.get(level, f"Apex has no level {level}; the patch treats it as O1")
        context.note(call, SAME if level == "O0" else CHANGED, f"amp.initialize at {level}", known)
    else:
        what = f"amp.initialize at the level {ast.unparse(level)}"
        context.note(call, CHANGED, what, "O0 turns amp off; O1, O2 and O3 all become autocast with float32 weights")
    for name, value in given.items():
        if name in _DROPPED and constant(value) != 1 and not (isinstance(value, ast.Constant) and value.value is None):
            context.note(value, CHANGED, f"{name}=", _DROPPED[name])
    scale = given.get("loss_scale")
    if scale is not None and constant(scale) != "dynamic" and not (isinstance(scale, ast.Constant) and not scale.value):
        do = "GradScaler skips a step and halves even a static scale after an overflow; Apex took the step"
        context.note(scale, CHANGED, "static loss_scale", do)
    if level in ("O2", "O3", "O5") or not isinstance(level, str):
        for node in ast.walk(context.source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "half":
                do = "under autocast, inputs and weights stay float32: remove .half()"
                context.note(node, CHANGED, ast.unparse(node), do)
