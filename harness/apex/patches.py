"""Attributes of other people's modules and classes that ``install`` and the runner replace, and undoing that."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

Replacement = tuple[Any, str, Any]  # owner, attribute, new value

_MISSING = object()


class Patches(ExitStack):
    """Replaced attributes, with their original values, which ``close`` restores, in reverse order."""

    def set(self, owner: Any, name: str, value: Any, *, yields: bool = False) -> None:
        """Set ``owner.name`` until ``close``. ``yields``: if other code has set it since, ``close`` leaves it."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if yields and vars(owner).get(name) is not value:
                return
            if before is not _MISSING:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)  # it was inherited or absent

        self.callback(restore)

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Set ``owner.name``, a function of torch or of another library, to ``function`` until ``close``."""
        if is_imported("torch"):
            builtins = sys.modules["torch.jit._builtins"]
            original = vars(owner).get(name)
            operation = builtins._find_builtin(original)
            if operation is not None:  # torch.jit.script looks functions up by identity in this table
                self.set_item(builtins._get_builtin_table(), id(function), operation)
            elif isinstance(original, FunctionType) and isinstance(function, FunctionType):
                # it compiles the source of other functions, and takes the original if it finds these attributes
                vars(function).update({"__script_if_tracing_wrapper": True, "__original_fn": original})
        self.set(owner, name, function)

    def set_item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set ``mapping[key]``, which must be a new key, until ``close``."""
        mapping[key] = value
        self.callback(mapping.pop, key, None)


def around(original: Any, replacement: Callable[..., Any]) -> Any:
    """Return a function in place of ``original`` that calls ``replacement(original, *args, **kwargs)``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return wrapper


def is_imported(name: str) -> bool:
    """Return True if module ``name`` has been imported completely."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


patches = Patches()
