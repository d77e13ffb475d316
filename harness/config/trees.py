"""Nested dictionaries, such as a configuration, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all leaves of a nested dictionary; an empty dictionary is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the ``leaves`` of ``tree`` by key. Where keys contain dots, one leaf may hide another."""
    return dict(leaves(tree))


def has(tree: Any, key: str) -> bool:
    """Return True if ``tree`` has the dotted ``key``, in which numbers are places in lists."""
    for part in key.split("."):
        tree = {str(index): item for index, item in enumerate(tree)} if isinstance(tree, list) else tree
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (before, now)} of the leaves that differ. A section without settings is as none: filling it changes
    what is in it."""
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and before.get(key, {}) != now.get(key, {})
    }
