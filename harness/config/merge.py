"""Merge a YAML file, the files it extends and the overrides into one tree, and remember where each key was written.

OmegaConf parses, merges and interpolates.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.schema import MAX_VALUES, flatten, num_values
from harness.errors import ConfigError, first_line

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
COMMAND_LINE = "command line"
_EXAMPLE = "write key=value, for example train.epochs=3"


def merged(path: Path, overrides: Sequence[str], written_at: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """The tree of ``path`` with ``overrides``, interpolated, and {dotted key: "file:line"} of every key in it.

    Keys of overrides are on the command line, unless ``written_at`` has another place. Raises ConfigError for the first
    file or override that cannot be parsed.
    """
    tree, origins = _read(path, ())
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key or key.startswith("-"):
            raise ConfigError(f"{override!r} is not an override", where=COMMAND_LINE, hint=_EXAMPLE)
        origin = written_at.get(key, COMMAND_LINE)
        try:
            written = OmegaConf.from_dotlist([override])
            tree = OmegaConf.merge(tree, written)
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
            raise ConfigError(f"{override!r}: {first_line(error)}", where=origin, hint=_EXAMPLE) from None
        leaves = flatten(OmegaConf.to_container(written))  # type: ignore[arg-type]
        origins |= dict.fromkeys((key, *leaves), origin)
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True), origins
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError(f"{key}: {first_line(error)}", where=origin_of(key, origins, str(path))) from None


def parsed(path: Path) -> dict[str, Any]:
    """The tree of the file ``path`` alone, without what it extends and not interpolated. Raises ConfigError."""
    tree = OmegaConf.to_container(_parse(path)[0], resolve=False)
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def origin_of(key: str, origins: dict[str, str], default: str) -> str:
    """The place where ``key`` was written, or else the nearest section around it, or else a key inside it."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if found := origins.get(".".join(parts[:length])):
            return found
    return next((origin for inner, origin in origins.items() if inner.startswith(f"{key}.")), default)


def _read(path: Path, parents: tuple[Path, ...]) -> tuple[Any, dict[str, str]]:
    """The tree of ``path`` merged over what it extends, and the origins of its keys."""
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        raise ConfigError(f"extends is circular: {chain}", where=str(path), hint="remove one of the extends lines")
    tree, origins = _parse(path)
    if not OmegaConf.is_dict(tree):
        hint = "start it with a line such as name: digits"
        raise ConfigError("a configuration is a mapping of sections", where=str(path), hint=hint)
    bases = OmegaConf.to_container(tree).get("extends") or []  # type: ignore[union-attr]
    tree.pop("extends", None)
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"extends takes a file or a list of files, not {bases!r}",
            where=origins.get("extends", str(path)),
            hint="for example extends: base.yaml",
        )
    result: Any = OmegaConf.create({})
    all_origins: dict[str, str] = {}
    try:
        for base in bases:
            base_tree, base_origins = _read(path.parent / base, (*parents, path.resolve()))
            result, all_origins = OmegaConf.merge(result, base_tree), all_origins | base_origins
        return OmegaConf.merge(result, tree), all_origins | origins
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error), where=str(path)) from None


def _parse(path: Path) -> tuple[Any, dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
        if num_values(yaml.load(text, Loader=_Loader)) > MAX_VALUES:  # noqa: S506 - a safe loader
            message = f"invalid YAML: with each use of an alias counted, it has more than {MAX_VALUES} values"
            raise ConfigError(message, where=str(path), hint="use fewer aliases (*name)")
        return OmegaConf.create(text), _lines(text, path)
    except (OSError, UnicodeDecodeError) as error:
        files = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, files)
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = f"did you mean {path.parent / near[0]}?" if near else "name a YAML file, for example configs/digits.yaml"
        raise ConfigError(f"cannot read the configuration: {reason}", where=str(path), hint=hint) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"invalid YAML: {problem}", where=where) from None


def _lines(text: str, path: Path) -> dict[str, str]:
    """{dotted key: "file:line"} of every key in ``text``."""
    found: dict[str, str] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[f"{prefix}{key.value}"] = f"{path}:{key.start_mark.line + 1}"
                walk(value, f"{prefix}{key.value}.")

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return found
