"""A lease on a job: of all processes of all machines that share a store, one does the job, and the next when it dies.

File locks notice a death at once, but on some shared file systems they count on one machine only, and a URL has none.
A lease is a small file that its owner renews. Whoever waits takes it over when its owner is a process of this machine
that has ended. If the owner is stopped, or on another machine, it is taken over when it has not changed for
``SILENT_S`` on the own clock, so the clocks of machines may differ.

An owner that was stopped for that long and then continues makes two owners. So a result must appear under its name only
when it is complete, and it must not matter which of two owners wrote it.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from harness.distributed.processes import Identity
from harness.runs.storage import SharedStore

RENEWED_S = 2.0
SILENT_S = 30.0
_UNCERTAIN = ("", "T", "t", "X")  # states of proc(5): of another machine, stopped, ended


class Lease:
    """The right to do the job that the file ``name`` of ``store`` stands for."""

    def __init__(self, store: SharedStore, name: str) -> None:
        self._store, self._name = store, name
        self._id = secrets.token_hex(8)
        self._seen, self._since = "", time.monotonic()
        self._renewing: threading.Thread | None = None
        self._released = threading.Event()

    def acquire(self, alone: bool = True) -> bool:
        """Take the lease if it is free, or its owner dead or silent. Call it again and again until it returns True.

        ``alone``: this process holds a file lock on the same job, which other processes of the machine respect. Without
        it, only a silent lease is taken. Raises OSError or ConfigError like the store.
        """
        text = self._store.read(self._name)
        if text != self._seen:
            self._seen, self._since = text, time.monotonic()
        state = _state_of_owner(text)
        # A running process of this machine may be silent because its disk is slow.
        is_silent = state in _UNCERTAIN and time.monotonic() - self._since > SILENT_S
        if is_silent or (alone and state == "X"):
            self._store.remove([self._name])
        elif text or not alone:
            return False
        if not self._store.create(self._name, self._text(0)):
            return False
        self._released.clear()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return True

    def is_held(self) -> bool:
        """True until another process takes the lease over."""
        return self._id in self._store.read(self._name)

    def release(self) -> None:
        self._released.set()
        if self._renewing is not None:
            self._renewing.join(SILENT_S)  # or it could write the file again
        if self.is_held():
            self._store.remove([self._name])

    def _renew(self) -> None:
        for number in itertools.count(1):
            if self._released.wait(RENEWED_S):
                return
            with suppress(Exception):  # a failure that lasts makes the lease silent
                if not self.is_held():
                    return
                self._store.write(self._name, self._text(number))

    def _text(self, number: int) -> str:
        return json.dumps({"id": self._id, "owner": asdict(Identity.of_this_process()), "renewed": number}) + "\n"


def _state_of_owner(text: str) -> str:
    """``Identity.state`` of the process that wrote a lease. "X" for this process itself, which has no lease if it asks
    for one."""
    with suppress(ValueError, KeyError, TypeError):
        owner = Identity(**json.loads(text)["owner"])
        return "X" if owner == Identity.of_this_process() else owner.state()
    return ""
