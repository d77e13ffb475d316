"""Settings that are the arguments of a function, as ``{name: FUNCTION, args: {...}}``, checked against its signature.

A section whose ``name`` names a function is validated with ``section_of``: its ``args`` are then a section themselves,
with the names, types, limits and defaults of the function's parameters.
"""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import Field, ValidationError, create_model

from harness.config import plugins
from harness.config.base import NullIsEmpty, Section
from harness.config.sentences import described
from harness.errors import ConfigError, first_line, similar

Function = Callable[..., Any]
_Section = TypeVar("_Section", bound=Section)


def functions(module: str) -> dict[str, Function]:
    """Return the public functions that ``module`` defines, by name."""
    members = vars(importlib.import_module(module)).items()
    return {
        name: member
        for name, member in members
        if inspect.isfunction(member) and member.__module__ == module and not name.startswith("_")
    }


def find(kind: str, name: str, where: str, built_in: dict[str, Function]) -> Function:
    """Return the function ``name``: one of ``built_in``, or a dotted name. Raises ConfigError at ``where``."""
    if "." not in name:
        if name not in built_in:
            raise plugins.unknown(
                kind, name, built_in, where, f"use one of {', '.join(built_in)}, or your own package.module.function"
            )
        return built_in[name]
    function = plugins.import_own(kind, name, where)
    if not inspect.isfunction(function):
        hint = "write package.module.function, importable from the working folder"
        raise ConfigError(f"the {kind} {name!r} is not a function", where=where, hint=hint)
    return function


def require_parameters(
    name: str, parameters: Mapping[str, inspect.Parameter], names: Iterable[str], where: str, otherwise: str = ""
) -> None:
    """Raise ConfigError for arguments ``names`` to ``name`` that are not among its ``parameters``: at ``where``, or at
    the first one in ``where``, if those are arguments. ``otherwise`` ends the hint."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if wrong := [] if takes_all else [str(key) for key in names if key not in parameters]:
        nearest = similar(wrong[0], parameters)
        takes = f"its arguments are: {', '.join(parameters)}" if parameters else "it has none"
        message = f"{name} has no {'argument' if len(wrong) == 1 else 'arguments'} {', '.join(wrong)}"
        place = f"{where}.{wrong[0]}" if where.endswith(".args") else where
        guess = f"did you mean {nearest}? " if nearest else ""
        raise ConfigError(message, where=place, hint=f"{guess}{takes}{otherwise}")


def checked(
    name: str, function: Function, args: Mapping[str, Any], where: str, passed: tuple[str, ...]
) -> dict[str, Any]:
    """Return the arguments of ``function``: ``args``, and the defaults of others that are not ``passed``. Raises
    ConfigError at the key below ``where`` of one that it does not have, or whose value it does not take."""
    section = _arguments(name, function, passed, ())
    parameters = {key: each for key, each in inspect.signature(function).parameters.items() if key not in passed}
    require_parameters(name, parameters, args, where)
    try:
        return section.model_validate(args).model_dump()
    except ValidationError as errors:
        key, sentence = described(errors, section, args)[0]
        raise ConfigError(sentence, where=f"{where}.{key}") from None


@functools.cache  # so that two configurations that name the same function have the same class and can be compared
def section_of(
    base: type[_Section],
    name: str,
    function: Function,
    default: bool,
    passed: tuple[str, ...],
    by_run: tuple[str, ...] = (),
) -> type[_Section]:
    """Return ``base`` with this ``name``, which ``default`` makes optional, and the arguments of ``function`` as
    ``args``, without those that the harness has ``passed``; those ``by_run`` are null unless the configuration sets
    them."""
    arguments = _arguments(name, function, passed, by_run)
    description = base.model_fields["name"].description
    named: Any = (Literal[name], Field(default=name if default else ..., description=description))
    args: Any = (
        Annotated[arguments, NullIsEmpty],
        Field(default={}, validate_default=True, description=base.model_fields["args"].description),
    )
    return create_model(
        f"{base.__name__}_{name}", __base__=base, __doc__=inspect.getdoc(function), name=named, args=args
    )


def _arguments(name: str, function: Function, passed: tuple[str, ...], by_run: tuple[str, ...]) -> type[Section]:
    """Return the parameters of ``function``, which may be a class, as a section. Raises ConfigError."""
    try:
        described = " ".join((inspect.getdoc(function) or name).partition("\n\n")[0].split())
        parameters = [
            each for each in inspect.signature(function).parameters.values()
            if each.name not in passed and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
        hints = _hints(function, parameters)
        fields: dict[str, Any] = {}
        for each in parameters:
            kind, default = hints[each.name], ... if each.default is each.empty else each.default
            if each.name in by_run:
                kind, default = kind | None, None
            fields[each.name] = (kind, Field(default, description=described))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a parameter may have the name of a method of pydantic
            return create_model(f"{function.__name__}_arguments", __base__=Section, **fields)
    except Exception as error:  # an annotation of the user's may be anything
        raise ConfigError(
            f"the parameters of {name} cannot be settings: {type(error).__name__}: {first_line(error)}",
            hint="annotate them with types that YAML can express, such as float, bool, str or list[float]",
        ) from error


def _hints(function: Function, parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """Return the types of ``parameters`` by name. torch imports some of them for type checkers only."""
    annotated = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)  # type: ignore[misc]
    annotations = {each.name: Any if each.annotation is each.empty else each.annotation for each in parameters}
    # What YAML has is a list, and pydantic would check the values of an Iterable only when they are used.
    namespace = {**vars(collections.abc), **getattr(annotated, "__globals__", {}), "Iterable": list, "Sequence": list}
    return get_type_hints(SimpleNamespace(__annotations__=annotations), namespace, include_extras=True)
