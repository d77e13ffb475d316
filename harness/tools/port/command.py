"""``harness port``: what a script uses of Apex, and a patch that switches its imports to harness.apex."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import EXIT_DONE, ConfigError, HarnessError, reason, remedy

if TYPE_CHECKING:
    from harness.tools.port.uses import ApexScript

VERB = "port"
HELP = "list what a script written for Apex uses, and write a patch that switches its imports to harness.apex"
EXIT_BY_HAND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="Python file to read; it is not run or changed")
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a patch to FILE (default: SCRIPT.patch; - for standard output). Apply it with: patch SCRIPT FILE",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the uses; return 1 if harness.apex does not have one of them. Raises HarnessError if the patch cannot be
    written."""
    from harness.tools.port import imports
    from harness.tools.port.uses import ApexScript

    script = ApexScript(arguments.script)
    to_stdout = arguments.write == "-"
    text, is_complete = _report(script)
    print(text, file=sys.stderr if to_stdout else sys.stdout)
    if arguments.write is not None and (patch := imports.patch(script)):
        if to_stdout:
            sys.stdout.write(patch)
        else:
            path = arguments.script
            out = Path(arguments.write) if arguments.write else path.with_name(f"{path.name}.patch")
            _write(out, patch.encode(script.encoding))
            print(f"\nwrote {out}; to apply it: patch {path} {out}")
    return EXIT_DONE if is_complete else EXIT_BY_HAND


def _report(script: ApexScript) -> tuple[str, bool]:
    """(the uses by line, whether harness.apex has all of them)."""
    from harness.tools.port.uses import PAGE

    if not script.imports:
        return f"{script.path} does not import Apex", True
    uses = script.uses()
    lines = [f"{script.path} runs as it is with: python -m harness.apex {script.path}", ""]
    width = max((len(use.name) for use in uses), default=0)
    for use in uses:
        absent = "harness.apex does not have it: see docs/apex.md, or run the script for a suggestion"
        lines.append(f"{use.line:>5}  {use.name:<{width}}  {f'{PAGE}#{use.section}' if use.section else absent}")
    return "\n".join(lines), all(use.section for use in uses)


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
