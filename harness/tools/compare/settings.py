"""Differences between the settings of two runs: configuration, code, packages, and the ranks they ran on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from harness.config.schema import Config, flatten, recipe_difference
from harness.runs import layout
from harness.runs.reader import Record, changes, over_starts
from harness.tools.report.reproduce import machine
from harness.tools.report.run_set import LENGTH

Pair = tuple[Any, Any]
Differences = dict[str, Pair]

_TOPOLOGY = ("world_size", "ranks", "launched_by", "threads", "amp")


@dataclass(frozen=True)
class Code:
    """Git commits of the starts of each run, in order; None outside a repository. ``changed``: a start had uncommitted
    changes. ``same`` is None if that leaves the question open."""

    commits: tuple[list[str | None], list[str | None]]
    changed: tuple[bool, bool]
    same: bool | None


@dataclass(frozen=True)
class SettingsComparison:
    """Only the differences, {dotted key: (one, other)}; None if a run does not record them (``missing``: why)."""

    recipe: Differences | None
    other: Differences | None
    code: Code | None
    packages: Differences | None
    topology: Differences | None
    missing: list[str]


def compare(one: Record, other: Record) -> SettingsComparison:
    recipe, rest = config_differences(one, other) if one.config and other.config else (None, None)
    missing = [
        f"{label} has no {name} that can be read"
        for label, record in (("A", one), ("B", other))
        for name, content in ((layout.CONFIG, record.config), (layout.PROVENANCE, record.provenance))
        if not content
    ]
    if not (one.provenance and other.provenance):
        return SettingsComparison(recipe, rest, None, None, None, missing)
    starts = one.provenance, other.provenance
    packages = _differences(*map(_packages, starts))
    topology = _differences(*map(_topology, starts))
    return SettingsComparison(recipe, rest, _code(*starts), packages, topology, missing)


def config_differences(one: Record, other: Record) -> tuple[Differences, Differences]:
    """(differences that change what is trained, and its length; differences that do not)."""
    trees = with_defaults(one.config), with_defaults(other.config)
    rest = _differences(*(flatten(tree) | _lengths(run) for tree, run in zip(trees, (one, other), strict=True)))
    recipe = recipe_difference(*trees) | {key: rest[key] for key in LENGTH if key in rest}
    return recipe, {key: pair for key, pair in rest.items() if key not in recipe}


def _lengths(run: Record) -> dict[str, str]:
    """{key: "8 until step 120, then 12"} of the settings of the length that changed at a resume."""
    found = {}
    for key, values in run.lengths.items():
        shown = ["null" if value is None else str(value) for _, value in values]
        ends = [f" until step {step}, then " for step, _ in values[1:]]
        if ends:
            found[key] = "".join(f"{value}{end}" for value, end in zip(shown, [*ends, ""], strict=True))
    return found


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration with settings that an older version lacked at their defaults, except task options."""
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


def _topology(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shown = [{**start, "ranks": machine(start)} for start in starts]
    return {key: over_starts(start.get(key) for start in shown) for key in _TOPOLOGY}


def _packages(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    flat = [
        {**(start.get("packages") or {}), **{key: start.get(key) for key in ("python", "cuda")}} for start in starts
    ]
    names = dict.fromkeys(name for start in flat for name in start)
    return {name: over_starts(start.get(name) for start in flat) for name in names}


def _code(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Code:
    git = [[start.get("git") or {} for start in starts] for starts in (one, other)]
    commits = [changes(start.get("commit") for start in starts) for starts in git]
    changed = [any(bool(start.get("changed")) for start in starts) for starts in git]
    equal = commits[0] == commits[1]
    undecided = equal and (any(changed) or None in commits[0])
    return Code((commits[0], commits[1]), (changed[0], changed[1]), None if undecided else equal)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Differences:
    return {key: (one.get(key), other.get(key)) for key in sorted({*one, *other}) if one.get(key) != other.get(key)}
