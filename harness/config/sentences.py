"""pydantic's errors as sentences: the key, the value found, what is allowed, and the nearest spelling."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.config import hugging_face_names

Problem = tuple[str, str]  # dotted key, sentence
_RENAMED = {
    "tuple_type": "it should be a list",
    "list_type": "it should be a list",
    "string_type": "it should be text; put it in quotes if necessary",
    "invalid_key": "keys must be text; put this key in quotes",
}


def described(errors: ValidationError, cls: type[BaseModel], raw: Any) -> list[Problem]:
    """Return one problem per key. The errors of the branches of a union are joined into one sentence."""
    found: dict[str, str] = {}
    for error in errors.errors(include_url=False):
        path = _path(error["loc"], raw)
        key, sentence = ".".join(path), _sentence(error, path, cls)
        found[key] = f"{found[key]}; or {sentence}" if key in found else sentence
    return list(found.items())


def not_finite(tree: Any, key: str = "") -> list[Problem]:
    """Return a problem for each number in ``tree``, at any depth, that is infinite, NaN or too large for a float."""
    if isinstance(tree, dict):
        return [
            problem
            for name, value in tree.items()
            for problem in not_finite(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(tree, list | tuple):
        return [problem for place, value in enumerate(tree) for problem in not_finite(value, f"{key}.{place}")]
    if isinstance(tree, float) and not math.isfinite(tree):
        return [(key, f"it should be a finite number (found: {tree})")]
    if isinstance(tree, int) and abs(tree) >= 2**1023:
        return [(key, "it should be a finite number (found: more than 300 digits)")]
    return []


def _keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a model, each section before its keys."""
    found: list[str] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        found.append(key)
        for inner in (field.annotation, *get_args(field.annotation)):
            kind = get_args(inner)[0] if get_origin(inner) is Annotated else inner
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                found += _keys(kind, f"{key}.")
    return found


def _sentence(error: ErrorDetails, path: list[str], cls: type[BaseModel]) -> str:
    """Return what is wrong with the value at ``path``, what is allowed, and the nearest spelling."""
    seen, kind, context = error["input"], error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(path, cls)}"
    if kind == "missing":
        return "required, but not set"
    if "expected" in context and kind == "literal_error":
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        near = difflib.get_close_matches(str(seen), allowed, n=1)
        return f"{seen!r} is not allowed; use {context['expected']}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":  # raised by a validator of ours
        return str(error["msg"]).removeprefix("Value error, ")
    shown = repr(seen) if len(repr(seen)) <= 200 else f"{repr(seen)[:200]}..."
    if kind in ("model_type", "dict_type"):
        return f"it should be a section of settings, {{key: value}} (found: {shown})"
    sentence = f"{_RENAMED.get(kind) or error['msg'].replace('Input should', 'it should')} (found: {shown})"
    if kind.startswith("int_") and isinstance(seen, str) and re.fullmatch(r"-?\d{1,3}(,\d{3})+", seen):
        return f"{sentence}: did you mean {seen.replace(',', '')}?"
    if kind.startswith("int_") and (unit := hugging_face_names.UNITS.get(path[-1])):
        return f"{sentence}; {unit}"
    if kind in ("tuple_type", "list_type") and isinstance(seen, str):
        return f"{sentence}: write [{seen}], on a command line '{'.'.join(path)}=[{seen}]'"
    if kind.startswith("float_") and isinstance(seen, str) and re.fullmatch(r"-?\d+,\d+", seen):
        return f"{sentence}: did you mean {seen.replace(',', '.')}?"
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
    known = _keys(cls)
    ours = hugging_face_names.setting(".".join(path))
    if (
        path[-1] in hugging_face_names.ABSENT
        or ours
        and any(f"{ours.partition('=')[0]}.".startswith(f"{key}.") for key in known)
    ):
        return str(hugging_face_names.hint(".".join(path)))
    prefix = "".join(f"{part}." for part in path[:-1])
    section = re.sub(r"\.\d+\.", ".", prefix)  # of a list
    siblings = [key[len(section) :] for key in known if key.startswith(section) and "." not in key[len(section) :]]
    if near := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"did you mean {prefix}{near[0]}?"
    last = {key.rsplit(".", 1)[-1]: key for key in known}
    if near := difflib.get_close_matches(path[-1], last, n=1, cutoff=0.8):
        return f"did you mean {last[near[0]]}?"
    return "known keys: " + ", ".join(siblings)
