"""Porting to ``harness.apex``: the imports, and nothing else, because everything else means the same there."""

from __future__ import annotations

import ast
from pathlib import Path

import harness
from harness.tools.port.context import SAME, Context
from harness.tools.port.names import Imported

_ROOT = Path(harness.__file__).parent / "apex"
_PORTABLE = "; `python -m harness.apex SCRIPT` names a replacement"


def rewrite(context: Context) -> None:
    statements: dict[ast.stmt, list[Imported]] = {}
    for each in context.names.imports:
        statements.setdefault(each.statement, []).append(each)
    for statement, imported in statements.items():
        absent = [each.path for each in imported if not _exists(each)]
        if absent:
            context.by_hand(statement, f"{absent[0]} does not exist in harness.apex", f"see docs/apex.md{_PORTABLE}")
            continue
        new = _from(statement, imported) if isinstance(statement, ast.ImportFrom) else _import(statement)
        if context.source.is_alone(statement):
            _replace_keeping_comment(context, statement, new)
        else:
            context.edits.replace(statement, "; ".join(new))
        context.note(statement, SAME, ast.unparse(statement), "; ".join(new))


def _replace_keeping_comment(context: Context, statement: ast.stmt, new: list[str]) -> None:
    context.edits.replace(statement, f"{context.source.newline}{context.source.indent(statement)}".join(new))


def _exists(imported: Imported) -> bool:
    """Return True if harness.apex has the module of an import."""
    is_from = isinstance(imported.statement, ast.ImportFrom)
    path = _module(imported.path.rpartition(".")[0] if is_from and imported.local != "*" else _full(imported))
    place = _ROOT.joinpath(*path.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file() or path == "apex"


def _full(imported: Imported) -> str:
    return imported.alias.name if isinstance(imported.statement, ast.Import) else imported.path


def _module(path: str) -> str:
    """``apex.amp_C`` for the extension ``amp_C``."""
    return path if path.split(".")[0] == "apex" else f"apex.{path}"


def _from(statement: ast.ImportFrom, imported: list[Imported]) -> list[str]:
    modules: dict[str, list[str]] = {}
    for each in imported:
        path = each.path if each.local == "*" else each.path.rpartition(".")[0]
        modules.setdefault(f"harness.{_module(path)}", []).append(ast.unparse(each.alias))
    return [f"from {module} import {', '.join(names)}" for module, names in modules.items()]


def _import(statement: ast.stmt) -> list[str]:
    lines = []
    for alias in statement.names:  # type: ignore[attr-defined]
        module = _module(alias.name)
        if alias.asname:
            lines.append(f"import harness.{module} as {alias.asname}")
        elif module == alias.name:
            lines += ["from harness import apex", *([f"import harness.{module}"] if "." in module else [])]
        else:
            lines.append(f"from harness.apex import {alias.name}")
    return lines
