"""Where an error was raised."""

from __future__ import annotations

from typing import Any

from harness.distributed import stack

TORCH = """
def step():
    raise ValueError
"""
HARNESS = """
def step(inner):
    try:
        inner()
    except ValueError as error:
        caught = error
    return raised_at(caught)
"""


def load(file: str, text: str, **names: Any) -> Any:
    exec(compile(text, file, "exec"), names)
    return names["step"]


def test_place_is_the_line_that_raised_also_in_the_function_that_caught_it():
    """And the function that it called is named, also if it has the same name."""
    inner = load("/site-packages/torch/optim/adam.py", TORCH)
    outer = load(f"{stack._PACKAGE}training/loop.py", HARNESS, raised_at=stack.raised_at)
    assert outer(inner) == "step (harness/training/loop.py:4) calling step"


def test_function_of_the_harness_that_raised_calls_nothing():
    inner = load(f"{stack._PACKAGE}training/objective.py", TORCH)
    outer = load(f"{stack._PACKAGE}training/loop.py", HARNESS, raised_at=stack.raised_at)
    assert outer(inner) == "step (harness/training/objective.py:3)"
