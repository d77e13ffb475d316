"""``python -m harness VERB``: the command ``harness`` where it is not on the path."""

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
