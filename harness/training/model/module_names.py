"""Names of modules and parameters, and the patterns for them in model.freeze, model.lora, optimizer.groups and
model.activation_checkpointing."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection

from harness.errors import ConfigError, similar

LORA = ".lora_"  # in the names of LoRA's matrices, after that of the layer
_SHOWN = 12  # names in a hint


def matching(pattern: str, names: Collection[str], where: str, kind: str) -> list[str]:
    """Return those of ``names`` that ``pattern`` matches: the whole name or, if there is none, the end or a glob of the
    name, of it or of a module that it is in. Raises ConfigError for the setting ``where`` if no ``kind`` matches."""
    exact = [name for name in names if is_within(name, [pattern])]
    matches = exact or [name for name in names if _matches(pattern, name)]
    if not matches:
        parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
        nearest = similar(pattern, [*names, *parts])
        patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
        some = ", ".join([*patterns[:_SHOWN], *["..."] * (len(patterns) > _SHOWN)])
        hint = f"did you mean {nearest}?" if nearest else f"the model has {some}"
        raise ConfigError(f"no {kind} matches {pattern!r}", where=where, hint=hint)
    return matches


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return True if ``name`` is one of ``modules`` or in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _matches(pattern: str, name: str) -> bool:
    wholes = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(f".{whole}".endswith(f".{pattern}") or fnmatch.fnmatchcase(whole, pattern) for whole in wholes)
