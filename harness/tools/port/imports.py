"""The import statements of Apex: removed or replaced, and the ``try`` around them undone."""

from __future__ import annotations

import ast

from harness.tools.port import snippets
from harness.tools.port.context import BY_HAND, SAME, Context
from harness.tools.port.names import Imported
from harness.tools.port.parts import REPLACED_IMPORTS, advice


def rewrite(context: Context) -> None:
    """Port the imports whose names are all ported; keep the others, with a comment."""
    _compared_with_none(context)
    left: set[str] = set()
    for node, path in context.names.references():
        if node not in context.done:
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            left.add(root.id)  # type: ignore[attr-defined]
            context.by_hand(node, ast.unparse(node), advice(path).replace("scaler.", f"{context.scaler}."))
    statements: dict[ast.stmt, list[Imported]] = {}
    for each in context.names.imports:
        statements.setdefault(each.statement, []).append(each)
    kept = set()
    for statement, imported in statements.items():
        names = {each.local for each in imported} | ({*context.names.bound} if imported[0].local == "*" else set())
        if names & left and imported[0].local != "*":
            kept.add(statement)
            context.note(statement, BY_HAND, ast.unparse(statement), "kept, because only part of it is ported")
        else:
            context.note(statement, SAME, ast.unparse(statement), _new_imports(imported) or "removed")
    _undo_tries(context, statements, kept)
    for statement, imported in statements.items():
        if statement not in kept:
            new = _new_imports(imported)
            context.edits.replace_statement(statement, new.split("\n") if new else [])


def _compared_with_none(context: Context) -> None:
    """``amp is not None`` is true now; ``amp = None`` in a handler of ImportError goes with the handler."""
    for node, _ in context.names.references():
        above = context.source.parents[node]
        in_handler = any(isinstance(each, ast.ExceptHandler) for each in context.source.above(node))
        if isinstance(getattr(node, "ctx", None), ast.Store) and in_handler:
            context.done.add(node)
        if node in context.done or not isinstance(above, ast.Compare) or above.left is not node:
            continue
        is_none = isinstance(above.comparators[0], ast.Constant) and above.comparators[0].value is None
        if is_none and len(above.ops) == 1 and isinstance(above.ops[0], (ast.Is, ast.IsNot)):
            context.edits.replace(above, str(isinstance(above.ops[0], ast.IsNot)))
            context.note(above, SAME, ast.unparse(above), "now constant, because the import is no longer optional")
            context.done.add(node)


def _new_imports(imported: list[Imported]) -> str:
    """The statements that replace an import, one a line."""
    found: dict[str, list[str]] = {}
    for each in imported:
        if (new := REPLACED_IMPORTS.get(each.path)) is not None and isinstance(each.statement, ast.ImportFrom):
            module, _, name = new.rpartition(".")
            found.setdefault(module, []).append(name if name == each.local else f"{name} as {each.local}")
    return "\n".join(f"from {module} import {', '.join(names)}" for module, names in sorted(found.items()))


def _undo_tries(context: Context, statements: dict[ast.stmt, list[Imported]], kept: set[ast.stmt]) -> None:
    """Replace ``try: import ... except ImportError: ...`` by what is left of its body."""
    source = context.source
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Try) or node.finalbody or not any(each in statements for each in node.body):
            continue
        body = [each for each in node.body if not (each in statements and not _new_imports(statements[each]))]
        # Other imports in it may be optional, too.
        simple = all(each in statements or isinstance(each, (ast.Assign, ast.Expr)) for each in node.body)
        if (
            any(each in kept for each in node.body)
            or not simple
            or not all(_is_plain(each, node) for each in node.handlers)
        ):
            continue
        if body and node.body[0].lineno == node.lineno:
            continue
        if not body and not node.orelse:
            context.edits.replace_statement(node, [])
            continue
        first_handler, last = node.handlers[0].lineno, node.end_lineno or 0
        context.edits.remove_lines(node.lineno, node.lineno)
        context.edits.unwrap(node.body, node.lineno + 1, first_handler - 1, source.indent(node))
        rest = node.orelse[0].lineno if node.orelse else last + 1
        context.edits.remove_lines(first_handler, rest - 1)
        if node.orelse:
            context.edits.unwrap(node.orelse, rest, last, source.indent(node))


def _is_plain(handler: ast.ExceptHandler, node: ast.Try) -> bool:
    """Whether a handler of ``node`` only complains, sets a flag, or imports the same names from elsewhere."""
    caught = ast.unparse(handler.type) if handler.type else "Exception"
    known = {"ImportError", "ModuleNotFoundError", "Exception"}
    plain = all(
        isinstance(each, (ast.Raise, ast.Expr, ast.Assign, ast.Pass)) or _binds(each) <= _binds(*node.body)
        for each in handler.body
    )
    return plain and bool(known & set(caught.strip("()").replace(" ", "").split(",")))


def _binds(*statements: ast.stmt) -> set[str]:
    """The names that import statements bind; for another statement, one that no import binds."""
    found: set[str] = set()
    for each in statements:
        kinds = (ast.Import, ast.ImportFrom)
        found |= {alias.asname or alias.name for alias in each.names} if isinstance(each, kinds) else {"="}
    return found


def insert(context: Context) -> None:
    """Insert the imports and snippets that the edited script needs."""
    source, names = context.source, context.names
    body = source.tree.body
    start = 0
    for index, node in enumerate(body):
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_future or is_docstring:
            start = index + 1
    needed = context.imports | ({"torch"} if context.autocast or context.snippets else set())
    missing = [f"import {name}" for name in sorted(needed) if name not in names.modules]
    first = next((node for node in body[start:] if isinstance(node, (ast.Import, ast.ImportFrom))), body[start])
    if missing:
        context.edits.insert_before(first, missing)
    lines = snippets.lines(context.snippets, context.scaler, source.unit)
    if lines:
        last = first
        for node in body[start:]:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) or _uses_scaler(context, node):
                break
            if isinstance(node, (ast.Import, ast.ImportFrom)) or _has_import(node):
                last = node
        end = last.end_lineno or 0
        if not lines[-1] and not "".join(source.lines[end : end + 2]).strip():
            lines.pop()
        context.edits.insert_after(last, lines, is_first=True)


def _uses_scaler(context: Context, node: ast.stmt) -> bool:
    """Whether a statement of the module may use the scaler or autocast once it is ported."""
    inner = list(ast.walk(node))
    of_apex = any(context.names.path(each) for each in inner if isinstance(each, (ast.Name, ast.Attribute)))
    return of_apex or any(isinstance(each, ast.Call) and ast.unparse(each.func) in context.models for each in inner)


def _has_import(node: ast.AST) -> bool:
    kinds = (ast.Import, ast.ImportFrom)
    return isinstance(node, (ast.Try, ast.If)) and any(isinstance(each, kinds) for each in ast.walk(node))
