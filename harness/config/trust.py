"""Limits of someone else's configuration without ``--trust``: it may only set values.

It may not name code, which runs when it is imported, nor make a command read other configurations or weights, URLs or
environment variables. Local data are read wherever it says: a run from another machine names them by absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.config import presets, recipe
from harness.config.merge import parsed
from harness.config.places import HUB, is_url
from harness.config.trees import leaves
from harness.errors import ConfigError

_OF_TRAINING = ("hooks", "train.")  # settings whose code no command on a trained run imports
_READS_WEIGHTS = ("checkpoint", "pretrained", "weights")  # arguments of timm's and torchvision's models begin so
_WORD = re.compile(r"[\w-]*")


def require_harmless(path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the configuration ``path`` does more than set values. Keys in ``overrides`` ("key=value")
    come from the user."""
    tree = parsed(path)
    overridden = {override.partition("=")[0] for override in overrides}
    problems = [f"  {key}: {problem}" for key, problem in _problems(tree) if key not in overridden]
    if problems:
        raise ConfigError(
            "you did not start this run on this machine, and its configuration does more than set values\n"
            + "\n".join(problems),
            where=str(path),
            hint="if you trust its author, add --trust (in Python: trust=True)",
        )


def _problems(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, what it does more than set a value)."""
    bases = tree.get("extends") or []
    if not all(str(base).startswith(presets.PREFIX) for base in (bases if isinstance(bases, list) else [bases])):
        yield "extends", f"reads {bases}"
    for key, value in leaves(tree):
        texts = list(_texts(value))
        if any("${" in text for text in texts):
            yield key, f"{value} reads a value from outside this file"
        elif url := next((text for text in texts if is_url(text) and key.startswith(("task.", "model.args."))), None):
            yield key, f"reads {url}, and sends requests there"
        elif location := next((text for text in texts if text.startswith(HUB)), None):
            yield key, f"reads {location}, a folder or a download"
        elif recipe.may_name_code(key) and not key.startswith(_OF_TRAINING):
            # A name under ``harness.`` needs trust as well: it may be a function that imports its arguments.
            yield from ((key, f"imports {text}, which runs its code") for text in texts if "." in text)
        elif key.startswith("model.args."):
            yield from _problems_of_argument(key, value, texts)


def _problems_of_argument(key: str, value: Any, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    name = key.removeprefix("model.args.")
    if name.startswith(_READS_WEIGHTS) and value not in (None, False):
        yield key, "reads weights from a file or the network"
    for text in texts:
        if not _WORD.fullmatch(text):
            yield key, f"{text!r} is not a plain word, so it may name a file or code"


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in ``value``, at any depth, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
