"""What reads gradients between the backward pass and the step: they are scaled there, unlike in Apex."""

from __future__ import annotations

import ast

from harness.tools.port.context import SAME, Context
from harness.tools.port.losses import Losses, Step
from harness.tools.port.steps import LOOPS, chain, is_in

_BAD_ORDER = "unscale_ runs once per step: move this next to the step, and write scaler.unscale_(optimizer) above it"


def rewrite(context: Context, losses: Losses) -> None:
    """Insert ``scaler.unscale_(optimizer)`` before the first statement that reads unscaled gradients.

    Where that cannot be done, what reads them stays as it is.
    """
    by_hand: set[ast.AST] = set()
    for function, steps in losses.steps.items():
        found = losses.backwards.get(function, []) + losses.plain.get(function, [])
        backwards = [each.statement for each in found]
        for step in steps:
            before = sorted(
                (each for each in backwards if each.lineno < step.call.lineno), key=lambda each: each.lineno
            )
            if before or not backwards:
                _unscale_for(context, function, step, before, by_hand)
    for function, found in losses.backwards.items():
        if function not in losses.steps:
            for reader in _readers(context, function, None):
                if reader.lineno > found[0].statement.lineno:  # type: ignore[attr-defined]
                    context.by_hand(reader, f"{ast.unparse(reader)} reads scaled gradients", _BAD_ORDER)
                    by_hand.add(reader)
    for call in list(context.names.calls("apex.amp.master_params")):
        if call.args and not {call, *context.source.above(call)} & by_hand:
            optimizer = context.source.source(call.args[0])
            new = f'(p for group in {optimizer}.param_groups for p in group["params"])'
            context.edits.replace(call, new)
            context.finish(call)
            context.note(call, SAME, f"amp.master_params({optimizer})", "the optimizer's parameters, which are float32")


def _unscale_for(
    context: Context, function: ast.AST, step: Step, before: list[ast.stmt], by_hand: set[ast.AST]
) -> None:
    """Unscale once on each way from a backward pass in ``before`` to ``step``."""
    done: list[ast.stmt] = []  # the last backward passes before the places where gradients are unscaled
    for reader in _readers(context, function, step):
        line = reader.lineno  # type: ignore[attr-defined]
        around = set(context.source.above(reader))
        passed = [each for each in before if (each.end_lineno or 0) < line or each in around]
        last = passed[-1] if passed else None
        if (before and last is None) or last in done or _other_step(context, function, step, last, line):
            continue
        place = _place_of_unscale(context, function, reader, step, last)
        if place is None:
            if reader not in by_hand:
                context.by_hand(reader, f"{ast.unparse(reader)} reads scaled gradients", _BAD_ORDER)
            by_hand.add(reader)
            continue
        done += [last] if last is not None else before or [place]
        context.edits.insert_before(place, [f"{context.scaler}.unscale_({step.optimizer})"])
        do = f"{context.scaler}.unscale_({step.optimizer}) comes first: between backward and step, gradients are scaled"
        context.note(reader, SAME, f"{ast.unparse(reader)} reads gradients", do)
        if not before:
            return


def _other_step(context: Context, function: ast.AST, step: Step, last: ast.stmt | None, line: int) -> bool:
    """Whether the same optimizer has stepped between ``last`` and ``line``: the gradients are not scaled then."""
    start = 0 if last is None else last.lineno
    for node in context.source.inside(function):
        is_step = isinstance(node, ast.Call) and ast.unparse(node.func) == f"{step.optimizer}.step"
        if is_step and node is not step.call and start < node.lineno < line:  # type: ignore[attr-defined]
            return True
    return False


def _readers(context: Context, function: ast.AST, step: Step | None) -> list[ast.AST]:
    """What reads gradients of the optimizer before its step, in the order of the text, the outermost expressions.

    Without a step: what reads gradients in ``function``.
    """
    found: list[ast.AST] = []
    for node in context.source.inside(function):
        line = getattr(node, "lineno", None)
        if line is None or (step and line >= step.call.lineno) or any(up in found for up in context.source.above(node)):
            continue
        name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        inner = [each for each in ast.walk(node) if isinstance(each, ast.Call)] if "grad" in name else [node]
        of = [ast.unparse(each.args[0]) for each in inner if _is_masters(context, each)]  # type: ignore[attr-defined]
        if of and step and step.optimizer not in of and set(of) & context.optimizers:
            continue  # of another optimizer
        reads = isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)
        if of or reads or "clip_grad" in name or "grad_norm" in name or name == "clip_master_grads":
            found.append(node)
    return found


def _is_masters(context: Context, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(node.args) and context.names.path(node.func) == "apex.amp.master_params"


def _place_of_unscale(
    context: Context, function: ast.AST, reader: ast.AST, step: Step, last: ast.stmt | None
) -> ast.stmt | None:
    """The statement above which to unscale: after the backward pass ``last``, and once for each step. None if there is
    no such place."""
    source = context.source
    reading, stepping = (chain(context, source.statement(each), function) for each in (reader, step.statement))
    index = next(i for i, (block, _) in enumerate(reading) if is_in(block, stepping))
    block, place = reading[index]
    below = stepping[: next(i for i, (each, _) in enumerate(stepping) if each is block)]
    if any(not isinstance(source.parents[inner[0]], (ast.With, ast.Try)) for inner, _ in below):
        return None
    while last is not None and last in ast.walk(place):
        index -= 1
        if index < 0 or isinstance(source.parents[reading[index][0][0]], LOOPS):
            return None
        place = reading[index][1]
    return place
