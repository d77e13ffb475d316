"""The errors of PyYAML and pydantic as sentences: the place or key, what was found, what is allowed, and the nearest
spelling.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.config import hugging_face_names
from harness.errors import ConfigError, first_line

Problem = tuple[str, str]  # dotted key, sentence
_RENAMED = {
    "tuple_type": "it should be a list",
    "list_type": "it should be a list",
    "string_type": "it should be text; put it in quotes if necessary",
    "invalid_key": "keys must be text; put this key in quotes",
}
_COLON = "write key: value, or key: before the settings of a section"
_INDENT = "indent the settings of a section, or the items of a list, alike, here and on the lines above"
_KEY = re.compile(r":(?=\s|$)")
_CLOSING = {"{": "}", "[": "]"}


def not_yaml(error: Exception, text: str, path: Path) -> ConfigError:
    """Return the error for a file that is not YAML, at the wrong line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
    line, hint, bare_problem = mark.line + 1 if mark else None, "", problem
    opened = getattr(error, "context_mark", None)
    if opened is not None and "expected ',' or" in problem:  # YAML notices it only at the next key, or at the end
        bracket = text.splitlines()[opened.line][opened.column]
        problem = f"the {bracket} on this line is not closed, or a comma is missing"
        problem += f", before line {line}, column {mark.column + 1}" if mark else ""
        line, hint = opened.line + 1, f"add the missing {_CLOSING[bracket]} or the comma"
    elif opened is not None and "quoted scalar" in str(getattr(error, "context", "")):
        line, problem, hint = opened.line + 1, "the quote that this line opens is never closed", "add the closing quote"
    elif "cannot start any token" in problem and line and "\t" in text.splitlines()[line - 1]:
        problem, hint = "this line has a tab", "indent with spaces"
    elif "cannot start any token" in problem:  # % or @
        hint = "put a value that begins with this character in quotes"
    elif problem == "could not find expected ':'" and opened is not None:
        line, problem, hint = opened.line + 1, "this line has no colon", _COLON
    elif "mapping values are not allowed" in problem and mark:
        line, problem, hint = _misplaced_colon(text.splitlines(), mark.line + 1, mark.column)
    elif problem.endswith(("found '}'", "found ']'")):
        problem, hint = f"this line has a {problem[-2]} that closes nothing", "remove it, or add the one that opens it"
    elif problem.endswith("'<stream end>'"):  # behind the last line
        problem, hint = "the file ends within brackets", "add the missing } or ]"
    elif problem.startswith("expected") and mark and not text.splitlines()[mark.line][: mark.column].strip():
        problem, hint = "the indentation of this line does not fit the lines above", _INDENT
    elif "expansion exceeds" in problem:
        problem, hint = "its aliases expand to more than 10,000 values", "write out what they repeat, or remove them"
    problem += f" (YAML: {bare_problem})" if problem != bare_problem else ""
    return ConfigError(f"invalid YAML: {problem}", where=f"{path}:{line}" if line else str(path), hint=hint)


def _misplaced_colon(lines: Sequence[str], line: int, column: int) -> tuple[int, str, str]:
    """Return (line, problem, hint) for a colon, at ``column`` of ``line``, within what YAML takes for one value."""
    if _KEY.search(lines[line - 1][:column] + " "):
        return line, "this line has two colons", "put the value in quotes, or the settings of a section in braces"
    before = max((n for n in range(1, line) if lines[n - 1].partition("#")[0].strip()), default=0)
    if before and not _KEY.search(lines[before - 1]) and not lines[before - 1].lstrip().startswith("- "):
        return before, "this line has no colon with a space behind it", _COLON
    return line, "this line is indented, but the line before has a value already", _INDENT


def described(errors: ValidationError, cls: type[BaseModel], raw: Any) -> list[Problem]:
    """Return one problem per key. The errors of the branches of a union are joined into one sentence."""
    sentences: dict[str, str] = {}
    for error in errors.errors(include_url=False):
        path = _path(error["loc"], raw)
        key, sentence = ".".join(path), _sentence(error, path, cls)
        sentences[key] = f"{sentences[key]}; or {sentence}" if key in sentences else sentence
    return list(sentences.items())


def not_finite(tree: Any, key: str = "") -> list[Problem]:
    """Return a problem for each number in ``tree``, at any depth, that is infinite, NaN or too large for a float."""
    if isinstance(tree, dict):
        return [
            problem
            for name, value in tree.items()
            for problem in not_finite(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(tree, list | tuple):
        return [problem for index, value in enumerate(tree) for problem in not_finite(value, f"{key}.{index}")]
    if isinstance(tree, float) and not math.isfinite(tree):
        return [(key, f"it should be a finite number (found: {tree})")]
    if isinstance(tree, int) and abs(tree) >= 2**1023:
        return [(key, "it should be a finite number (found: more than 300 digits)")]
    return []


def _keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a model, each section before its keys."""
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        keys.append(key)
        for inner in (field.annotation, *get_args(field.annotation)):
            kind = get_args(inner)[0] if get_origin(inner) is Annotated else inner
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _keys(kind, f"{key}.")
    return keys


def _sentence(error: ErrorDetails, path: list[str], cls: type[BaseModel]) -> str:
    """Return what is wrong with the value at ``path``, what is allowed, and the nearest spelling."""
    value, kind, context = error["input"], error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(path, cls)}"
    if kind == "missing":
        return "required, but not set"
    if "expected" in context and kind == "literal_error":
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        matches = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        return f"{value!r} is not allowed; use {context['expected']}{hint}"
    if kind == "value_error":  # raised by a validator of ours
        return str(error["msg"]).removeprefix("Value error, ")
    excerpt = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}..."
    if kind in ("model_type", "dict_type"):
        return f"it should be a section of settings, {{key: value}} (found: {excerpt})"
    sentence = f"{_RENAMED.get(kind) or error['msg'].replace('Input should', 'it should')} (found: {excerpt})"
    if kind.startswith("int_") and isinstance(value, str) and re.fullmatch(r"-?\d{1,3}(,\d{3})+", value):
        return f"{sentence}: did you mean {value.replace(',', '')}?"
    if kind.startswith("int_") and (unit := hugging_face_names.UNITS.get(path[-1])):
        return f"{sentence}; {unit}"
    if kind in ("tuple_type", "list_type") and isinstance(value, str):
        items = value.replace("x", ",") if re.fullmatch(r"\d+x\d+", value) else value
        return f"{sentence}: write [{items}], on a command line '{'.'.join(path)}=[{items}]'"
    if kind.startswith("float_") and isinstance(value, str) and re.fullmatch(r"-?\d+,\d+", value):
        return f"{sentence}: did you mean {value.replace(',', '.')}?"
    return sentence


def _path(loc: Iterable[Any], raw: Any) -> list[str]:
    """Return ``loc`` as keys of ``raw``, without the parts with which pydantic names a branch of a union."""
    path: list[str] = []
    node, last = raw, list(loc)[-1]
    for part in loc:
        if isinstance(node, dict) and (part in node or part in (last, "args")):  # args that are left out are checked
            path.append(str(part))
            node = node.get(part) or {}
        elif isinstance(node, list) and isinstance(part, int):
            path.append(str(part))
            node = node[part] if part < len(node) else None
    return path


def _nearest(path: list[str], cls: type[BaseModel]) -> str:
    """Return the nearest spelling of an unknown key: in its own section first, then anywhere."""
    if ":" in path[-1]:
        return "write a space after the colon"
    keys = _keys(cls)
    ours = hugging_face_names.setting(".".join(path))
    if (
        path[-1] in hugging_face_names.ABSENT
        or ours
        and any(f"{ours.partition('=')[0]}.".startswith(f"{key}.") for key in keys)
    ):
        return str(hugging_face_names.hint(".".join(path)))
    prefix = "".join(f"{part}." for part in path[:-1])
    section = re.sub(r"\.\d+\.", ".", prefix)  # of a list
    siblings = [key[len(section) :] for key in keys if key.startswith(section) and "." not in key[len(section) :]]
    if matches := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"did you mean {prefix}{matches[0]}?"
    last = {key.rsplit(".", 1)[-1]: key for key in keys}
    if matches := difflib.get_close_matches(path[-1], last, n=1, cutoff=0.8):
        return f"did you mean {last[matches[0]]}?"
    return f"known keys: {', '.join(siblings) or 'none'}"
