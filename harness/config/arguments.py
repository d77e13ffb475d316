"""Arguments that several verbs of the command line share."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence

from harness.errors import ConfigError, similar

# Options of other tools, by the option of ``harness launch`` that they mean.
_OF_LAUNCH = {
    "nproc": "nproc", "nproc-per-node": "nproc", "num-processes": "nproc", "gpus": "nproc", "num-gpus": "nproc",
    "devices": "nproc", "world-size": "nproc", "world": "nproc", "nnodes": "nnodes", "num-nodes": "nnodes",
    "nodes": "nnodes", "engine": "engine",
}  # fmt: skip


def add_config(parser: argparse.ArgumentParser, what: str = "a YAML file, such as configs/digits.yaml") -> None:
    """``-c CONFIG``, with ``what`` as its help, and ``key=value`` overrides: ``arguments.config`` and ``overrides``.

    The file may also stand among the overrides, without ``-c``: ``settle`` finds it there.
    """
    parser.add_argument("-c", "--config", metavar="CONFIG", help=f"{what}; -c may be left out")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file, such as train.epochs=3"
    )


def settle(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Take the one word among the overrides that is no ``key=value`` as the configuration, if there is no ``-c``."""
    if getattr(arguments, "config", "") is not None:
        return
    files = [word for word in arguments.overrides if "=" not in word]
    if len(files) != 1:
        parser.error(f"give one YAML file: harness {arguments.verb} CONFIG (found: {' '.join(files) or 'none'})")
    arguments.config = files[0]
    arguments.overrides = [word for word in arguments.overrides if "=" in word]


def unknown_option(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, option: str, words: Sequence[str]
) -> ConfigError:
    """Return the error for an ``option`` that the verb does not have, with what to type instead."""
    typed, _, value = option.partition("=")
    after = [*words[words.index(option) + 1 :], "-"][0]
    value = value or ("" if after.startswith("-") or "=" in after else after)
    name, verb = typed.lstrip("-").replace("_", "-"), arguments.verb
    known = [each for action in parser._actions for each in action.option_strings]
    near, key = similar(typed, known), None
    if trains := hasattr(arguments, "config"):
        from harness.config import other_names, reference

        key = reference.key_of(name, exact=near is not None)
    if trains and name in _OF_LAUNCH and verb != "launch":
        config = arguments.config or next((word for word in arguments.overrides if "=" not in word), "CONFIG")
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        command = ["harness", "launch", "-c", config, f"--{_OF_LAUNCH[name]}", value or "N", *settings]
        hint = f"type: {shlex.join(command)}"
    elif key and (of_hub := name.replace("-", "_")) in other_names.UNITS:
        hint = f"settings are written as key=value; {other_names.hint(of_hub)}"
    elif key:
        hint = f"settings are written as key=value: {key}={value or 'VALUE'}"
    else:
        hint = f"did you mean {near}?" if near else f"harness {verb} --help lists its options"
    return ConfigError(f"harness {verb} has no option {typed}", where="command line", hint=hint)


def add_run(parser: argparse.ArgumentParser) -> None:
    """``RUN``, ``key=value`` overrides and ``--trust``, as ``arguments.folder``, ``.overrides`` and ``.trust``."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, such as runs/digits, or its URL")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override those of the run, such as task.root=photos",
    )
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """``--trust``, as ``arguments.trust``."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="trust a run that you did not start on this machine: import its code and show its images",
    )


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return an argparse type: a finite number above zero, read by ``kind`` (int or float)."""

    def number(word: str) -> float:
        value = kind(word)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    number.__name__ = f"positive {kind.__name__}"  # argparse quotes this name in its error message
    return number
