"""``harness port``: what a script uses of Apex, and a patch that switches its imports to harness.apex."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import EXIT_DONE

if TYPE_CHECKING:
    from harness.tools.port.uses import ApexScript

HELP = "list what a script written for Apex uses, or print a patch that switches its imports to harness.apex"
EXIT_BY_HAND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="Python file to read; it is not run or changed")
    parser.add_argument(
        "--patch", action="store_true", help="print the patch, for: harness port SCRIPT --patch | patch SCRIPT"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the uses; return 1 if harness.apex does not have one of them."""
    from harness.tools.port import imports
    from harness.tools.port.uses import ApexScript

    script = ApexScript(arguments.script)
    text, is_complete = _report(script)
    print(text, file=sys.stderr if arguments.patch else sys.stdout)
    if arguments.patch:
        sys.stdout.buffer.write(imports.patch(script).encode(script.encoding))
        sys.stdout.flush()
    return EXIT_DONE if is_complete else EXIT_BY_HAND


def _report(script: ApexScript) -> tuple[str, bool]:
    """Return (the uses by line, whether harness.apex has all of them)."""
    from harness.tools.port.uses import PAGE

    if not script.imports:
        return f"{script.path} does not import Apex", True
    uses = script.uses()
    is_complete = all(use.section for use in uses)
    how = "runs as it is" if is_complete else "needs changes where harness.apex lacks what it uses; try it"
    lines = [
        f"{script.path} {how} with: python -m harness.apex {script.path}",
        "if it uses what a library has removed, such as np.float: with --modernize before the script",
        "",
    ]
    width = max((len(use.name) for use in uses), default=0)
    for use in uses:
        absent = "harness.apex does not have it: see docs/apex.md, or run the script for a suggestion"
        lines.append(f"{use.line:>5}  {use.name:<{width}}  {f'{PAGE}#{use.section}' if use.section else absent}")
    return "\n".join(lines), is_complete
