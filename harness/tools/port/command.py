"""``harness port``: what to change in a script of the Apex era, and a patch that does it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.errors import EXIT_DONE, ConfigError, HarnessError, reason, remedy

VERB = "port"
HELP = "report what to change in a script written for Apex, and write a patch that ports it to torch or harness.apex"
EXIT_BY_HAND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="Python file to read; it is not run or changed")
    parser.add_argument(
        "--to",
        choices=["torch", "harness"],
        default="torch",
        help="port to torch.amp and torch's classes (default), or to imports of harness.apex",
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a patch to FILE (default: SCRIPT.patch; - for standard output). Apply it with: patch SCRIPT FILE",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if something is left to do by hand. Raises HarnessError if the patch cannot be
    written."""
    from harness.tools.port import porting

    ported = porting.port(arguments.script, arguments.to)
    to_stdout = arguments.write == "-"
    print(ported.report(), file=sys.stderr if to_stdout else sys.stdout)
    if arguments.write is not None and (patch := ported.patch()):
        if to_stdout:
            sys.stdout.write(patch)
        else:
            script = arguments.script
            out = Path(arguments.write) if arguments.write else script.with_name(f"{script.name}.patch")
            _write(out, patch.encode(ported.source.encoding))
            print(f"\nwrote {out}; to apply it: patch {script} {out}")
    return EXIT_DONE if ported.is_complete else EXIT_BY_HAND


def _write(out: Path, patch: bytes) -> None:
    """Write the patch to a new file, or to one that holds it already."""
    try:
        with open(out, "xb") as file:
            file.write(patch)
    except FileExistsError:
        if out.is_file() and out.read_bytes() == patch:
            return
        raise ConfigError(
            "this file already exists", where=str(out), hint="remove it, or choose another with --write FILE"
        ) from None
    except OSError as error:
        raise HarnessError(
            f"cannot write the patch: {reason(error)}",
            where=str(out),
            hint=remedy(error, "or choose another file with --write FILE"),
        ) from None
