"""What two runs were told: configuration, code, packages, and the ranks they ran on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from harness.config.schema import Config, flatten, recipe_difference
from harness.runs import layout
from harness.runs.reader import Record

Pair = tuple[Any, Any]
Differences = dict[str, Pair]

_TOPOLOGY = ("world_size", "ranks", "launched_by", "amp")


@dataclass(frozen=True)
class Code:
    """Git commits of a run's starts, in their order; None outside a repository. ``changed``: at one of them files
    differed from the commit. ``same`` is None where that leaves it open."""

    commits: tuple[list[str | None], list[str | None]]
    changed: tuple[bool, bool]
    same: bool | None


@dataclass(frozen=True)
class Settings:
    """Only what differs: {dotted key: (one, other)}. None where a run does not say (``unsaid``: why)."""

    recipe: Differences | None
    other: Differences | None
    code: Code | None
    packages: Differences | None
    topology: Differences | None
    unsaid: list[str]


def compare(one: Record, other: Record) -> Settings:
    recipe, rest = config_differences(one, other) if one.config and other.config else (None, None)
    told = [record.provenance for record in (one, other)]
    unsaid = [
        f"{label} has no {name} that can be read"
        for label, record in (("A", one), ("B", other))
        for name, content in ((layout.CONFIG, record.config), (layout.PROVENANCE, record.provenance))
        if not content
    ]
    known = all(told)
    return Settings(
        recipe,
        rest,
        _code(*told) if known else None,
        _between(*(_packages(starts) for starts in told)) if known else None,
        _between(*({key: over_starts(starts, key) for key in _TOPOLOGY} for starts in told)) if known else None,
        unsaid,
    )


def config_differences(one: Record, other: Record) -> tuple[Differences, Differences]:
    """(settings that change what is trained, those that do not)."""
    trees = with_defaults(one.config), with_defaults(other.config)
    recipe = recipe_difference(*trees)
    rest = _between(*map(flatten, trees))
    return recipe, {key: pair for key, pair in rest.items() if key not in recipe}


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration with what its version did not have yet at its default. A task's options stay."""
    whole = dict(tree)
    for name, field in Config.model_fields.items():
        if isinstance(field.default, BaseModel):
            section = whole.get(name)
            defaults = _as_yaml(field.default.model_dump(by_alias=True))
            whole[name] = {**defaults, **section} if isinstance(section, dict) else defaults
        elif not field.is_required():
            whole.setdefault(name, _as_yaml(field.default))
    return whole


def _as_yaml(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_yaml(item) for key, item in value.items()}
    return [_as_yaml(item) for item in value] if isinstance(value, list | tuple) else value


def over_starts(starts: Sequence[dict[str, Any]], key: str) -> Any:
    """What a run says of ``key``; a run that was resumed elsewhere says several things, as ``first, then second``."""
    values = _changes(start.get(key) for start in starts)
    return values[0] if len(values) == 1 else ", then ".join(map(str, values))


def _changes(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not found or found[-1] != value:
            found.append(value)
    return found


def _packages(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    flat = [
        {**(start.get("packages") or {}), **{key: start.get(key) for key in ("python", "cuda")}} for start in starts
    ]
    return {name: over_starts(flat, name) for name in dict.fromkeys(name for start in flat for name in start)}


def _code(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Code:
    git = [[start.get("git") or {} for start in starts] for starts in (one, other)]
    commits = [_changes(start.get("commit") for start in starts) for starts in git]
    changed = [any(bool(start.get("changed")) for start in starts) for starts in git]
    equal = commits[0] == commits[1]
    open_question = equal and (any(changed) or None in commits[0])
    return Code((commits[0], commits[1]), (changed[0], changed[1]), None if open_question else equal)


def _between(one: dict[str, Any], other: dict[str, Any]) -> Differences:
    return {key: (one.get(key), other.get(key)) for key in sorted({*one, *other}) if one.get(key) != other.get(key)}
