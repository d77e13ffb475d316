"""The program ``harness``, which ``python -m harness`` and driver.py start, too: the command line, with Ctrl-C working
from its first moment on. Import nothing here that takes time."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """``harness.cli.command``, whose imports take a tenth of a second, or several seconds on a slow disk."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not under nohup, or in a background job
        signal.signal(signal.SIGINT, _end)
    from harness import cli

    signal.signal(signal.SIGINT, before)  # cli sets its own
    cli.command(argv)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of the ranks of a machine, one tells the user
        os.write(2, b"interrupted (SIGINT)\n")
    os._exit(128 + number)


if __name__ == "__main__":
    command()
