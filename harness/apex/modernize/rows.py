"""The two kinds of rows of ``table``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

OURS = "harness.apex.modernize"


@dataclass(frozen=True)
class Names:
    """Names that a module, or a class of it, has lost.

    ``owner`` is ``module`` or ``module:Class``, and ``since`` the first release without the names. ``mapping`` holds
    ``old`` or ``old=new`` for each: ``new`` is an attribute of the module or class ``source`` (by default the owner),
    or a path for ``pkgutil.resolve_name``. A mapping of ``*`` stands for all names of ``source``.
    """

    owner: str
    since: str
    mapping: str
    source: str = ""

    @cached_property
    def names(self) -> dict[str, str]:
        return {old: new or old for old, _, new in (each.partition("=") for each in self.mapping.split())}

    def target(self, name: str) -> str | None:
        """The path of what ``name`` means, for ``pkgutil.resolve_name``; None if the row does not have the name."""
        new = self.names.get(name, name if "*" in self.names and not name.startswith("__") else None)
        if new is None or "." in new or ":" in new:
            return new
        source = self.source or self.owner
        return f"{source}.{new}" if ":" in source else f"{source}:{new}"


@dataclass(frozen=True)
class Call:
    """A function or method that no longer accepts what it used to accept.

    ``wrap(original, used)`` returns the replacement, which calls ``used`` whenever it bridges something. ``label`` is
    listed at the end of the run. ``symptom`` is a regular expression for the text of the error that scripts fail with;
    it is empty if other errors have the same text.
    """

    owner: str
    name: str
    since: str
    label: str
    symptom: str
    wrap: Callable[[Any, Callable[[], None]], Any]
