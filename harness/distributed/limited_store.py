"""torch's key-value store with a limit on every request.

Most requests to a TCPStore, such as ``check`` and ``compare_set``, have no timeout: they block in C++ for as long as
the process that holds the store is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from threading import Lock
from typing import Any, TypeVar

from torch.distributed import DistNetworkError

from harness.distributed.threads import Background

Value = TypeVar("Value")

LIMIT_S = 5.0


class StoreTimeout(Exception):
    """The process that holds the store did not answer within the limit."""


class LimitedStore:
    """The requests of ``store`` that the harness makes. Each raises StoreTimeout after ``limit_s``, and whatever
    ``store`` raises, such as DistNetworkError if the connection is gone."""

    def __init__(self, store: Any, limit_s: float = LIMIT_S) -> None:
        self._store, self._limit_s = store, limit_s
        self._busy = Lock()  # one request at a time, as in TCPStore; held until the request returns, however late
        self._overdue: Future[Any] | None = None  # the last request that exceeded its limit
        self._gone: DistNetworkError | None = None

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def get(self, key: str) -> str:
        """The value of ``key``, which must exist."""
        return self._ask(lambda: str(self._store.get(key).decode()))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set ``key`` to ``value`` if it has the value ``expected`` (empty: if it does not exist); return its value."""
        return self._ask(lambda: str(self._store.compare_set(key, expected, value).decode()))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def _ask(self, request: Callable[[], Value]) -> Value:
        """The result of ``request``, made by a daemon thread of its own, which may stay behind."""
        if self._gone:  # another request would fail, too, and print a C++ stack
            raise self._gone
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

        future = Background(work, "harness-store")
        try:
            return future.result(self._limit_s)
        except NotInTime:
            self._overdue = future
            raise StoreTimeout from None
