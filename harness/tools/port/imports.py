"""The imports of a script, rewritten to ``harness.apex``. Nothing else: everything else means the same there."""

from __future__ import annotations

import ast
import difflib
import re

from harness.tools.port.uses import ApexScript, Import, Imported


def patch(script: ApexScript) -> str:
    """Return the rewritten imports as a unified diff; empty if the script stays as it is."""
    name = script.path.as_posix()
    texts = (script.mark + text for text in (script.text, rewritten(script)))
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts)  # the lines that ``patch`` sees
    lines = difflib.unified_diff(before, after, name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def rewritten(script: ApexScript) -> str:
    """Return the text of ``script`` with its imports of Apex rewritten. A statement that imports a name which
    harness.apex does not have stays as it is."""
    lines = [line.encode() for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", script.text)]
    statements: dict[Import, list[Imported]] = {}
    for imported in script.imports:
        statements.setdefault(imported.statement, []).append(imported)
    for statement in sorted(statements, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if all(imported.is_known for imported in statements[statement]):
            _replace(lines, statement, "; ".join(_new(statement, statements[statement])))
    return b"".join(lines).decode()


def _replace(lines: list[bytes], statement: ast.stmt, new: str) -> None:
    """Write ``new`` for ``statement``, whose columns are bytes of UTF-8."""
    first, last = statement.lineno - 1, (statement.end_lineno or 0) - 1
    head, tail = lines[first][: statement.col_offset], lines[last][statement.end_col_offset :]
    lines[first : last + 1] = [head + new.encode() + tail, *[b""] * (last - first)]


def _new(statement: Import, imported: list[Imported]) -> list[str]:
    """Return the statements that import from harness.apex what ``statement`` imports from Apex."""
    if isinstance(statement, ast.ImportFrom):
        modules: dict[str, list[str]] = {}
        for one_import in imported:
            module = one_import.path if one_import.alias.name == "*" else one_import.path.rpartition(".")[0]
            modules.setdefault(module, []).append(ast.unparse(one_import.alias))
        return [f"from harness.{module} import {', '.join(names)}" for module, names in modules.items()]
    ours = {id(one_import.alias): one_import.path for one_import in imported}
    lines = []
    for alias in statement.names:
        path = ours.get(id(alias))
        if path is None:  # another module in the same statement
            lines.append(f"import {ast.unparse(alias)}")
        elif alias.asname:
            lines.append(f"import harness.{path} as {alias.asname}")
        elif alias.name.partition(".")[0] == "apex":
            lines += ["from harness import apex", *([f"import harness.{path}"] if "." in path else [])]
        else:
            lines.append(f"from harness.apex import {alias.name}")
    return lines
