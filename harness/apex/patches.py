"""What ``install`` and ``--device cpu`` replace in other people's modules and classes, so that all of it can be undone.

Not here: what is replaced, and by what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Attributes that were set on modules and classes, with what they were before."""

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
                delattr(owner, name)  # it was inherited, or not there

        self._undo.append(restore)

    def set_item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set ``mapping[key]``, which must be new, until ``undo``."""
        mapping[key] = value
        self._undo.append(lambda: mapping.pop(key, None))

    def on_undo(self, restore: Callable[[], Any]) -> None:
        """Have ``restore`` called by ``undo``."""
        self._undo.append(restore)

    def undo(self) -> None:
        """Leave everything as it was, in reverse order."""
        while self._undo:
            self._undo.pop()()


patches = Patches()
