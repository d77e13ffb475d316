"""Every point of the contract has a test, and every test that names a point names one that exists."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.apex.contract import POINTS


@functools.cache
def named_points() -> dict[str, list[str]]:
    """{point: [file:line, ...]} of every ``contract(...)`` mark of this folder and test_docs.py, from their trees."""
    found: dict[str, list[str]] = {}
    here = Path(__file__).parent
    for path in (*sorted(here.rglob("test_*.py")), here.with_name("test_docs.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.contract":
                for argument in node.args:
                    found.setdefault(ast.literal_eval(argument), []).append(f"{path.name}:{node.lineno}")
    return found


def test_marks_name_points_that_exist():
    unknown = {point: places for point, places in named_points().items() if point not in POINTS}
    assert not unknown


def test_every_point_has_a_test():
    assert not sorted(set(POINTS) - set(named_points()))
