"""The local rank set by the launcher, and the spelling of the option by which a script reads it.

``torch.distributed.launch`` passes ``--local-rank=N`` since torch 2.0; before, it passed ``--local_rank=N``. Scripts
declare one of the two. torchrun passes neither and sets LOCAL_RANK.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from harness.apex.patches import around, patches

_SPELLINGS = ("--local_rank", "--local-rank")
_OPTION = re.compile(r"(--local[-_]rank)(=.*)?")
_in_command_line = ContextVar("a parser, or that of its subcommand, parses the command line", default=False)


def from_environment() -> str | None:
    """Return the launcher's LOCAL_RANK; None without a launcher."""
    return os.environ.get("LOCAL_RANK")


def num_local_ranks() -> int:
    """Return the number of ranks that the launcher started on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def spelling_for(script: str) -> str:
    """Return the spelling to put into ``sys.argv``: with a dash if the source ``script`` has only that, else the old
    one."""
    return "--local-rank" if "--local-rank" in script and "--local_rank" not in script else "--local_rank"


def patch_argparse(from_launcher: str | None) -> None:
    """Make every ``argparse.ArgumentParser`` accept the local rank in the spelling that it declares.

    ``from_launcher`` is the value that the launcher passed on the command line, or None. If a parser declares neither
    spelling, ``parse_args`` drops that argument instead of rejecting it; ``parse_known_args`` returns it with the rest.
    If a parser declares one and the command line has no local rank (torchrun), it gets LOCAL_RANK.
    Undone by ``harness.apex.uninstall``.
    """
    parser = argparse.ArgumentParser
    patches.set(parser, "parse_known_args", around(parser.parse_known_args, _parse_known_args))
    patches.set(parser, "parse_args", around(parser.parse_args, functools.partial(_parse_args, from_launcher)))


def _parse_known_args(original: Any, self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    words = list(sys.argv[1:] if args is None else args)
    given = args is None or (words != [] and words == sys.argv[1:])  # not an explicit []
    before = _in_command_line.set(_in_command_line.get() or given)
    try:
        return original(self, _with_declared_spelling(self, words), namespace)
    finally:
        _in_command_line.reset(before)


def _parse_args(
    from_launcher: str | None, original: Any, self: Any, args: Sequence[str] | None = None, namespace: Any = None
) -> Any:
    return original(self, _without_undeclared(self, args, from_launcher), namespace)


def _with_declared_spelling(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return ``words`` with the local rank in the spelling that ``parser`` declares. If only LOCAL_RANK has it, it is
    added to those of the command line."""
    declared = _declared(parser)
    if len(declared) == 1:
        options = words.index("--") if "--" in words else len(words)
        words[:options] = [
            declared[0] + (match[2] or "") if (match := _option(word)) else word for word in words[:options]
        ]
    environment = from_environment()
    if declared and _in_command_line.get() and environment is not None and not _is_decided(parser, words):
        words.insert(0, f"{declared[0]}={environment}")
    return words


def _is_decided(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    """Return True if ``words`` have a local rank, or an option that excludes it."""
    deciding = set(_SPELLINGS)
    for group in parser._mutually_exclusive_groups:
        options = {option for action in group._group_actions for option in action.option_strings}
        deciding |= options if options & set(_SPELLINGS) else set()
    return any(str(word).partition("=")[0] in deciding for word in words)  # scripts pass numbers, too


def _option(word: Any) -> re.Match[str] | None:
    return _OPTION.fullmatch(word) if isinstance(word, str) else None  # scripts pass numbers, too


def _without_undeclared(
    parser: argparse.ArgumentParser, args: Sequence[str] | None, from_launcher: str | None
) -> Sequence[str] | None:
    """Return ``args`` without the launcher's local rank if ``parser`` and its subcommands do not declare one."""
    words = list(sys.argv[1:] if args is None else args)
    for spelling in _SPELLINGS:
        if from_launcher is not None and f"{spelling}={from_launcher}" in words and not _declared_anywhere(parser):
            words.remove(f"{spelling}={from_launcher}")
            return words
    return args


def _declared(parser: argparse.ArgumentParser) -> list[str]:
    return [spelling for spelling in _SPELLINGS if spelling in parser._option_string_actions]


def _declared_anywhere(parser: argparse.ArgumentParser) -> bool:
    """Return True if ``parser`` or the parser of one of its subcommands declares a local rank."""
    if _declared(parser):
        return True
    subcommands = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return any(_declared_anywhere(sub) for action in subcommands for sub in action.choices.values())
