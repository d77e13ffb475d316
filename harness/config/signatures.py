"""Settings that are the arguments of a function, as ``{name: FUNCTION, args: {...}}``, checked against its signature.

A section whose ``name`` names a function is validated with ``section_of``: its ``args`` are then a section themselves,
with the names, types, limits and defaults of the function's parameters.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from harness.config import plugins
from harness.config.base import NullIsEmpty, Section
from harness.errors import ConfigError, first_line, similar

Function = Callable[..., Any]


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
    found = plugins.import_own(kind, name, where)
    if not inspect.isfunction(found):
        hint = "write package.module.function, importable from the working folder"
        raise ConfigError(f"the {kind} {name!r} is not a function", where=where, hint=hint)
    return found


def require_parameters(
    name: str, parameters: Mapping[str, inspect.Parameter], given: Iterable[str], where: str
) -> None:
    """Raise ConfigError at ``where`` for arguments ``given`` to ``name`` that are not among its ``parameters``."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if wrong := [] if takes_all else [str(key) for key in given if key not in parameters]:
        near = similar(wrong[0], parameters)
        takes = f"its arguments are: {', '.join(parameters)}" if parameters else "it has none"
        message = f"{name} has no argument{'s' * (len(wrong) > 1)} {', '.join(wrong)}"
        raise ConfigError(message, where=where, hint=f"did you mean {near}? {takes}" if near else takes)


@functools.cache  # so that two configurations that name the same function have the same class and can be compared
def section_of(base: type[Section], name: str, function: Function, default: bool = False) -> Any:
    """``base`` with this ``name``, which ``default`` makes optional, and the arguments of ``function`` as ``args``."""
    arguments = _arguments(name, function)
    description = base.model_fields["name"].description
    named: Any = (Literal[name], Field(default=name if default else ..., description=description))
    args: Any = (
        Annotated[arguments, NullIsEmpty],
        Field(default={}, validate_default=True, description=base.model_fields["args"].description),
    )
    return create_model(
        f"{base.__name__}_{name}", __base__=base, __doc__=inspect.getdoc(function), name=named, args=args
    )


def _arguments(name: str, function: Function) -> type[Section]:
    """Return the parameters of ``function`` after the first, which the harness passes, as a section. Raises
    ConfigError."""
    try:
        hints = get_type_hints(function, include_extras=True)
        described = " ".join((inspect.getdoc(function) or name).partition("\n\n")[0].split())
        fields: dict[str, Any] = {
            parameter.name: (
                hints.get(parameter.name, Any),
                Field(... if parameter.default is parameter.empty else parameter.default, description=described),
            )
            for parameter in list(inspect.signature(function).parameters.values())[1:]
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a parameter may have the name of a method of pydantic
            return create_model(f"{function.__name__}_arguments", __base__=Section, **fields)
    except Exception as error:  # an annotation of the user's may be anything
        raise ConfigError(
            f"the parameters of {name} cannot be settings: {type(error).__name__}: {first_line(error)}",
            hint="annotate them with types that YAML can express, such as float, bool, str or list[float]",
        ) from error
