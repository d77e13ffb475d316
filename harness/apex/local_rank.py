"""The local rank that a launcher gives, and the spelling in which a script wants it.

``torch.distributed.launch`` passes ``--local-rank=N`` since torch 2.0 and passed ``--local_rank=N`` before; a script
declares one of the two. torchrun passes neither and sets LOCAL_RANK. Not here: ranks among all nodes.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from harness.apex.patches import patches

_SPELLINGS = ("--local_rank", "--local-rank")
_OPTION = re.compile(r"(--local[-_]rank)(=.*)?")


def of_environment() -> str | None:
    """The launcher's LOCAL_RANK; None without a launcher."""
    return os.environ.get("LOCAL_RANK")


def num_local_ranks() -> int:
    """How many ranks the launcher started on this machine; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def spelling_in(text: str) -> str:
    """The spelling for ``sys.argv``: the script's own if its ``text`` has only that with a dash, else the old one."""
    return "--local-rank" if "--local-rank" in text and "--local_rank" not in text else "--local_rank"


def teach_argparse(given: str | None) -> None:
    """Let every ``argparse.ArgumentParser`` take the local rank in the spelling that it declares.

    ``given``: the value that the launcher passed on the command line, or None. A parser that declares neither spelling
    is spared that argument by ``parse_args``, which would refuse it; ``parse_known_args`` hands it on with the rest. A
    parser that declares one and finds no local rank on the command line, under torchrun, gets LOCAL_RANK.
    Undone by ``harness.apex.uninstall``.
    """
    parser = argparse.ArgumentParser
    parse_args, parse_known_args = parser.parse_args, parser.parse_known_args

    @functools.wraps(parse_known_args)
    def known(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        return parse_known_args(self, _respelled(self, args), namespace)

    @functools.wraps(parse_args)
    def all_(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        return parse_args(self, _without(self, args, given), namespace)

    patches.set(parser, "parse_known_args", known)
    patches.set(parser, "parse_args", all_)


def _respelled(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> list[str]:
    words = list(sys.argv[1:] if args is None else args)
    declared = _declared(parser)
    if len(declared) == 1:
        options = len(words[: words.index("--")] if "--" in words else words)
        matches = [_OPTION.fullmatch(word) for word in words[:options] if isinstance(word, str)]
        words[:options] = [
            declared[0] + (match[2] or "") if match else word
            for word, match in zip(words[:options], matches, strict=True)
        ]
    environment = of_environment()
    if declared and args is None and environment is not None and not any(map(_OPTION.fullmatch, words)):
        words.insert(0, f"{declared[0]}={environment}")
    return words


def _without(parser: argparse.ArgumentParser, args: Sequence[str] | None, given: str | None) -> Sequence[str] | None:
    words = list(sys.argv[1:] if args is None else args)
    for spelling in _SPELLINGS:
        if given is not None and f"{spelling}={given}" in words and not _declared_anywhere(parser):
            words.remove(f"{spelling}={given}")
            return words
    return args


def _declared(parser: argparse.ArgumentParser) -> list[str]:
    return [spelling for spelling in _SPELLINGS if spelling in parser._option_string_actions]


def _declared_anywhere(parser: argparse.ArgumentParser) -> bool:
    """Whether ``parser`` or a parser of one of its subcommands declares a local rank."""
    if _declared(parser):
        return True
    subcommands = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return any(_declared_anywhere(sub) for action in subcommands for sub in action.choices.values())
