"""Where the chance comes from that makes two undisturbed starts of a command differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from harness.audit import diagnosis, records
from harness.audit.folders import Session
from harness.audit.plan import AuditPlan
from harness.audit.records import StartRecord
from harness.audit.verdict import Draw

_SEEDS = "give it a seed: manual_seed(0) of a torch.Generator, numpy.random.default_rng(0), random.Random(0)"
_HASHES = "the order of a set or the hash of a string is the cause: with PYTHONHASHSEED=0, two starts are equal"


class Observe(Protocol):
    """Start the command in fresh folders, and return its record. ``reason`` is told to the user; without
    ``hashes``, the order of sets is fixed."""

    def __call__(self, name: str, plan: AuditPlan, reason: str, hashes: bool = True) -> StartRecord: ...


class Causes(NamedTuple):
    """Possible causes, a sentence each, and what helps, if that is more than the usual."""

    lines: Sequence[str]
    remedy: str = ""


def find_causes(session: Session, observe: Observe, plan: AuditPlan) -> Causes:
    """Start the command with ``plan``, which ends where two starts differ, and return what can be the cause."""
    observe("observed", replace(plan, chance=True), "to find the lines that chance comes from")
    draws = records.draws(session.records("observed"), session.work)
    if certain := [draw for draw in draws if draw.stream in ("entropy", "operation")]:
        are_operations = all(draw.stream == "operation" for draw in certain)
        return Causes([_sentence(draw) for draw in certain], "" if are_operations else _SEEDS)
    with_fixed_hashes = [
        observe(name, plan, "with the order of sets fixed", hashes=False) for name in ("hashes", "hashes-again")
    ]
    if not diagnosis.deterministic(*with_fixed_hashes):
        return Causes([_HASHES], "sort the set, or start the script with PYTHONHASHSEED=0")
    return Causes([_sentence(draw) for draw in draws if draw.stream == "clock"])


def _sentence(draw: Draw) -> str:
    if draw.stream == "operation":
        place = "" if draw.place.endswith(":0") else f"{draw.place} calls "
        return f"{place}{draw.function}, which is not deterministic"
    end = ", which reads a clock" if draw.stream == "clock" else ": a generator without a fixed seed"
    return draw.described + end
