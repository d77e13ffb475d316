"""Limits of someone else's configuration without ``--trust``: it may only set values.

It may not name code, which runs when it is imported, nor read other files or environment variables. The resolved
configuration in a run folder never needs the latter two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.config import presets
from harness.config.merge import parsed
from harness.config.schema import flatten
from harness.config.transforms import own_code
from harness.errors import ConfigError

_PACKAGES = ("torch", "torchvision", "harness")  # only their models, optimizers and tasks pass the checks before use
_CODE = ("task.name", "model.name", "optimizer.name")  # what a command on a trained run imports


def require_harmless(path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the configuration ``path`` does more than set values. Keys in ``overrides`` ("key=value")
    come from the user."""
    tree = parsed(path)
    own = {override.partition("=")[0] for override in overrides}
    problems = [f"  {key}: {problem}" for key, problem in _problems(tree) if key not in own]
    if problems:
        raise ConfigError(
            "you did not start this run on this machine, and its configuration does more than set values\n"
            + "\n".join(problems),
            where=str(path),
            hint="if you trust its author, add --trust",
        )


def _problems(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bases = tree.get("extends") or []
    if not all(str(base).startswith(presets.PREFIX) for base in (bases if isinstance(bases, list) else [bases])):
        yield "extends", f"reads {bases}"
    leaves = flatten(tree)
    for key in _CODE:
        name = leaves.get(key)
        if isinstance(name, str) and "." in name and not _is_known(name):
            yield key, f"imports {name}, which runs its code"
    for key, name in _parts_of_task(leaves):
        if "." in str(name):
            yield key, f"imports {name}, which runs its code"
    for split in ("train", "eval"):
        key = f"task.transforms.{split}"
        for name in own_code(leaves.get(key)):
            yield key, f"imports {name}, which runs its code"
    for key, value in leaves.items():
        if "${" in str(value):
            yield key, f"{value} reads a value from outside this file"


def _parts_of_task(leaves: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, name) of the loss, the tokenizer and the metrics of a task."""
    yield from ((key, leaves.get(key)) for key in ("task.loss.name", "task.tokenizer.name"))
    metrics = leaves.get("task.metrics")
    for each in metrics if isinstance(metrics, list) else []:
        yield "task.metrics", each.get("name") if isinstance(each, dict) else each


def _is_known(name: str) -> bool:
    first, *others = name.split(".")
    return first in _PACKAGES and not any(part.startswith("_") or not part for part in others)
