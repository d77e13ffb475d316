"""Compares a run that was killed with an uninterrupted run: the bits, the files, and the exit codes."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.campaign.plan import Chain
from harness.audit.plan import HowKilled, PlannedKill
from harness.runs import checkpoints
from harness.runs.files import read_sealed
from harness.runs.metrics_table import TIMES

_KILLED, _STOPPED, _LOST = -signal.SIGKILL, 75, 70
_OF_CAMPAIGN = {"config.yaml", "terminal.txt", "plan.json", "records"}


def digests(run: Path) -> dict[str, str]:
    """{part: SHA-256} of the results in a run folder, without times. Independent of ``harness compare``."""
    newest = run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()
    content = checkpoints.read(newest)
    for key in ("log_offset", "log_sha256"):  # of the log, in which the times vary
        content.pop(key)
    found = {f"checkpoint: {part}": _digest(_timeless(value)) for part, value in content.items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics.jsonl"] = _digest([{k: v for k, v in line.items() if k not in TIMES} for line in lines])
    found["summary.json"] = _digest(_timeless(read_sealed(run / "summary.json")))
    for name in ("weights.safetensors", "predictions.csv", "confusion.csv", "task.json"):
        if (run / name).exists():
            found[name] = hashlib.sha256((run / name).read_bytes()).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    """``value`` without the seconds in it."""
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not str(key).endswith("_s")}
    return [_timeless(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in _flat(value):
        digest.update(part)
    return digest.hexdigest()


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{key!r}:".encode()
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _flat(item)
    else:
        yield repr(value).encode()


def wrong_bits(unbroken: dict[str, str], broken: dict[str, str]) -> list[str]:
    """The parts that differ."""
    return sorted(part for part in unbroken.keys() | broken.keys() if unbroken.get(part) != broken.get(part))


def stray_files(unbroken: Path, broken: Path, chain: Chain) -> list[str]:
    """Files in the folder ``broken`` that the uninterrupted run did not leave, and files that are missing. The
    kept checkpoints may be of other steps, but not more: the newest ``keep`` and the best. A later conversion of a
    table removes what a killed one left, once it is a day old."""
    keep = chain.sections["checkpoint"]["keep"]
    expected, found = _names(unbroken), _names(broken)
    if chain.logical_ranks:  # there is a log of each rank that ever was
        expected, found = (
            {name for name in names if not re.search(r"/logs/rank-\d", name)} for names in (expected, found)
        )
    steps = {path.parent for path in broken.rglob("checkpoints/step-*/*")}
    more = [f"{len(steps)} checkpoints, but keep is {keep}"] if len(steps) > keep + 1 else []
    return [*sorted(found - expected), *(f"missing: {name}" for name in sorted(expected - found)), *more]


def _names(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    for pattern, same in ((r"/step-\d+(?=/|$)", "/step-N"), (r"(?<=cache/runs/run-)\w+", "URL")):
        names = {re.sub(pattern, same, name) for name in names}
    return {name for name in names - _OF_CAMPAIGN if not re.search(r"^records/|/tables/.*\.tmp$", name)}


def wrong_codes(
    chain: Chain, kill: PlannedKill | None, how: HowKilled, place: str, codes: Sequence[int], is_trained: bool
) -> str:
    """The reason why the exit codes of a start do not fit its end; empty if they do.

    A stopped rank exits with 75, or with 130 (SIGINT) or 143 (SIGTERM) before there is a checkpoint; a rank that lost
    a peer with 70. A run may also have been done already when the signal came; its ranks leave one by one.
    """
    allowed = {0} if kill is None else _allowed(chain, kill, how, place, is_trained)
    if all(code in allowed for code in codes):
        return ""
    return f"exit codes {codes} instead of {sorted(allowed)}"


def _allowed(chain: Chain, kill: PlannedKill, how: HowKilled, place: str, is_trained: bool) -> set[int]:
    number = signal.Signals[f"SIG{how}"]
    if number == signal.SIGKILL:
        done = {0} if place == "end" or is_trained or kill.delay_s else set()
        if chain.engine != "bare":
            # torch's launcher exits with 1 for a rank that failed.
            return {_KILLED, *done} if kill.target == "launcher" else {0, 1, _LOST}
        return {_KILLED, *done, *({_LOST} if chain.world_size > 1 else ())}
    allowed = {0, _STOPPED}
    if place == "start-up":
        allowed |= {130 if number == signal.SIGINT else 143}
    if chain.engine.startswith("torch"):
        allowed |= {1, -number, 128 + number}  # of torch's launcher, whatever its ranks return
    return allowed
