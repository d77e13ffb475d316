"""The key-value store of a launch, through which its ranks connect: rank 0 opens it, unless the launcher holds one.

All waits are bounded, even for a store that accepts connections but never responds, for which torch has no limit.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.distributed.launch_env import Launch
from harness.distributed.threads import Background
from harness.errors import HarnessError, LaunchError, TrainingError, first_line

_ANSWER_S = 10.0  # for the store to answer a request, which takes milliseconds
_PAUSES_S = 0.02, 0.25  # first and longest pause between two requests; 1,024 ranks then make 4,000 per second

HINT = (
    "check that the ranks on all machines were started with the same MASTER_ADDR, MASTER_PORT and number of machines, "
    "and that the port is open; a rank that failed before it connected has printed why"
)

Value = TypeVar("Value")


class PeersMissing(TrainingError):
    """Another rank has not arrived, or is gone: it failed, or was never started."""


class Patience:
    """How long this rank waits for the others, ``timeout_s`` in all, and for the answer to its present request."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.until = time.monotonic() + timeout_s
        self.limit = self.until + _ANSWER_S
        """Time (time.monotonic) by which the present request must be answered."""

    def expect(self, answer_s: float | None = None) -> None:
        self.limit = time.monotonic() + (answer_s or _ANSWER_S)

    def poll(self, happened: Callable[[], bool], until: float | None = None, answer_s: float | None = None) -> bool:
        """Poll ``happened`` until it is true; False at the time ``until``. Each call may take ``answer_s``."""
        end, pause_s = self.until if until is None else until, _PAUSES_S[0]
        while True:
            self.expect(answer_s)
            if happened():
                return True
            if time.monotonic() + pause_s > end:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSES_S[1])

    def bound(self, work: Callable[[], Value], late: Callable[[], Exception]) -> Value:
        """``work()``, which uses this object; raises ``late()`` if a request is not answered. A signal meanwhile is
        handled at once."""
        future = Background(work, "harness-store")
        while wait([future], 0.1).not_done:
            if time.monotonic() > self.limit:
                raise late()
        return future.result()


def address(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def hosts_store(launch: Launch) -> bool:
    """True if the store ends with this process."""
    return launch.rank == 0 and not launch.store_is_held


def open_store(launch: Launch, patience: Patience) -> TCPStore:
    """The store of ``launch``. Raises LaunchError or PeersMissing."""
    hosts = hosts_store(launch)
    if hosts:
        _require_name(launch, patience)
    while True:
        if not hosts:
            _await_listener(launch, patience)
            patience.expect()
        left_s = patience.until - time.monotonic() if hosts else _ANSWER_S
        try:
            return TCPStore(
                launch.master_addr, launch.master_port, is_master=hosts, timeout=timedelta(seconds=max(left_s, 1.0)),
                wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            if hosts and "EADDRINUSE" in str(error):
                raise LaunchError(
                    f"rank 0 cannot open port {launch.master_port}, where the ranks meet: it is in use",
                    hint="choose another MASTER_PORT, or end the program that uses it (ss -ltnp shows it)",
                ) from None
            if "invalid value" in str(error):  # an answer, but not in the protocol of the store
                raise unanswered(launch) from None
            if hosts or time.monotonic() > patience.until:
                raise _unreachable(launch, patience, error) from None
            time.sleep(_PAUSES_S[1])  # a proxy may accept connections before rank 0 does


def _require_name(launch: Launch, patience: Patience) -> None:
    """Raise LaunchError if MASTER_ADDR, where rank 0 itself is, cannot be found. torch would wait for it."""
    patience.expect(patience.timeout_s + _ANSWER_S)
    try:
        socket.getaddrinfo(launch.master_addr, launch.master_port)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"rank 0 cannot resolve MASTER_ADDR={launch.master_addr}, where the other ranks reach it: "
            f"{getattr(error, 'strerror', None) or first_line(error)}",
            hint="set MASTER_ADDR to the name or address of the machine of rank 0",
        ) from None
    patience.expect()


def _await_listener(launch: Launch, patience: Patience) -> None:
    """Wait until rank 0 has opened its port. torch's own wait takes up to twice as long, and prints the stack of its
    C++ code at every attempt."""
    failure: OSError | UnicodeError = OSError()

    def listens() -> bool:
        nonlocal failure
        try:
            left_s = min(2.0, max(0.1, patience.until - time.monotonic()))
            socket.create_connection((launch.master_addr, launch.master_port), left_s).close()
        except (OSError, UnicodeError) as error:
            failure = error
            return False
        return True

    # The look-up of a name may take long.
    if not patience.poll(listens, answer_s=patience.timeout_s + _ANSWER_S):
        raise _unreachable(launch, patience, failure) from None


def _unreachable(launch: Launch, patience: Patience, error: Exception) -> HarnessError:
    wrong_name = isinstance(error, (socket.gaierror, UnicodeError))
    reason = getattr(error, "strerror", None) or first_line(error)
    found = (LaunchError if wrong_name else PeersMissing)(
        f"rank {launch.rank} of {launch.world_size} could not reach rank 0 at {address(launch)} within "
        f"{patience.timeout_s:g} s: {reason}",
        hint=HINT,
    )
    found.unmet = True
    return found


def unanswered(launch: Launch) -> HarnessError:
    return PeersMissing(
        f"{address(launch)} accepts connections, but rank 0 does not answer there",
        hint="if rank 0 has printed that the port is in use, choose another MASTER_PORT; otherwise rank 0 is hung",
    )
