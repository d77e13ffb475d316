"""Dotted keys of nested dictionaries."""

from __future__ import annotations

from harness.config.trees import flatten, has, leaves


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}, "d": [1]}, "e": {}, "f": None}) == {"a.b.c": 1, "a.d": [1], "e": {}, "f": None}


def test_no_leaf_hides_another_with_a_dot_in_its_key():
    assert [*leaves({"a": {"b": 1}, "a.b": 2})] == [("a.b", 1), ("a.b", 2)]


def test_has_counts_places_in_lists():
    tree = {"a": [{"b": None}, 1]}
    found = [key for key in ("a", "a.0.b", "a.1", "a.2", "a.1.b", "b") if has(tree, key)]
    assert found == ["a", "a.0.b", "a.1"]
