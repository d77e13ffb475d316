"""Autocast: which statements compute a model's output and its loss, and the ``with`` around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from harness.tools.port.context import BY_HAND, CHANGED, Context
from harness.tools.port.losses import Backward, Losses
from harness.tools.port.precision import is_wrapper
from harness.tools.port.steps import LOOPS

# Calls that only move or count data: not a reason to begin a region of autocast.
_MOVES = {
    *("cuda", "cpu", "to", "float", "long", "size", "item", "append", "zero_grad", "enumerate", "zip", "len", "next"),
    *("iter", "range", "print", "detach", "clone", "Variable", "time", "update", "format", "get", "items", "int"),
    *("str", "list", "tuple", "train", "eval", "set_epoch", "step", "keys", "values", "dict", "device", "data"),
}
Region = tuple[list[ast.stmt], int, int]  # a block, and the first and last index of its statements in the region


def rewrite(context: Context, losses: Losses) -> None:
    if not context.autocast:
        return
    regions: list[Region] = []
    for function, backwards in losses.backwards.items():
        for backward in backwards:
            found = list(_regions(context, losses, function, backward))
            if not found:
                do = f"put the forward pass and the loss under `with {context.autocast}:`"
                context.by_hand(backward.statement, "no forward pass found before this loss", do)
            regions += found
        for backward in losses.plain.get(function, []):
            regions += _regions(context, losses, function, backward)
    for call in _model_calls(context):
        statement = context.source.statement(call)
        if _is_covered(context, statement, regions) or "autocast" in _withs_above(context, statement):
            continue
        if isinstance(statement, (ast.For, ast.While, ast.If, ast.With)) or not context.source.is_alone(statement):
            do = f"compute it on a line of its own under `with {context.autocast}:`"
            context.note(call, BY_HAND, f"{ast.unparse(call.func)}(...) inside another statement", do)
            continue
        block = context.source.block(statement)
        regions.append((block, block.index(statement), block.index(statement)))
    for region in _merged(regions):
        _wrap(context, region)


def _regions(context: Context, losses: Losses, function: ast.AST, backward: Backward) -> Iterator[Region]:
    """The statements before ``backward`` that compute its loss, block by block, up to those that call a model."""
    needed, statement = _reads(backward.loss), backward.statement
    passes = losses.backwards.get(function, []) + losses.plain.get(function, [])
    ends = {each.statement for each in passes} | {each.statement for each in losses.steps.get(function, [])}
    seen = False
    while True:
        block = context.source.block(statement)
        found: list[int] = []
        with_model = False
        for place in range(block.index(statement) - 1, -1, -1):
            if any(node in ends for node in ast.walk(block[place])):  # a region must not hold a backward pass or a step
                yield from _region(context, block, found)
                if with_model:
                    return
                found, seen = [], seen or bool(found)
            elif _writes(block[place]) & needed:
                needed |= _reads(block[place])
                uses = _uses_model(context, block[place])
                # Without a model, only calls right before the loss belong to the forward pass.
                if uses or (_computes(block[place]) and not with_model and (found or not seen)):
                    found.append(place)
                with_model = with_model or uses
        yield from _region(context, block, found)
        above = context.source.parents[statement]
        while isinstance(above, ast.ExceptHandler):
            above = context.source.parents[above]
        seen = seen or bool(found)
        if with_model or above is function or not isinstance(above, ast.stmt):
            return
        if seen and isinstance(above, LOOPS):
            return
        statement = above


def _region(context: Context, block: list[ast.stmt], found: list[int]) -> Iterator[Region]:
    """The region from the first of the statements ``found`` that uses a model, or the first, to the last."""
    with_model = [place for place in found if _uses_model(context, block[place])]
    if found:
        first, last = min(with_model or found), max(found)
        if context.source.is_alone(block[first]) and context.source.is_alone(block[last]):
            yield block, first, last


def _text(node: ast.AST) -> str:
    """``loss`` for ``loss[0].data``, and ``self.loss`` for ``self.loss.data``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return f"self.{node.attr}"
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reads(statement: ast.AST) -> set[str]:
    kinds = (ast.Name, ast.Attribute)
    found = {_text(node) for node in ast.walk(statement) if isinstance(node, kinds)}
    return found - {"", "self", "torch", "F", "nn", "np"}


def _writes(statement: ast.stmt) -> set[str]:
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            found.add(_text(node))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("append", "update")
        ):
            found.add(_text(node.func.value))
    return found - {""}


def _computes(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in _MOVES:
                return True
    return False


def _is_model_call(context: Context, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    text = ast.unparse(node.func)
    return text.removesuffix(".forward").removesuffix(".module") in context.models


def _uses_model(context: Context, statement: ast.stmt) -> bool:
    """Whether a statement calls a model, or passes one to a function."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    passed = {ast.unparse(argument) for call in calls if not is_wrapper(call) for argument in call.args}
    return bool(passed & context.models) or any(_is_model_call(context, call) for call in calls)


def _model_calls(context: Context) -> Iterator[ast.Call]:
    for node in ast.walk(context.source.tree):
        if isinstance(node, ast.Call) and _is_model_call(context, node):
            yield node


def _withs_above(context: Context, statement: ast.stmt) -> str:
    above = [statement, *context.source.above(statement)]
    return " ".join(ast.unparse(item) for node in above if isinstance(node, ast.With) for item in node.items)


def _is_covered(context: Context, statement: ast.stmt, regions: list[Region]) -> bool:
    above = {statement, *context.source.above(statement)}
    return any(each in above for block, first, last in regions for each in block[first : last + 1])


def _merged(regions: list[Region]) -> list[Region]:
    """The regions without overlaps, and adjacent ones joined."""
    merged: list[Region] = []
    for block, first, last in sorted(regions, key=lambda region: (region[0][region[1]].lineno, -region[2])):
        same = next((each for each in merged if each[0] is block and first <= each[2] + 1), None)
        if same is not None:
            merged[merged.index(same)] = (block, same[1], max(last, same[2]))
        elif not any(_contains(each, block[first]) for each in merged):
            merged.append((block, first, last))
    return merged


def _contains(region: Region, statement: ast.stmt) -> bool:
    block, first, last = region
    return block[first].lineno <= statement.lineno <= (block[last].end_lineno or 0)


def _wrap(context: Context, region: Region) -> None:
    block, first, last = region
    source, edits, start = context.source, context.edits, block[first]
    above = source.parents[start]
    if isinstance(above, ast.With) and above.body is block and (first, last) == (0, len(block) - 1):
        end = source.span(above.items[-1].optional_vars or above.items[-1].context_expr)[1]
        edits.replace_span(end, end, f", {context.autocast}")
    else:
        edits.insert_before(start, [f"with {context.autocast}:"])
        edits.shift_right(start.lineno, block[last].end_lineno or 0)
    context.note(start, CHANGED, "forward pass", "under autocast; check that the block covers all of it and the loss")
