"""``python -m harness.apex``: runs a script written for Apex; see ``runner``."""

from __future__ import annotations

import sys

from harness.apex.runner import main

if __name__ == "__main__":
    main(sys.argv[1:])
