"""``harness compare RUN_A RUN_B``: what differs between two runs, in what they were told and in what they came to.

What is found out lives in ``harness.compare``; here is the command.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.compare import found, page
from harness.errors import EXIT_DONE
from harness.runs.files import finite

EXIT_DIFFERENT = 1  # as diff has it


def main(one: Path, other: Path, as_json: bool) -> int:
    """Print the comparison; return 0 if both are bitwise the same, 1 if not. Raises ConfigError (exit code 2) where a
    path names no run."""
    result = found.compare(found.side(one), found.side(other))
    if as_json:
        print(json.dumps(finite(found.as_plain(result)), indent=1, default=str))
    else:
        print(page.text(result), end="")
    return EXIT_DONE if result.same else EXIT_DIFFERENT
