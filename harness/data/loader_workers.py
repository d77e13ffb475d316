"""Loader processes: which signals they obey, and how they end with the rank they load for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any


def in_loader_worker(_: int) -> None:
    """Signal rules of a loader process: only its parent ends it.

    Launchers and schedulers signal every process of a rank. A loader that died of it would fail the rank, which is
    about to write its checkpoint; so Ctrl-C and SIGUSR1 are ignored, and SIGTERM too unless it comes from the parent.
    A parent that was killed takes it along within a second: until then it holds the parent's connections open, and no
    peer notices.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if sys.platform == "linux" and rank is not None:  # elsewhere a signal's sender is not told
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(rank, os.getppid()), name="harness-signals", daemon=True).start()


def _end_with(rank: Any, above: int) -> None:
    # Under the start method forkserver the process above is a server that lives as long as this one.
    while rank.is_alive() and os.getppid() == above:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)
