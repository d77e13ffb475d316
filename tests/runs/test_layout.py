"""One owner for the run folder: file names, atomic replacement and URLs are each handled in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from harness.runs import layout
from tests.syntax_trees import package, trees

# File names of a run folder. Those with a dot are recognised anywhere, the plain words only as a part of a path.
NAMES = {value for name, value in vars(layout).items() if re.fullmatch("[A-Z]+", name) and "*" not in value}
FILE_NAMES = {name for name in NAMES if "." in name}
FOLDER_NAMES = NAMES - FILE_NAMES


def run_folder_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each name of the run folder in a string of ``tree``. Docstrings and messages (strings of one line
    with a space) may mention them."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    docs |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # below a field
    joined = {
        id(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for side in (node.left, node.right)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docs:
            continue
        text = node.value
        if " " in text.strip() and "\n" not in text.strip():
            continue
        parts = set(re.split(r"[\s/\"'$]+", text))
        found = {part for part in parts if re.fullmatch(r"(step|rank)-(\*.*)?|.*\.exit\.json", part)}
        found |= parts & FILE_NAMES
        found |= parts & FOLDER_NAMES if id(node) in joined or "/" in text else set()
        yield from ((node.lineno, name) for name in found)


def test_the_search_finds_names_and_leaves_prose_alone():
    code = """'config.yaml of a run'
a = folder / "latest"
b = f"{folder}/checkpoints/step-{n}"
c = ["failure.json", "latest", "see metrics.jsonl there"]
d = '''cd x
cat "$run/summary.json"'''
"""
    assert sorted(run_folder_names(ast.parse(code))) == [
        (2, "latest"), (3, "checkpoints"), (3, "step-"), (4, "failure.json"), (5, "summary.json"),
    ]  # fmt: skip


def test_run_folder_names_are_spelled_in_one_module():
    wrong = [
        f"harness/{name}:{line}: {spelled!r} belongs to harness/runs/layout.py"
        for name, tree in trees().items()
        if name != "runs.layout" and package(name) != "apex"
        for line, spelled in run_folder_names(tree)
    ]
    assert wrong == []


def test_files_are_replaced_in_one_module():
    """Files that must be complete or absent are written by ``harness.runs.files``."""
    allowed = {
        "audit.folders",  # moves the folders of a start aside
        "audit.hook.resume_recorder",  # runs in scripts that do not have the harness
        "runs.files",
        "runs.run_dir",  # moves an earlier run aside
        "runs.weights_file",  # names the file that safetensors has written
        "trackers.metrics_log",  # moves a file aside that replaced the log
    }
    renaming = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (node.func.attr in ("rename", "replace", "renames") and getattr(node.func.value, "id", "") == "os")
        or (node.func.attr in ("rename", "replace") and len(node.args) == 1)
        or (node.func.attr == "move" and getattr(node.func.value, "id", "") == "shutil")
        if not isinstance(node.func.value, ast.Constant)
    }
    assert renaming <= allowed


def test_urls_are_recognised_in_one_module():
    asking = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and node.left.value == "://"
    }
    assert asking == {"config.places"}
