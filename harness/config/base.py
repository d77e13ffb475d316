"""Base class and types of all configuration sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from harness.config import plugins

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
# Merging keeps the keys of an extended file, so null is how an override removes all of them.
NullIsEmpty = BeforeValidator(lambda value: {} if value is None else value)
Arguments = Annotated[dict[str, Any], NullIsEmpty]


class Section(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors, and types are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


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
