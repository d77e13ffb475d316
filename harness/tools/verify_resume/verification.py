"""``harness verify-resume -c CONFIG``: a configuration as a command for the audit, and two of its runs compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.audit.audit import AuditRequest
from harness.audit.plan import PLAN
from harness.config import loader
from harness.config.places import is_url
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.errors import EXIT_FAILURE, ConfigError, HarnessError
from harness.runs import checkpoint, layout
from harness.tools.compare.exactness import differences
from harness.tools.compare.first_difference import FirstDifference

LONG_EPOCH, FEW_STEPS = 60, 24  # an epoch of more steps is not trained to its end unless --steps asks for it
_CHECKPOINTS = 7  # in a shortened run, in addition to those at the ends of epochs
_LIMIT_S = 300.0  # for harness check
_HERE = ("local", "torchrun")  # engines whose ranks inherit the environment


class Length(NamedTuple):
    """Steps per epoch, and of the whole run."""

    per_epoch: int
    total: int


def request(
    path: str, overrides: Sequence[str], sizes: Sequence[int], steps: int | None, full: bool, **options: Any
) -> tuple[AuditRequest, list[str]]:
    """Return the audit of a configuration, with sentences about how it is shortened. ``sizes``: ranks per machine; of
    several numbers, each start takes the next; ``options``: more fields of the AuditRequest.

    Raises HarnessError with what ``harness check`` finds, and ConfigError if runs cannot have the same bits on other
    numbers of ranks.
    """
    config = loader.load(path, overrides)
    launch = config.launch
    sizes = sizes or [launch.nproc]
    most = launch.nnodes * max(sizes)
    if len({*sizes}) > 1 and (config.parallel.logical_ranks or 0) < most:
        raise ConfigError(
            f"a run can resume exactly on another number of ranks only if parallel.logical_ranks is at least {most}",
            where="--nproc",
            hint=f"add parallel.logical_ranks={most}, or give one number",
        )
    length = examine(path, overrides, launch.nnodes * sizes[0])
    changes = {} if full else shortened(config, overrides, length, steps)
    said = [f"changed for the test: {key} {was} -> {now}" for key, (was, now) in changes.items()]
    if "train.max_steps" in changes and int(changes["train.max_steps"][1]) < length.per_epoch:
        said.append(f"an epoch has {length.per_epoch} steps, and is not trained to its end; --steps N trains longer")
    command = [sys.executable, "-m", "harness", "launch", "-c", path, *overrides]
    command += [f"{key}={now}" for key, (_, now) in changes.items()]
    command += [f"output={'file://' * is_url(config.output)}{{out}}", "trackers=[]", "launch.max_restarts=0"]
    if config.checkpoint.resume == "never":
        command.append("checkpoint.resume=auto")
    if launch.engine not in _HERE:
        command += [f"launch.env.{PLAN}={{plan}}", "launch.env.PYTHONPATH={hook}"]

    def results(one: Path, other: Path) -> list[str]:
        return _differences(one / config.name, other / config.name)

    made = AuditRequest(
        command, copies=False, variants=[[f"launch.nproc={size}"] for size in sizes], results=results,
        ranks=launch.nnodes * min(sizes), alone=0.5 if launch.engine in _HERE else 1.0, **options,
    )  # fmt: skip
    return made, said


def _differences(one: Path, other: Path) -> list[str]:
    """Return sentences about the first places where two runs differ; none if they are equal bit for bit."""
    found = differences(one, other)
    return [*FirstDifference(found, sorted(checkpoint.steps(one / layout.CHECKPOINTS))).lines()] if found else []


def examine(path: str, overrides: Sequence[str], world_size: int) -> Length:
    """Return the length of the run that a configuration plans. Raises HarnessError with what ``harness check``
    finds."""
    command = [sys.executable, "-m", "harness", "check", "--json", "-c", path, "--world", str(world_size), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    try:
        record = json.loads(done.stdout.splitlines()[-1])  # what the user's own code printed comes before
    except (ValueError, IndexError):  # it crashed, and has printed why
        record = {"errors": [{"message": f"harness check crashed:\n{done.stderr}", "where": path, "hint": ""}]}
    if errors := record["errors"]:
        texts = [str(HarnessError(each["message"], where=each["where"], hint=each["hint"])) for each in errors]
        error = HarnessError("\n".join(texts))
        error.exit_code = done.returncode or EXIT_FAILURE
        raise error
    return Length(record["facts"]["steps per epoch"], record["facts"]["steps"])


def shortened(
    config: Config, overrides: Sequence[str], length: Length, steps: int | None
) -> dict[str, tuple[str, str]]:
    """Return {key: (value, shorter value)} so that a run has several checkpoints, an evaluation before its end and, if
    its epochs are short, an epoch end. Keys in ``overrides`` are the user's choice and are kept."""
    if steps is None:
        steps = FEW_STEPS if length.per_epoch > LONG_EPOCH else length.per_epoch + max(6, length.per_epoch // 2)
    steps = min(steps, length.total)
    every = max(2, steps // _CHECKPOINTS)  # so that a kill loses some steps
    often, saved = config.train.evaluate_every, config.checkpoint.every
    evaluated = often.written if often.steps(length.per_epoch) < length.per_epoch else 1
    if min(often.steps(length.per_epoch), length.per_epoch) >= steps:
        evaluated = f"{-(-steps // 2)} steps"
    wanted: dict[str, Any] = {
        "train.max_steps": steps if steps < length.total else config.train.max_steps,
        "train.log_every": 1,
        "train.evaluate_every": evaluated,
        "checkpoint.every": min(every, saved.steps(length.per_epoch)) if saved else every,
        "checkpoint.keep": 1000,
    }
    given = {override.partition("=")[0] for override in overrides}
    present = flatten(loader.as_tree(config))
    return {
        key: (_word(present[key]), _word(value))
        for key, value in wanted.items()
        if key not in given and present[key] != value
    }


def _word(value: object) -> str:
    return "null" if value is None else str(value)
