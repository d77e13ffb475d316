"""The modules of ``harness`` as syntax trees, for tests of the structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT


def modules() -> dict[str, Path]:
    """{"data.loader": path, ...}; a package has the name of its folder."""
    found = {}
    for path in sorted((ROOT / "harness").rglob("*.py")):
        parts = path.relative_to(ROOT / "harness").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def trees() -> dict[str, ast.Module]:
    """{name: syntax tree} of MODULES."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


@cache
def imported(name: str, for_types: bool = True) -> tuple[str, ...]:
    """The harness modules that ``name`` imports anywhere, also late or by a string.

    Without ``for_types``, imports under TYPE_CHECKING are left out.
    """
    return tuple(_imported(name, for_types))


def _imported(name: str, for_types: bool) -> Iterator[str]:
    def known(dotted: str) -> str:
        while dotted not in MODULES:
            dotted = dotted.rpartition(".")[0]
        return dotted

    nodes = list(ast.walk(trees()[name]))
    skipped = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and not for_types and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in (node for node in nodes if id(node) not in skipped):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import in line {node.lineno}"
            if (node.module or "").split(".")[0] == "harness":
                yield from (known(f"{node.module}.{alias.name}".partition(".")[2]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (known(a.name.partition(".")[2]) for a in node.names if a.name.split(".")[0] == "harness")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            text = "".join(part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            if text.startswith("harness."):
                yield known(text.partition(".")[2].rstrip("."))


def package(name: str) -> str:
    """The package of a module as docs/architecture.md names it: "data", or "tools.report"."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "tools" else 1])


def calls(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, what it is called on) of every call in ``node``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            yield call.func.attr, ast.unparse(call.func.value)
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            yield call.func.id, ""
