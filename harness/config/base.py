"""Base class and types of all configuration sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema

from harness.config import plugins

_LARGEST = 3.4e38  # of float32
_LARGEST_WHOLE = 2**63 - 1  # of int64
# Merging keeps the keys of an extended file, so null is how an override removes all of them.
NullIsEmpty = BeforeValidator(lambda value: {} if value is None else value)
Arguments = Annotated[dict[str, Any], NullIsEmpty]


class Mark(Enum):
    """A mark beside the type of a setting or a section: ``root: Annotated[str, Mark.OF_MACHINE]``."""

    NO_RECIPE = "it may change when a run is resumed without making it another experiment"
    OF_MACHINE = "it may differ between the ranks of a run, as the place where a machine mounts the data"
    CODE = "a dotted name in it (of a section: in its name) is code that is imported, such as the user's own model"


@dataclass(frozen=True)
class Matching:
    """A text of which all matches ``pattern``: ``Annotated[str, Matching(r"\\d+", "write a number, such as 3")]``."""

    pattern: str
    allowed: str

    def check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            excerpt = repr(text) if len(text) <= 100 else f"{text[:50]!r}... ({len(text)} characters)"
            raise ValueError(f"{excerpt} is not allowed; {self.allowed}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}


class Conflict(NamedTuple):
    """Settings that contradict each other: the dotted key of one, the contradiction, and what to type instead."""

    key: str
    message: str
    hint: str


class Section(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors, and types are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        """Refuse what torch and the file system cannot take, so that no field needs a limit only for that."""
        _refuse_unusable(value)
        return value


def _refuse_unusable(value: Any) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_unusable(item)
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"{value!r} has a NUL character; remove it")
    elif isinstance(value, float) and _LARGEST < abs(value) < float("inf"):
        raise ValueError(f"{value:g} is too large for a float32; use a number below 3.4e38")
    elif isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise ValueError("the number is too large; use one below 2**63")


Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Name = Annotated[
    str,
    Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}",
             "use up to 200 letters, digits, '.', '_' and '-', with a letter or digit first"),
]  # fmt: skip
Place = Annotated[
    str,
    Matching(r"[^\x00-\x1f\x7f~][^\x00-\x1f\x7f]*", "write a path without ~, line breaks or control characters"),
]  # fmt: skip

LocalPlace = Annotated[Place, Matching(r"(?!.*://).*", "write a path on this machine; a URL is not supported here")]


@dataclass(frozen=True)
class NameOf:
    """The name of a built-in part, or a dotted name, which is imported only where the part is used:
    ``Annotated[str, NameOf("engine")]``."""

    kind: str

    def check(self, name: str) -> str:
        if "." not in name and name not in plugins.names(self.kind):
            error = plugins.unknown(self.kind, name, plugins.names(self.kind), "")
            raise ValueError(f"{error.message}; {error.hint}")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": plugins.names(self.kind)}, {"pattern": r"\.", "type": "string"}]}
