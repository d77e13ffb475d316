"""The key-value store of a launch, through which its ranks connect: rank 0 opens it, unless the launcher holds one.

All waits are bounded. torch has no limit for the connection to a program that accepts it but never responds, nor for
most requests to a TCPStore, such as ``check`` and ``compare_set``: they block in C++ for as long as the process that
holds the store is frozen.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from harness.distributed.launch_env import Launch
from harness.distributed.threads import Background
from harness.errors import HarnessError, LaunchError, TrainingError, first_line

LIMIT_S = 5.0
_ANSWER_S = 10.0  # for the store to accept a connection, which takes milliseconds
_ABSENT = "absent"  # no key has this value
_PAUSES_S = 0.02, 0.25  # first and longest pause between two requests; 1,024 ranks then make 4,000 per second

HINT = (
    "check that the ranks on all machines were started with the same MASTER_ADDR, MASTER_PORT and number of machines, "
    "and that the port is open; a rank that failed before it connected has printed why"
)

Value = TypeVar("Value")


class PeersMissing(TrainingError):
    """Another rank has not arrived, or is gone: it failed, or was never started."""


class StoreTimeout(Exception):
    """The process that holds the store did not answer within the limit."""


class LimitedStore:
    """The requests of ``store`` that the harness makes. Each raises StoreTimeout after ``limit_s``, or if the machine
    allows no more threads, and whatever ``store`` raises, such as DistNetworkError if the connection is gone."""

    def __init__(self, store: Store, limit_s: float = LIMIT_S) -> None:
        self._store, self._limit_s = store, limit_s
        self._busy = Lock()  # one request at a time, as in TCPStore; held until the request returns, however late
        self._overdue: Future[Any] | None = None  # the last request that exceeded its limit
        self._gone: DistNetworkError | None = None

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def find(self, key: str) -> str:
        """Return the value of ``key``; empty if it does not exist."""
        value = self.compare_set(key, _ABSENT, _ABSENT)  # which returns what it expects of a key that does not exist
        return "" if value == _ABSENT else value

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def append(self, key: str, value: str) -> None:
        """Add ``value`` at the end of that of ``key``, which is created if it does not exist."""
        self._ask(lambda: self._store.append(key, value))  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set ``key`` to ``value`` if it has the value ``expected`` (empty: if it does not exist); return its value."""
        return self._ask(lambda: str(self._store.compare_set(key, expected, value).decode()))

    def _ask(self, request: Callable[[], Value]) -> Value:
        """Return the result of ``request``, made by a daemon thread of its own, which may stay behind."""
        if self._gone:  # another request would fail, too, and print a C++ stack
            raise self._gone
        until = time.monotonic() + self._limit_s
        if (self._overdue and not self._overdue.done()) or not self._busy.acquire(timeout=self._limit_s):
            raise StoreTimeout

        def work() -> Value:
            try:
                return request()
            except DistNetworkError as error:
                self._gone = error
                raise
            finally:
                self._busy.release()

        try:
            future = Background(work, "harness-store")
        except RuntimeError as error:
            self._busy.release()
            raise StoreTimeout from error
        try:
            return _result(future, max(until - time.monotonic(), 0.0))
        except StoreTimeout:
            self._overdue = future
            raise


def pauses(launch: Launch) -> Iterator[None]:
    """Yield without an end, after pauses that grow, for a loop that polls. Raises PeersMissing once the launcher is
    gone, since nobody would end this process then."""
    pause_s, longest_s = _PAUSES_S
    while not launch.orphaned:
        yield
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    raise PeersMissing("the launcher exited before all ranks had connected")


def address(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def hosts_store(launch: Launch) -> bool:
    """Return True if the store ends with this process."""
    return launch.rank == 0 and not launch.store_is_held


def open_store(launch: Launch, timeout_s: float) -> TCPStore:
    """Return the store of ``launch``. Raises LaunchError or PeersMissing, soon after ``timeout_s``. A signal meanwhile
    is handled at once: threads make the calls that may block."""
    until, hosts = time.monotonic() + timeout_s, hosts_store(launch)
    for _ in pauses(launch):
        try:
            _require_reachable(launch, hosts, max(until - time.monotonic(), 0.1))
            limit = timedelta(seconds=max(timeout_s, 1.0) if hosts else _ANSWER_S)
            return _result(Background(partial(_connect, launch, hosts, limit), "harness-store"), _ANSWER_S)
        except StoreTimeout:
            raise unanswered(launch) from None
        except (RuntimeError, ValueError, OSError) as error:  # ValueError: of a name such as "a..b", too
            if "invalid value" in str(error):  # an answer, but not in the protocol of the store
                raise unanswered(launch) from None
            if hosts or time.monotonic() > until:
                raise _unreachable(launch, timeout_s, error) from None
    raise AssertionError("unreachable: the poll has no end")


def unanswered(launch: Launch) -> HarnessError:
    """Return the error of a rank whose store accepts connections and answers no request."""
    return PeersMissing(
        f"{address(launch)} accepts connections, but rank 0 does not answer there",
        hint="if rank 0 has printed that the port is in use, choose another MASTER_PORT; otherwise rank 0 is hung",
    )


def _require_reachable(launch: Launch, hosts: bool, left_s: float) -> None:
    """Raise OSError or UnicodeError unless rank 0 finds the name of its own machine, and others find its open port.
    torch would wait for the former, and print the stack of its C++ code at every attempt of the latter."""
    address = launch.master_addr, launch.master_port

    def look() -> None:
        if hosts:
            socket.getaddrinfo(*address)
        else:
            socket.create_connection(address, min(2.0, left_s)).close()

    try:
        _result(Background(look, "harness-store"), left_s + _ANSWER_S)
    except StoreTimeout:
        raise OSError("its name could not be resolved in time") from None


def _result(future: Future[Value], limit_s: float) -> Value:
    """Return the result of ``future``. Raises StoreTimeout after ``limit_s``."""
    try:
        return future.result(limit_s)
    except NotInTime:
        if future.done():  # the work itself has raised it
            raise
        raise StoreTimeout from None


def _connect(launch: Launch, hosts: bool, limit: timedelta) -> TCPStore:
    host, port = launch.master_addr, launch.master_port
    return TCPStore(host, port, is_master=hosts, timeout=limit, wait_for_workers=False, multi_tenant=True)


def _unreachable(launch: Launch, timeout_s: float, error: Exception) -> HarnessError:
    """Return the error of a rank that could not open the store, or connect to it."""
    if "EADDRINUSE" in str(error):
        return LaunchError(
            f"rank 0 cannot open port {launch.master_port}, where the ranks meet: it is in use",
            hint="choose another MASTER_PORT, or end the program that uses it (ss -ltnp shows it)",
        )
    wrong_name = isinstance(error, (socket.gaierror, UnicodeError))
    reason = getattr(error, "strerror", None) or first_line(error)
    if wrong_name and hosts_store(launch):
        return LaunchError(
            f"rank 0 cannot resolve MASTER_ADDR={launch.master_addr}, where the other ranks reach it: {reason}",
            hint="set MASTER_ADDR to the name or address of the machine of rank 0",
        )
    launch_error = (LaunchError if wrong_name else PeersMissing)(
        f"rank {launch.rank} of {launch.world_size} could not reach rank 0 at {address(launch)} within "
        f"{timeout_s:g} s: {reason}",
        hint=HINT,
    )
    launch_error.unmet = True
    return launch_error
