"""``optimizer.step()``, and where ``scaler.update()`` follows."""

from __future__ import annotations

import ast

from harness.tools.port.context import AS_IS, BY_HAND, CHANGED, SAME, Context, elements
from harness.tools.port.losses import Losses, Step, is_backward

LOOPS = (ast.For, ast.AsyncFor, ast.While)
Chain = list[tuple[list[ast.stmt], ast.stmt]]


def rewrite(context: Context, losses: Losses) -> None:
    """Port the steps of optimizers under amp, and add them to ``losses``."""
    _find_steps(context, losses)
    for function, steps in losses.steps.items():
        _updates(context, losses, function, steps)
    for function, backwards in losses.backwards.items():
        if not losses.steps:
            do = (
                f"port the file that calls optimizer.step(): use {context.scaler}.step(optimizer), then "
                f"{context.scaler}.update()"
            )
            context.note(backwards[0].statement, BY_HAND, "no optimizer step in this file", do)
            break
        if function not in losses.steps:
            do = f"gradients stay scaled until {context.scaler}.step(optimizer) or {context.scaler}.unscale_(optimizer)"
            context.note(backwards[0].statement, CHANGED, "the step is in another function", do)


def _find_steps(context: Context, losses: Losses) -> None:
    source = context.source
    loops = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_list(context, node.iter):
            loops[node.target.id] = node
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"):
            continue
        optimizer = ast.unparse(node.func.value)
        loop = loops.get(optimizer)
        in_loop = loop is not None and loop in source.above(node)
        if optimizer not in context.optimizers and not in_loop:
            continue
        function = source.function(node)
        if function not in losses.backwards and _has_backward(context, function):
            context.note(node, AS_IS, f"{optimizer}.step()", "no loss in this function is scaled")
        elif node.args or node.keywords:
            context.by_hand(
                node, "step with a closure", "GradScaler does not support closures; compute the loss before the step"
            )
        else:
            statement = loop if loop is not None and in_loop else source.statement(node)
            losses.steps.setdefault(function, []).append(Step(node, optimizer, statement))
            context.edits.replace(node, f"{context.scaler}.step({source.source(node.func.value)})")
            do = f"{context.scaler}.step(...) unscales, skips the step after an overflow, and is followed by update()"
            context.note(node, SAME, f"{optimizer}.step()", do)


def _is_list(context: Context, node: ast.expr) -> bool:
    """Whether ``node`` is a list of optimizers."""
    texts = {ast.unparse(each) for each in elements(node)}
    return bool(texts & context.optimizers)


def _has_backward(context: Context, function: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and is_backward(node.func) for node in context.source.inside(function))


def _updates(context: Context, losses: Losses, function: ast.AST, steps: list[Step]) -> None:
    """Insert ``scaler.update()`` after each group of steps without a backward pass in between."""
    backwards = [each.statement.lineno for each in losses.backwards.get(function, [])]
    group: list[Step] = []
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        group.append(step)
        between = following and any(step.call.lineno < line < following.call.lineno for line in backwards)
        if following and not between and _place(context, function, [*group, following]) is not None:
            continue
        statement = _place(context, function, group) or step.statement
        update = f"{context.scaler}.update()"
        if context.source.text[: context.source.span(statement)[0]].rpartition("\n")[2].strip():
            end = context.source.span(statement)[1]
            context.edits.replace_span(end, end, f"; {update}")
        else:
            context.edits.insert_after(statement, [update])
        group = []


def _place(context: Context, function: ast.AST, group: list[Step]) -> ast.stmt | None:
    """The statement after which a group of steps is complete; None if it may be left in between or without a step."""
    chains = [chain(context, step.statement, function) for step in group]
    common = next((i for i, (block, _) in enumerate(chains[-1]) if all(is_in(block, chain) for chain in chains)), None)
    if common is None:
        return None
    block = chains[-1][common][0]
    below = [chain[: next(i for i, (each, _) in enumerate(chain) if each is block)] for chain in chains]
    parents = [[context.source.parents[inner[0]] for inner, _ in chain] for chain in below]
    if any(isinstance(parent, LOOPS) for each in parents for parent in each):
        return None
    certain = any(all(isinstance(parent, (ast.With, ast.Try)) for parent in each) for each in parents)
    certain = certain or _are_arms(context, below)
    return chains[-1][common][1] if certain else None


def _are_arms(context: Context, below: list[Chain]) -> bool:
    """Whether the steps are in both arms of one if statement."""
    if any(len(chain) != 1 for chain in below):
        return False
    outer = {context.source.parents[chain[0][0][0]] for chain in below}
    arms = {id(chain[0][0]) for chain in below}
    return len(outer) == 1 and len(arms) == 2


def chain(context: Context, statement: ast.stmt, function: ast.AST) -> Chain:
    """The blocks around a statement inside ``function``, each with its statement, from the inside."""
    chain, node = [], statement
    while True:
        chain.append((context.source.block(node), node))
        above = context.source.parents[node]
        while isinstance(above, ast.ExceptHandler):
            above = context.source.parents[above]
        if above is function or not isinstance(above, ast.stmt):
            return chain
        node = above


def is_in(block: list[ast.stmt], chain: Chain) -> bool:
    return any(block is each for each, _ in chain)
