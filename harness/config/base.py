"""What every part of the configuration has in common: frozen, strict, and documented where it is declared."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
# Merging keeps what a base file has; null is how an override says "none of them".
NullIsEmpty = BeforeValidator(lambda value: {} if value is None else value)
Arguments = Annotated[dict[str, Any], NullIsEmpty]


class Section(BaseModel):
    """A frozen part of the configuration: unknown keys are errors, and types are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
