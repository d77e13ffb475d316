"""``harness verify-resume``: kill a training at chosen moments, resume it, and compare the result with an undisturbed
one; of a configuration of the harness (``-c``), or of any command (after ``--``)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import arguments as shared
from harness.config import plugins
from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.audit.audit import AuditRequest

HELP = (
    "kill and resume a short run of a configuration, or of a command after --, and check that it is exact bit for bit"
)
TAKES_PROGRAM = True

_KILLS = 6  # of a configuration
_OF_CONFIG = ("engine", "nproc", "full")
_OF_PROGRAM = ("resume", "checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "harness verify-resume [options] -c CONFIG [key=value ...]\n       harness verify-resume [options] -- COMMAND"
    )
    shared.add_config(parser)
    parser.add_argument(
        "--kills",
        type=_kills,
        metavar="N",
        help=f"number of kills at random moments (default: {_KILLS}; of a command: 1, in the middle; all: each kind)",
    )
    parser.add_argument(
        "--steps",
        type=shared.positive(int),
        metavar="N",
        help="optimizer steps to train (default: one and a half epochs, or 24 steps if an epoch has more than 60; of a "
        "command: until it ends)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the kill times (default: 0)")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="where to keep the starts (default: a temporary folder, which is kept if they differ)",
    )
    parser.add_argument("--signal", choices=("KILL", "TERM"), help="how it is killed (default: KILL)")
    parser.add_argument(
        "--timeout", type=shared.positive(float), metavar="S", help="seconds without progress (default: 600)"
    )
    parser.add_argument("--report", type=Path, metavar="PAGE", help="write a page, such as resume.html")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    config = parser.add_argument_group("only with -c CONFIG")
    config.add_argument(
        "--engine", metavar="NAME", help=f"{', '.join(plugins.names('engine'))} (default: launch.engine)"
    )
    config.add_argument(
        "--nproc", type=_numbers, metavar="N[,N...]",
        help="ranks per machine; several numbers, such as 1,2,4: another one for each start (parallel.logical_ranks)",
    )  # fmt: skip
    config.add_argument("--full", action="store_true", help="train the configuration without shortening it")
    program = parser.add_argument_group(
        "only with -- COMMAND",
        "{out} in COMMAND stands for an empty folder, {latest} in TEXT for the newest checkpoint. TEXT is added at the "
        "end of COMMAND, or in place of {resume}.",
    )
    program.add_argument(
        "--resume",
        metavar="TEXT",
        help="what a resumed start adds, such as an option and {latest}; write --resume=TEXT if TEXT is one option "
        "(default: nothing; "
        "the command resumes by itself)",
    )
    program.add_argument(
        "--checkpoints", metavar="GLOB", help="files or folders for {latest} (default: what is observed)"
    )


def _kills(word: str) -> str:
    """ "all", or a number above zero as text. Raises ArgumentTypeError."""
    try:
        return word if word == "all" else str(int(shared.positive(int)(word)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is neither a positive number nor all") from None


def _numbers(text: str) -> list[int]:
    """ "1,2,4" as numbers of ranks. Raises ArgumentTypeError."""
    try:
        return [int(shared.positive(int)(word)) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, or several such as 1,2,4") from None


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict. Return 0 if the resumed run equals the undisturbed one, 1 if not, 3 if nothing can be said.
    Raises HarnessError if a configuration is wrong, and ConfigError if a command cannot be started."""
    _check(arguments)
    given = {
        "kills": arguments.kills, "signal": arguments.signal, "timeout_s": arguments.timeout,
        "folder": arguments.folder, "seed": arguments.seed,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    make = _of_config if arguments.program is None else _of_program
    request, said = make(arguments, options)
    from harness.audit import page
    from harness.audit.audit import audit
    from harness.runs.files import require_output, write_atomically

    if arguments.report is not None:
        require_output(arguments.report, ())
    progress = sys.stderr if arguments.json else sys.stdout
    for text in said:
        print(text, file=progress)
    verdict = audit(request, lambda text: print(text, file=progress, flush=True))
    if arguments.json:
        print(json.dumps(verdict.as_json(), indent=2))
    else:
        for line in page.lines(verdict):
            print(line)
    if arguments.report is not None:
        write_atomically(arguments.report, page.html(verdict))
    return verdict.exit_code


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError unless there is either a configuration or a command, with its own options."""
    if arguments.program is None:
        if arguments.config is None:
            raise _usage("there is neither -c CONFIG nor a command after --")
        _refuse(arguments, _OF_PROGRAM, "needs a command after --")
        return
    if arguments.config is not None or arguments.overrides:
        raise _usage("there are both settings of the harness (-c CONFIG, key=value) and a command after --")
    if not arguments.program:
        raise _usage("there is no command after --")
    _refuse(arguments, _OF_CONFIG, "needs -c CONFIG")


def _usage(message: str) -> ConfigError:
    return ConfigError(
        message,
        where="command line",
        hint="type harness verify-resume -c my.yaml, or harness verify-resume -- python train.py --output {out}",
    )


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise _usage(f"--{name} {why}")


def _of_config(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[AuditRequest, list[str]]:
    from harness.config import loader

    nproc = arguments.nproc or []
    engine = [f"launch.engine={arguments.engine}"] if arguments.engine else []
    overrides = [*arguments.overrides, *engine, *(f"launch.nproc={number}" for number in nproc[:1])]
    loader.load(arguments.config, overrides)  # errors come before the import of torch, which takes seconds
    from harness.tools.verify_resume import verification

    options.setdefault("kills", str(_KILLS))
    return verification.request(arguments.config, overrides, nproc, arguments.steps, arguments.full, **options)


def _of_program(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[AuditRequest, list[str]]:
    from harness.audit.audit import AuditRequest

    given = {"resume": arguments.resume, "checkpoints": arguments.checkpoints, "steps": arguments.steps}
    options |= {name: value for name, value in given.items() if value is not None}
    return AuditRequest(arguments.program, **options), []
