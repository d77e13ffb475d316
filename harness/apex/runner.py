"""``python -m harness.apex``: parses the command line and runs a script as python would, with ``apex`` from here.

Processes that the script starts with ``multiprocessing`` are set up in the same way. A spawned process normally imports
the parent's main program first. ``ScriptContext`` makes it import ``harness.apex.spawn_main`` instead, which restores
the context and then imports the program. Forked processes inherit everything.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from harness.apex import call_counter, local_rank
from harness.apex.import_hook import install
from harness.apex.patches import around, patches

USAGE = """\
usage: python -m harness.apex [OPTIONS] SCRIPT [ARGS...]
       python -m harness.apex [OPTIONS] -m MODULE [ARGS...]

Run, without changes, a training script written for NVIDIA Apex: its imports of apex resolve to harness.apex.

  --device cpu         run the script's CUDA calls on the CPU and its NCCL calls on gloo; list both on stderr at exit
  --modernize          restore what Python, numpy, torch and other libraries have removed; list on stderr what was used
  --trust-checkpoints  let torch.load read files that are not plain data, such as whole models; they can run code
  --local-rank N       set by torch.distributed.launch; passed on in the spelling that the script declares
  -h, --help           show this help

With a launcher:
  torchrun --nproc_per_node=2 -m harness.apex SCRIPT [ARGS...]
  python -m torch.distributed.launch --nproc_per_node=2 -m harness.apex SCRIPT [ARGS...]
"""


_ROOT = str(Path(__file__).parents[2])  # where `harness` is imported from; the script's sys.path may not have it
_FLAGS = {"--trust-checkpoints": "trust_checkpoints", "--modernize": "modernize"}


@dataclass(frozen=True)
class ScriptContext:
    """The way a script is run. ``name`` is its absolute path, or the name of a module."""

    name: str
    is_module: bool
    on_cpu: bool = False
    local_rank: str | None = None
    trust_checkpoints: bool = False
    modernize: bool = False

    def set_up(self) -> None:
        """Prepare this process for the script. Undone by ``harness.apex.uninstall``."""
        install(self.trust_checkpoints)
        local_rank.patch_argparse(self.local_rank)
        if self.modernize:
            from harness.apex.modernize import modernize

            modernize()
        if self.on_cpu:
            from harness.apex.on_cpu import redirect_cuda

            redirect_cuda()
        patches.set(spawn, "get_preparation_data", around(spawn.get_preparation_data, self._sent_to_child))

    def _sent_to_child(self, original: Any, name: str) -> dict[str, Any]:
        """Return ``multiprocessing.spawn.get_preparation_data``, extended to send this context to the child."""
        data: dict[str, Any] = original(name)
        data.pop("init_main_from_path", None)
        data["init_main_from_name"] = "harness.apex.spawn_main"
        # `received` removes both before the program sees them
        data["sys_path"] = [_ROOT, *data["sys_path"]]
        data["sys_argv"] = [*data["sys_argv"][:1], json.dumps(asdict(self)), *data["sys_argv"][1:]]
        return data


def received() -> ScriptContext:
    """Return the context that the parent sent to this process."""
    sys.path.remove(_ROOT)
    return ScriptContext(**json.loads(sys.argv.pop(1)))


class UsageError(Exception):
    """The command line is wrong; the message shows what to type."""


def main(argv: list[str]) -> None:
    """Run the script that ``argv`` (without the program's name) names. Exceptions of the script pass through.

    Exits with 2 if the command line is wrong or the script does not exist.
    """
    try:
        parsed = parse(argv)
        if parsed is None:
            print(USAGE, end="")
            return
        context, args = parsed
        script = _module(context.name) if context.is_module else _file(context.name)
    except UsageError as error:
        print(f"harness.apex: {error}\n\n{USAGE}", end="", file=sys.stderr)
        sys.exit(2)
    replace(context, name=context.name if context.is_module else script.path).set_up()
    listed = {call_counter.ON_CPU: context.on_cpu, call_counter.MODERNIZE: context.modernize}
    if any(listed.values()) and (context.local_rank or local_rank.from_environment() or "0") == "0":
        call_counter.print_at_exit([option for option in listed if listed[option]])
    given = [] if context.local_rank is None else [f"{local_rank.spelling_for(script.text)}={context.local_rank}"]
    sys.argv = [script.path if context.is_module else context.name, *given, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if context.is_module else os.path.dirname(os.path.realpath(script.path))
    _run(script, context)


def parse(argv: list[str]) -> tuple[ScriptContext, list[str]] | None:
    """Return how to run the script that ``argv`` names, and the script's own arguments; None if it asks for help.

    The context's ``name`` is as typed. All arguments after the script belong to the script.
    """
    words, options = list(argv), dict[str, Any]()
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            return None
        if word in _FLAGS:
            options[_FLAGS[word]] = True
            continue
        if word == "-m":
            if not words:
                raise UsageError("-m needs the name of a module")
            return ScriptContext(words[0], is_module=True, **options), words[1:]
        if option not in ("--device", "--local-rank", "--local_rank"):
            if word.startswith("-"):
                raise UsageError(f"unknown option {word!r}; options of the script go after the script")
            return ScriptContext(word, is_module=False, **options), words
        if not equals:
            if not words:
                raise UsageError(f"{option} needs a value")
            value = words.pop(0)
        if option == "--device":
            if value != "cpu":
                raise UsageError(
                    f"--device accepts only cpu, not {value!r}; leave it out to run on the script's device"
                )
            options["on_cpu"] = True
        elif not value.isdecimal():
            raise UsageError(f"{option} must be a number, not {value!r}")
        else:
            options["local_rank"] = value
    raise UsageError("no script given")


# The script, and running it


@dataclass(frozen=True)
class Script:
    """A program to run: its absolute path, its source, and the ``__spec__`` of its ``__main__`` module."""

    path: str
    source: bytes
    spec: Any = None

    @property
    def text(self) -> str:
        try:
            return importlib.util.decode_source(self.source)
        except (SyntaxError, UnicodeDecodeError):  # reported by python when it compiles the source
            return self.source.decode("latin-1")


def _file(name: str) -> Script:
    """Return the script at the path ``name``; raise UsageError if it cannot be read."""
    path = os.path.join(os.getcwd(), name)
    try:
        with open(path, "rb") as file:
            return Script(path, file.read())
    except OSError as error:
        raise UsageError(f"cannot open the script {name!r}: {error.strerror}") from None


def _module(name: str) -> Script:
    """Return the module ``name``, or its ``__main__``, as a script; raise UsageError if there is no source file."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot run module {name!r}: {error}") from None
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise UsageError(f"cannot run module {name!r}: found no source file for it or for {name}.__main__")
    return Script(spec.origin, spec.loader.get_data(spec.origin), spec)


def _run(script: Script, context: ScriptContext) -> None:
    """Run ``script`` as ``__main__``. Its exceptions pass through; their tracebacks start at the script."""
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
        exec(compile(script.source, script.path, "exec", dont_inherit=True), main.__dict__)
    except BaseException:
        _hide_own_frames(context)
        raise


def _hide_own_frames(context: ScriptContext) -> None:
    """Remove this package's frames from the traceback of the exception that ends the script, and name ``--device cpu``
    if it wanted a CUDA device where there is none, ``--modernize`` if it wanted what a library has removed."""
    original = sys.excepthook  # python's, or one that the script installed

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = original
        while trace is not None and _is_own(trace):
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_traceback = trace
        original(kind, error, trace)
        torch = sys.modules.get("torch")
        wanted = re.search("cuda|nvidia", str(error), re.IGNORECASE)
        if wanted and not context.on_cpu and torch is not None and not torch.cuda.is_available():
            hint = "harness.apex: torch can use no CUDA device here; try --device cpu before the script"
            print(hint, file=sys.stderr)
        if not context.modernize and isinstance(error, AttributeError | ImportError) and _is_removed(error):
            print("harness.apex: try --modernize before the script, which restores this", file=sys.stderr)

    sys.excepthook = excepthook


def _is_removed(error: AttributeError | ImportError) -> bool:
    """Return True if ``error`` is about a name or a module that ``--modernize`` restores."""
    from harness.apex.modernize.table import NAMES, RENAMED_MODULES

    if isinstance(error, ModuleNotFoundError):
        return "." in str(error.name) and error.name in NAMES.keys() | RENAMED_MODULES.keys()
    owner = getattr(getattr(error, "obj", None), "__name__", "")
    words = {*re.findall(r"[\w.]+", str(error)), owner, error.name}
    return any(module in words and not words.isdisjoint(names) for module, names in NAMES.items())


def _is_own(trace: TracebackType) -> bool:
    frame = trace.tb_frame
    own_files = (__file__, str(Path(__file__).with_name("__main__.py")))
    return frame.f_code.co_filename in own_files or frame.f_globals.get("__name__") == "runpy"
