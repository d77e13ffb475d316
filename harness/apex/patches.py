"""Attributes of other people's modules and classes that ``install`` and ``--device cpu`` replace, and undoing that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes, with their original values."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` until ``undo``."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if before is not _MISSING:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)  # it was inherited or absent

        self._undo.append(restore)

    def set_item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set ``mapping[key]``, which must be a new key, until ``undo``."""
        mapping[key] = value
        self._undo.append(lambda: mapping.pop(key, None))

    def on_undo(self, restore: Callable[[], Any]) -> None:
        """Have ``undo`` call ``restore``."""
        self._undo.append(restore)

    def undo(self) -> None:
        """Restore everything, in reverse order."""
        while self._undo:
            self._undo.pop()()


patches = Patches()
