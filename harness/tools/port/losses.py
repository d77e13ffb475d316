"""``scale_loss`` and the backward passes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from harness.tools.port import fp16_optimizer
from harness.tools.port.context import BY_HAND, CHANGED, SAME, Context, arguments, constant, elements, is_unpacked

SCALE_LOSS = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")


@dataclass
class Backward:
    """The scaled backward pass of a loss."""

    statement: ast.stmt
    loss: ast.expr


@dataclass
class Step:
    """``optimizer.step()`` of an optimizer that is under amp."""

    call: ast.Call
    optimizer: str
    statement: ast.stmt  # the step, or the loop over optimizers around it


@dataclass
class Losses:
    """The backward passes and steps of a script by function, in the order of the text."""

    backwards: dict[ast.AST, list[Backward]] = field(default_factory=dict)
    plain: dict[ast.AST, list[Backward]] = field(default_factory=dict)  # scaled ones that were not under scale_loss
    steps: dict[ast.AST, list[Step]] = field(default_factory=dict)


def rewrite(context: Context) -> Losses:
    """Port the backward passes; return where they are."""
    losses = Losses()
    for call in context.names.calls("apex.amp.scale_loss"):
        if (backward := _scale_loss(context, call)) is not None:
            losses.backwards.setdefault(context.source.function(backward.statement), []).append(backward)
    for call, loss in fp16_optimizer.backwards(context):
        backward = Backward(context.source.statement(call), loss)
        losses.backwards.setdefault(context.source.function(call), []).append(backward)
    for found in losses.backwards.values():
        found.sort(key=lambda each: each.statement.lineno)
    _plain_backwards(context, losses)
    return losses


def _scale_loss(context: Context, call: ast.Call) -> Backward | None:
    source = context.source
    above = source.parents[call]
    given = arguments(call, SCALE_LOSS)
    statement = source.statement(call)
    context.finish(call)
    plain = isinstance(above, ast.withitem) and isinstance(statement, ast.With) and len(statement.items) == 1
    named = isinstance(above, ast.withitem) and isinstance(above.optional_vars, ast.Name)
    if not (plain and named) or is_unpacked(call) or "loss" not in given or "**" in given:
        context.done.discard(call.func)
        do = f"write {context.scaler}.scale(loss).backward()"
        context.by_hand(call, "scale_loss that is not the only item of a with statement", do)
        return None
    for node in elements(given.get("optimizers")):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            context.optimizers.add(ast.unparse(node))
    _unwrap(context, statement, given["loss"])  # type: ignore[arg-type]
    _explain(context, call, given)
    return Backward(statement, given["loss"])


def _unwrap(context: Context, statement: ast.With, loss: ast.expr) -> None:
    """Replace ``with scale_loss(loss, optimizer) as scaled:`` by its body with the scaled loss in it."""
    source, edits, body = context.source, context.edits, statement.body
    alias = ast.unparse(statement.items[0].optional_vars)  # type: ignore[arg-type]
    scaled = f"{context.scaler}.scale({source.source(loss)})"
    uses = [node for node in source.inside(source.function(statement)) if _is_use(node, alias)]
    inside = [node for node in uses if statement in source.above(node)]
    inline = len(inside) == 1 and source.statement(inside[0]) in body and is_backward(source.parents[inside[0]])
    others = {ast.unparse(w.items[0].optional_vars) for w in _withs(context) if w is not statement}  # type: ignore[arg-type]
    inline = inline and (len(uses) == 1 or alias in others)
    if inline:
        edits.replace(inside[0], scaled)
    lines = [] if inline else [f"{alias} = {scaled}"]
    start, first = source.span(statement)[0], body[0]
    last_of_header = source.text.rfind(":", start, source.span(first)[0])
    header_end = source.text.count("\n", 0, last_of_header) + 1
    if first.lineno == header_end:
        edits.replace_span(start, source.span(first)[0], "; ".join([*lines, ""]))
        return
    comments = [source.comments[n] for n in range(statement.lineno, header_end + 1) if n in source.comments]
    if comments or lines:
        edits.insert_before(statement, [*comments, *lines])
    edits.remove_lines(statement.lineno, header_end)
    edits.shift_left(header_end + 1, statement.end_lineno or 0, source.indent(first), source.indent(statement))


def _withs(context: Context) -> list[ast.With]:
    calls = context.names.calls("apex.amp.scale_loss")
    found = [context.source.statement(call) for call in calls]
    return [each for each in found if isinstance(each, ast.With) and each.items[0].optional_vars is not None]


def _is_use(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "backward"


def _explain(context: Context, call: ast.Call, given: dict[str, ast.expr]) -> None:
    what = f"scale_loss of {ast.unparse(given['loss'])}"
    context.note(call, SAME, what, f"{context.scaler}.scale(...).backward(); gradients stay scaled until the step")
    if "delay_unscale" in given and constant(given["delay_unscale"]) is not False:
        do = "dropped: torch accumulates scaled gradients and unscales them once, at the step"
        context.note(given["delay_unscale"], SAME, "delay_unscale", do)
    if "delay_overflow_check" in given:
        context.note(
            given["delay_overflow_check"], CHANGED, "delay_overflow_check", "dropped: each step checks for overflow"
        )
    if "loss_id" in given and constant(given["loss_id"]) != 0:
        context.note(given["loss_id"], CHANGED, "loss_id", "dropped: all losses share one scale")


def _plain_backwards(context: Context, losses: Losses) -> None:
    """Scale other backward passes of the same losses, such as those in the else branch of ``if args.fp16:``."""
    for function, found in losses.backwards.items():
        texts = {ast.unparse(each.loss) for each in found}
        for node in context.source.inside(function):
            if not (isinstance(node, ast.Call) and is_backward(node.func)):
                continue
            loss = node.func.value  # type: ignore[attr-defined]
            inside = any(each.statement in context.source.above(node) for each in found)
            if inside or (isinstance(loss, ast.Call) and ast.unparse(loss.func).endswith(".scale")):
                continue
            if ast.unparse(loss) in texts:
                context.edits.replace(loss, f"{context.scaler}.scale({context.source.source(loss)})")
                do = "also scaled, because the step unscales it; no effect while the scaler is disabled"
                context.note(node, SAME, "backward without scale_loss", do)
                losses.plain.setdefault(function, []).append(Backward(context.source.statement(node), loss))
            else:
                do = f"if an optimizer under amp uses its gradients, write {context.scaler}.scale(...).backward()"
                context.note(node, BY_HAND, f"backward of {ast.unparse(loss)} without scale_loss", do)
