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


def add_config(parser: argparse.ArgumentParser, what: str = "a YAML file, as harness init writes") -> None:
    """Add ``-c CONFIG``, with ``what`` as its help, and ``key=value``, as ``arguments.config`` and ``.overrides``.

    The file may also stand among the overrides, without ``-c``: ``find_config`` finds it there.
    """
    parser.add_argument("-c", "--config", metavar="CONFIG", help=f"{what}; -c may be left out")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file, such as train.epochs=3"
    )


def find_config(arguments: argparse.Namespace, parser: argparse.ArgumentParser, takes_program: bool) -> None:
    """Take the one word among the overrides that is no ``key=value`` as the configuration, if there is no ``-c``.
    ``takes_program``: the verb also takes a command."""
    if getattr(arguments, "config", "") is not None:
        return
    files = [word for word in arguments.overrides if "=" not in word]
    if len(files) != 1:
        from harness.config import reference

        hint = f"give one YAML file: harness {arguments.verb} CONFIG"
        words = [word for word in (each.strip("=") for each in arguments.overrides) if word]
        for word, value in zip(words, words[1:], strict=False):
            if "=" not in word + value and (key := reference.key_of(word.rpartition(".")[2], exact=True)):
                hint += f"; settings are written without spaces: {word if '.' in word else key}={value}"
        if takes_program:
            hint += f", or a command after --: harness {arguments.verb} -- {shlex.join(arguments.overrides)}"
        parser.error(f"{hint} (found: {' '.join(arguments.overrides) if files else 'none'})")
    arguments.config = files[0]
    arguments.overrides = [word for word in arguments.overrides if "=" in word]


def unknown_option(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, option: str, words: Sequence[str]
) -> ConfigError:
    """Return the error for an ``option`` that the verb does not have, with what to type instead."""
    typed, _, value = option.partition("=")
    name, value = typed.lstrip("-").replace("_", "-"), value or _value_after(option, words)
    nearest = similar(typed, [each for action in parser._actions for each in action.option_strings])
    hint = _launch_hint(arguments, name, value, words) or _setting_hint(arguments, name, value, exact=bool(nearest))
    if arguments.verb == "init" and nearest in (None, "--help"):
        hint = "harness init CSV finds the columns by their contents; correct label_column and others in its YAML file"
        if name == "force":
            hint = "it overwrites nothing: remove the file first, or write another one with --out FILE"
    hint = hint or (f"did you mean {nearest}?" if nearest else f"harness {arguments.verb} --help lists its options")
    return ConfigError(f"harness {arguments.verb} has no option {typed}", where="command line", hint=hint)


def _value_after(option: str, words: Sequence[str]) -> str:
    """Return the word after ``option``, if it can be its value; else an empty text."""
    after = next(iter(words[words.index(option) + 1 :]), "-")
    return "" if after.startswith("-") or "=" in after else after


def _launch_hint(arguments: argparse.Namespace, name: str, value: str, words: Sequence[str]) -> str | None:
    """Return the command to type if a verb that reads a configuration is given an option of ``harness launch``."""
    if not hasattr(arguments, "config") or name not in _OF_LAUNCH or arguments.verb == "launch":
        return None
    files = [word for word in arguments.overrides if "=" not in word and word != value]
    config = arguments.config or next(iter(files), "CONFIG")
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    command = ["harness", "launch", "-c", config, f"--{_OF_LAUNCH[name]}", value or "N", *settings]
    return f"type: {shlex.join(command)}"


def _setting_hint(arguments: argparse.Namespace, name: str, value: str, exact: bool) -> str | None:
    """Return how to write the setting that a verb that reads a configuration is given as an option. ``exact``: only if
    it is spelled like one."""
    if not hasattr(arguments, "config"):
        return None
    from harness.config import hugging_face_names, reference

    key, their_name = reference.key_of(name, exact=exact), name.replace("-", "_")
    if not key:
        return None
    if their_name in hugging_face_names.UNITS:
        return f"settings are written as key=value; {hugging_face_names.hint(their_name)}"
    return f"settings are written as key=value: {key}={value or 'VALUE'}"


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add ``RUN``, ``key=value`` overrides and ``--trust``, as ``arguments.folder``, ``.overrides`` and ``.trust``."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, such as runs/digits, or its URL")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without one, argparse calls it required
        metavar="key=value",
        help="settings that override the run's, such as task.root=photos",
    )
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust``, as ``arguments.trust``."""
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
