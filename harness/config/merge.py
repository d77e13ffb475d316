"""Merge a YAML file, the files it extends and the overrides into one tree, and remember where each key was written.

OmegaConf parses, merges and interpolates.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from harness.config import presets
from harness.config.seals import require_intact
from harness.config.sentences import not_yaml
from harness.config.trees import flatten
from harness.errors import ConfigError, did_you_mean, first_line, require_regular_file, similar

_Fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEP = 10_000  # brackets; libyaml might overflow the stack
MAX_VALUES = 1_000_000  # in a YAML file, each use of an alias counted
COMMAND_LINE = "command line"
_REFERENCE = (
    "write ${task.root} for another setting, ${oc.env:NAME} for an environment variable, or \\${ for the characters ${"
)
_EXAMPLE = "write key=value, for example train.epochs=3"
_NAME = "give a YAML file; harness init writes one for your data"
_MAX_BYTES = 1 << 20  # a configuration has a few KB; larger files take minutes to parse


def merged(path: Path, overrides: Sequence[str], written_at: Mapping[str, str] | str) -> tuple[Any, dict[str, str]]:
    """Return the tree of ``path`` with ``overrides``, interpolated, and {dotted key: "file:line"} of every key in it.

    Keys of overrides are on the command line, unless ``written_at`` is, or has, another place. Raises ConfigError for
    the first file or override that cannot be parsed.
    """
    tree, origins = _read(path, ())
    for override in overrides:
        key = override.partition("=")[0]
        origin = written_at if isinstance(written_at, str) else written_at.get(key, COMMAND_LINE)
        tree, leaves = overridden(tree, override, origin)
        origins |= dict.fromkeys((key, *leaves), origin)
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True), origins
    except OmegaConfBaseException as error:
        keys = flatten(OmegaConf.to_container(tree))  # type: ignore[arg-type]
        raise _unresolved(error, keys, origins, str(path)) from None


def overridden(tree: Any, override: str, origin: str = COMMAND_LINE) -> tuple[Any, dict[str, Any]]:
    """Return ``tree`` with ``override`` ("key=value"), and what that sets, by dotted key. Raises ConfigError."""
    key, separator, value = override.partition("=")
    if not separator or not key or key.startswith("-"):
        raise ConfigError(f"{override!r} is not an override", where=origin, hint=_EXAMPLE)
    if key.startswith("+"):  # as in Hydra
        hint = f"type {shlex.quote(override.lstrip('+'))}"
        raise ConfigError(f'{override!r}: a key needs no "+" here, also a new one', where=origin, hint=hint)
    if value.isspace() or (value[:1] not in tuple("\"'[{") and re.search(r"(^|\s)#", value)):
        problem = "is blank" if value.isspace() else "has a #, which starts a comment in YAML"
        raise ConfigError(f"{override!r}: the value {problem}", where=origin, hint=f"quote it: '{key}=\"{value}\"'")
    try:
        written = OmegaConf.from_dotlist([override])
        leaves: dict[str, Any] = flatten(OmegaConf.to_container(written))  # type: ignore[arg-type]
        combined: Any = OmegaConf.merge(tree, written)
        if value.strip() == "{}":  # empties a section, to which merging would add nothing
            OmegaConf.update(combined, key, {}, merge=False)
        return combined, leaves
    except GrammarParseError as error:
        raise _unresolved(error, (), {}, origin) from None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{override!r}: {_reason(error)}", where=origin, hint=_EXAMPLE) from None


def typed(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as ``key=value`` words, which a command line reads as exactly these values."""
    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def spelled(value: Any) -> str:
    """Return ``value`` as it is typed after ``key=``, without quotes where none are needed."""
    quoted = json.dumps(value, ensure_ascii=False)
    for text in (value, quoted) if isinstance(value, str) else (quoted,):
        if _reads_as(text, value):
            return text
    return json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={text}"]))["a"]  # type: ignore[call-overload,index]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        return False
    return type(read) is type(value) and bool(read == value) and text == text.strip()


def parsed(path: Path) -> dict[str, Any]:
    """Return the tree of the file ``path`` alone, without what it extends and not interpolated. Raises ConfigError."""
    tree = OmegaConf.to_container(_parse(_text(path), path)[0], resolve=False)
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _reason(error: Exception) -> str:
    if any(words in str(error) for words in ("container types", "Cannot merge")):  # as OmegaConf 2.4 and 2.3 put it
        return "this is a section, {key: value}, and cannot be replaced by a list"
    return getattr(error, "problem", None) or first_line(error)


def _unresolved(
    error: OmegaConfBaseException, keys: Iterable[str], origins: dict[str, str], default: str
) -> ConfigError:
    """Return the error for a reference, ``${...}``, among the settings with the keys ``keys``, or for a value
    ``???``."""
    text, reason, key = str(error.child_node if error.value is None else error.value), first_line(error), error.full_key
    problem, hint = f"{text!r} cannot be resolved", _REFERENCE
    if isinstance(error, MissingMandatoryValue):
        problem, hint = "a value is missing: ??? stands for one", "replace ??? by the value"
    elif isinstance(error, InterpolationKeyError):
        missing_key = match.group(1) if (match := re.search("'([^']+)'", reason)) else text
        problem, nearest = f"{problem}: the configuration does not set {missing_key}", similar(missing_key, keys)
        hint = f"did you mean ${{{nearest}}}?" if nearest else "set it as well: a reference does not see default values"
    elif "oc.env:" in text and " variable " in reason:
        hint = "set the environment variable, or give a default: ${oc.env:NAME,DEFAULT}"
    elif "recurs" in reason.lower():
        problem, hint = f"{problem}: it refers to itself", "write the value"
    return ConfigError(f"{key}: {problem}", where=origin_of(str(key), origins, default), hint=hint)


def origin_of(key: str, origins: dict[str, str], default: str) -> str:
    """Return the place where ``key`` was written, or else the nearest section around it, or else a key inside it."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if nearest_origin := origins.get(".".join(parts[:length])):
            return nearest_origin
    return next((origin for inner, origin in origins.items() if inner.startswith(f"{key}.")), default)


def _read(path: Path, parents: tuple[Path, ...], named_at: str = "") -> tuple[Any, dict[str, str]]:
    """Return the tree of ``path``, which a file extends ``named_at``, merged over what it extends, and the origins of
    its keys."""
    text = _text(path, named_at)
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        raise ConfigError(f"extends is circular: {chain}", where=str(path), hint="remove one of the extends lines")
    tree, origins = _parse(text, path)
    if not OmegaConf.is_dict(tree):
        raise _no_sections(path)
    bases = OmegaConf.to_container(tree).get("extends", [])  # type: ignore[union-attr]
    tree.pop("extends", None)
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(
            f"extends takes a file or a list of files, not {bases!r}",
            where=origins.get("extends", str(path)),
            hint="for example extends: base.yaml, or extends: preset:modern",
        )
    result: Any = OmegaConf.create({})
    all_origins: dict[str, str] = {}
    try:
        position = origins.get("extends", str(path))  # a merged mapping may bring it, without a line
        for base in bases:
            file = _preset(base, position) or path.parent / base
            base_tree, base_origins = _read(file, (*parents, path.resolve()), f"{position}: extends: ")
            result, all_origins = OmegaConf.merge(result, base_tree), all_origins | base_origins
        return OmegaConf.merge(result, tree), all_origins | origins
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error), where=str(path)) from None


def _preset(name: str, where: str) -> Path | None:
    """Return the file of a preset, if ``name`` is preset:NAME. Raises ConfigError."""
    if not name.startswith(presets.PREFIX):
        return None
    preset = name.removeprefix(presets.PREFIX).strip()
    if preset not in (preset_names := presets.names()):
        nearest = similar(preset, preset_names)
        all_presets = f"use one of preset:{', preset:'.join(preset_names)}"
        hint = f"did you mean {presets.PREFIX}{nearest}?" if nearest else all_presets
        raise ConfigError(f"there is no preset {preset!r}", where=where, hint=hint)
    return presets.path(preset)


def _text(path: Path, named_at: str = "") -> str:
    """Return the content of ``path``. Raises ConfigError."""
    try:
        require_regular_file(path)
        if path.stat().st_size > _MAX_BYTES:
            message = f"this file is larger than {_MAX_BYTES >> 20} MiB, so it is not a configuration"
            raise ConfigError(message, where=str(path), hint=_NAME)
        text = path.read_text(encoding="utf-8-sig")
        require_intact(text)
    except UnicodeDecodeError:
        hint = "save it as UTF-8, if it is a configuration"
        raise ConfigError("this file is not UTF-8 text", where=str(path), hint=hint) from None
    except ValueError as error:
        hint = "restore the file; if you edited it, remove its last line"
        raise ConfigError(f"this configuration cannot be trusted: {error}", where=str(path), hint=hint) from None
    except OSError as error:
        hint = did_you_mean(path, lambda file: file.suffix in (".yaml", ".yml")) or _NAME
        where = f"{named_at}{path}"
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=where, hint=hint) from None
    return text


def _parse(text: str, path: Path) -> tuple[Any, dict[str, str]]:
    """Return the tree that ``text`` describes, not interpolated, and the places of its keys. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode | None):
            raise _no_sections(path)
        if _num_values(node, {}) > MAX_VALUES:
            message = f"invalid YAML: its aliases expand to more than {MAX_VALUES:,} values"
            raise ConfigError(message, where=str(path), hint="use fewer aliases (*name)")
        lines = _lines(node, path)
        return OmegaConf.create(text), lines
    except RecursionError:
        hint = "a configuration needs only a few levels; check for a missing ] or }"
        raise ConfigError("invalid YAML: nested too deeply", where=str(path), hint=hint) from None
    except GrammarParseError as error:
        raise _unresolved(error, (), lines, str(path)) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise not_yaml(error, text, path) from None


def load_yaml(text: str) -> Any:
    """Return the content of a YAML file that may be a stranger's. Raises YAMLError, RecursionError, or ValueError if
    its seal does not match or its aliases expand to more than MAX_VALUES."""
    require_intact(text)
    loader = (yaml.SafeLoader if text.count("[") + text.count("{") > _DEEP else _Fast)(text)
    try:
        node = loader.get_single_node()
        if _num_values(node, {}) > MAX_VALUES:
            raise ValueError("its aliases expand to too many values")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node | None, counts: dict[int, int]) -> int:
    """Return the number of values that ``node`` stands for. An aliased or merged part (``<<: *name``) counts each time,
    and at least MAX_VALUES if it contains itself: a few lines can describe more values than fit into memory."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = MAX_VALUES + 1  # until it is counted
        values = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        counts[id(node)] = 1 + sum(_num_values(value, counts) for value in values)
    return counts[id(node)]


def _no_sections(path: Path) -> ConfigError:
    return ConfigError("this is not a configuration: it does not consist of lines such as name: digits",
                       where=str(path), hint=_NAME)  # fmt: skip


def _lines(root: yaml.Node | None, path: Path) -> dict[str, str]:
    """Return {dotted key: "file:line"} of every key under ``root``."""
    lines: dict[str, str] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[f"{prefix}{key.value}"] = f"{path}:{key.start_mark.line + 1}"
                walk(value, f"{prefix}{key.value}.")

    walk(root, "")
    return lines
