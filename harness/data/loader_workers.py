"""Signals in loader processes: which they obey, and how they exit with the rank that they load for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any


def in_loader_worker(_: int) -> None:
    """Set up the signals of a loader process so that only its parent ends it.

    Launchers and schedulers signal every process of a rank. If a loader died of the signal, the rank would fail while
    it writes its checkpoint. So Ctrl-C and SIGUSR1 are ignored, and SIGTERM is, too, unless the parent sent it. When
    the parent is killed, a loader exits within a second: until then it holds the parent's connections open, and no
    peer notices the loss.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if sys.platform == "linux" and rank is not None:  # other systems do not report the sender of a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with, args=(rank, os.getppid()), name="harness-signals", daemon=True).start()


def _exit_with(rank: Any, parent_pid: int) -> None:
    # With the start method forkserver, the parent process is a server that lives as long as this process.
    while rank.is_alive() and os.getppid() == parent_pid:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)
