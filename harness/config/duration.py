"""Lengths of training that may be written in steps or in epochs, such as an interval between evaluations.

They are parsed with the configuration, and become steps where the number of steps per epoch is known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Unit = Literal["steps", "epochs", "share"]
_NUMBER = r"(\d+(?:\.\d+)?)"
_TEXT, _SHARE = rf"{_NUMBER} ?(step|epoch)s?", rf"{_NUMBER} ?(%)"
_UNITS: dict[str, Unit] = {"step": "steps", "epoch": "epochs", "%": "share"}


class RunPosition(NamedTuple):
    """A position of a run: after ``step`` steps, of which ``done`` are of the ``epoch``, which has ``per_epoch``."""

    step: int
    epoch: int
    done: int
    per_epoch: int


@dataclass(frozen=True)
class Duration:
    """An amount of steps or epochs, or a share of the run, more than 0, as it was ``written``."""

    amount: Fraction
    unit: Unit
    written: int | float | str

    @classmethod
    def parse(cls, value: Any, bare: Unit, share: bool = False) -> Duration:
        """Return what ``value`` means, if a number without a unit means ``bare``. ``share``: whether it may be a share
        of the run, such as 10%. Raises ValueError."""
        match = re.fullmatch(_TEXT, value) if isinstance(value, str) else None
        if share and isinstance(value, str):
            match = match or re.fullmatch(_SHARE, value)
        unit = _UNITS[match[2]] if match else bare
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if match or is_number:
            amount = Fraction(match[1] if match else str(value)) / (100 if unit == "share" else 1)
            if amount > 0 and (unit != "steps" or amount.denominator == 1) and (unit != "share" or amount <= 1):
                return cls(amount, unit, value)
        number = "a whole number of steps" if bare == "steps" else "a number of epochs"
        examples = '"500 steps", "2 epochs", "10%" of the run; or null'
        if not share:
            examples = '"500 steps", "2 epochs" or "0.25 epochs"'
        raise ValueError(f"{value!r} is not allowed; write {number} above 0, {examples}")

    def steps(self, per_epoch: int, total: int = 0) -> int:
        """Return it in steps, at least 1. ``total``: the steps of the run, for a share of them."""
        return max(1, round(self.amount * {"steps": 1, "epochs": per_epoch, "share": total}[self.unit]))

    def steps_left(self, position: RunPosition) -> int:
        """Return the steps from ``position`` to the next end of an interval of this length, at least 1.

        Whole epochs end with epochs, even if the number of their steps has changed.
        """
        step, epoch, done, per_epoch = position
        length = self.amount * per_epoch if self.unit == "epochs" else self.amount
        passed = epoch * per_epoch + done if self.unit == "epochs" else step
        return math.ceil((passed // length + 1) * length) - passed

    def ends_at(self, position: RunPosition) -> bool:
        """Return True if the step before ``position`` ended an interval."""
        step, epoch, done, per_epoch = position
        return self.steps_left(RunPosition(step - 1, epoch, done - 1, per_epoch)) == 1


@dataclass(frozen=True)
class Bare:
    """The unit of a number without one, and whether a ``share`` of the run is allowed, such as 10%:
    ``Annotated[Duration, Bare("steps")]``."""

    unit: Unit
    share: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, Duration) else Duration.parse(value, self.unit, self.share),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda duration: duration.written),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        whole = {"type": "integer", "minimum": 1}
        number = whole if self.unit == "steps" else {"type": "number", "exclusiveMinimum": 0}
        text = f"{_TEXT}|{_SHARE}" if self.share else _TEXT
        return {"anyOf": [number, {"type": "string", "pattern": f"^({text})$"}]}
