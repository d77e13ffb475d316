"""``python -m harness.apex``: the command line, and running a script as python would, with ours in the place of Apex.

Not here: what the script finds there, see ``import_hook``, ``local_rank`` and ``on_cpu``.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from harness.apex import local_rank
from harness.apex.spawn import World

USAGE = """\
usage: python -m harness.apex [--device cpu] SCRIPT [ARGS...]
       python -m harness.apex [--device cpu] -m MODULE [ARGS...]

Run a training script written for NVIDIA Apex as it is: its imports of apex resolve to harness.apex.

  --device cpu      do on the CPU (and with gloo) what the script asks of CUDA (and NCCL); at the end, stderr says what
  --local-rank N    what torch.distributed.launch passes; the script gets it in the spelling that it declares

Under a launcher:
  torchrun --nproc_per_node=2 -m harness.apex SCRIPT [ARGS...]
  python -m torch.distributed.launch --nproc_per_node=2 -m harness.apex SCRIPT [ARGS...]
"""


@dataclass(frozen=True)
class Command:
    """What to run: a script's path or a module's name, its arguments, and how."""

    name: str
    is_module: bool
    args: list[str]
    on_cpu: bool = False
    local_rank: str | None = None


class UsageError(Exception):
    """The command line cannot be understood; the message says what to type."""


def main(argv: list[str]) -> None:
    """Run what ``argv`` (without the program) asks for; what the script raises passes through.

    Exits with 0 after ``--help``, with 2 where the command line is wrong or there is no such script.
    """
    try:
        command = parse(argv)
        if command is None:
            print(USAGE, end="")
            return
        script = _script(command)
    except UsageError as error:
        print(f"harness.apex: {error}\n\n{USAGE}", end="", file=sys.stderr)
        sys.exit(2)
    name = command.name if command.is_module else script.path
    World(name, command.is_module, command.on_cpu, command.local_rank).enter()
    if command.on_cpu:
        from harness.apex.on_cpu.count import report_at_exit

        report_at_exit(aloud=(command.local_rank or local_rank.of_environment() or "0") == "0")
    given = [] if command.local_rank is None else [f"{local_rank.spelling_in(script.text)}={command.local_rank}"]
    sys.argv = [script.path if command.is_module else command.name, *given, *command.args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if command.is_module else os.path.dirname(os.path.realpath(script.path))
    _run(script)


def parse(argv: list[str]) -> Command | None:
    """The command in ``argv``; None if it asks for help. Everything after the script is the script's."""
    words, on_cpu, rank = list(argv), False, None
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            return None
        if word == "-m":
            if not words:
                raise UsageError("-m needs the name of a module after it")
            return Command(words[0], True, words[1:], on_cpu, rank)
        if option not in ("--device", "--local-rank", "--local_rank"):
            if word.startswith("-"):
                raise UsageError(f"unknown option {word!r} before the script; the script's own options come after it")
            return Command(word, False, words, on_cpu, rank)
        if not equals:
            if not words:
                raise UsageError(f"{option} needs a value after it")
            value = words.pop(0)
        if option == "--device":
            if value != "cpu":
                raise UsageError(f"--device takes cpu only, not {value!r}; without it the script uses its own device")
            on_cpu = True
        elif not value.isdecimal():
            raise UsageError(f"{option} takes a number, not {value!r}")
        else:
            rank = value
    raise UsageError("no script to run")


# The script, and running it


@dataclass(frozen=True)
class Script:
    """A program to run: its absolute path, text, code, and what its ``__main__`` says of itself."""

    path: str
    text: str
    source: bytes
    spec: Any = None

    def code(self) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def _script(command: Command) -> Script:
    return _module(command.name) if command.is_module else _file(command.name)


def _file(name: str) -> Script:
    path = os.path.join(os.getcwd(), name)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"can't open the script {name!r}: {error.strerror}") from None
    return Script(path, _text(source), source)


def _module(name: str) -> Script:
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise UsageError(f"no module named {name!r} to run: {error}") from None
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise UsageError(f"no module named {name!r} (or {name}.__main__) to run, with a source file")
    source = spec.loader.get_data(spec.origin)
    return Script(spec.origin, _text(source), source, spec)


def _text(source: bytes) -> str:
    try:
        return importlib.util.decode_source(source)
    except (SyntaxError, UnicodeDecodeError):  # python says what is wrong with it, when it is compiled
        return source.decode("latin-1")


def _run(script: Script) -> None:
    """Run ``script`` as ``__main__``. What it raises passes through, and is shown without frames of ours."""
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=script.path,
        __annotations__={},
        __builtins__=builtins,
        __spec__=script.spec,
        __package__=script.spec.parent if script.spec is not None else None,
        __loader__=script.spec.loader if script.spec is not None else SourceFileLoader("__main__", script.path),
        __cached__=script.spec.cached if script.spec is not None else None,
    )
    sys.modules["__main__"] = main
    try:
        exec(script.code(), main.__dict__)
    except BaseException:
        _hide_own_frames()
        raise


def _hide_own_frames() -> None:
    """Have the exception that ends the script shown from the script's first frame on, by whatever shows it."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = shown_by
        while trace is not None and _is_own(trace):
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_traceback = trace
        shown_by(kind, error, trace)

    sys.excepthook = show


def _is_own(trace: TracebackType) -> bool:
    frame = trace.tb_frame
    return frame.f_code.co_filename in (__file__, _ENTRY) or frame.f_globals.get("__name__") == "runpy"


_ENTRY = os.path.join(os.path.dirname(__file__), "__main__.py")
