"""What all ranks do in step: who waits for whom, how long, and who raises an error of one of them. The stages:

stage       for example                 it may take, in s  collectives in it  an error of one rank
together    opening the tables          timeout_s          no                 is raised on all, by a gather at its end
patiently   a download                  work_timeout_s     no                 is raised on all, by heartbeats
announced   the first, compiling step   work_timeout_s     yes                ends the run, as anywhere else
limited     work of a single rank       its ``limit_s``    yes                ends the run, as anywhere else

A rank that dies is noticed by the peer whose collective breaks, or by its launcher; one that fails reports itself. The
watchdogs (watchdog.py) of the others end them within 30 s. ``timeout_s`` is for a rank that hangs: with gloo, the
collectives of its peers raise then; with nccl, or in a wait for the device, their watchdogs end them. A single rank has
no peers to wait for it, so the watchdog ends it after the same times, except in ``together``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from harness.distributed import heartbeats
from harness.distributed.collectives import Collectives, limit_main_groups
from harness.distributed.store import LimitedStore
from harness.distributed.threads import Background
from harness.errors import as_harness_error

Value = TypeVar("Value")


@dataclass
class Runtime(Collectives):
    """One rank: its launch environment, its device, its collectives, and the stages."""

    store: LimitedStore | None = None
    """Torch's key-value store, through which the watchdog threads of the ranks communicate, if there are several."""
    timeout_s: float = math.inf
    """How long a rank may be silent."""
    work_timeout_s: float = math.inf
    """How long announced work may take."""
    failed: bool = False
    """Set when this rank reports a failure, its own or a consequence of another's."""
    alone_in: tuple[str, float] | None = None
    """With one rank, what it does, and the seconds that it may take: ``limited`` sets it, the watchdog enforces it."""
    peer_limit_s: float = field(init=False)
    """How long this rank waits for a peer at present: ``timeout_s``, in ``announced`` ``work_timeout_s``."""

    def __post_init__(self) -> None:
        self.peer_limit_s = self.timeout_s

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Enter a stage together: if any rank raises in it, all raise, so that none waits for another. Collective.

        The body must not contain a collective. The lowest failing rank raises its own error. The others raise a copy,
        with that rank in ``origin_rank``, and what they were ``doing`` if it is no HarnessError.
        """
        own_error: Exception | SystemExit | None = None
        process = os.getpid()
        try:
            yield
        except (Exception, SystemExit) as error:  # KeyboardInterrupt ends this rank at once: the others lose it
            if os.getpid() != process:
                raise  # which ends a forked process: the collectives are those of its parent
            own_error = error
        if self.world_size > 1:
            self._raise_first(own_error, doing)
        if own_error is not None:
            raise own_error

    def _raise_first(self, own_error: Exception | SystemExit | None, doing: str) -> None:
        """Raise a copy of the first error, if any rank has one; on the rank that it comes from, return, and the caller
        raises the original, with its traceback. Collective.

        Stages may be nested. Rank 1 fails in the inner one, and rank 0 raises a copy there, with ``origin_rank`` 1.
        Both bring this to the gather of the outer one: the origin is still rank 1, which raises the original again.
        """
        origin = getattr(own_error, "origin_rank", None)
        origin = self.rank if origin is None else origin
        failure = None if own_error is None else (as_harness_error(own_error, doing), origin)
        failures = [each for each in self.gather(failure) if each is not None]
        if failures:
            first_error, first_origin = failures[0]
            if own_error is None or first_origin != self.rank:
                first_error.origin_rank = first_origin
                raise first_error

    def patiently(self, doing: str, work: Callable[[], Value], limit_s: float | None = None) -> Value:
        """Return ``work()``, which a thread does while the ranks exchange heartbeats: it may take long, but must not
        contain a collective. If any rank raises, all ranks raise; work that is not done then goes on in its thread, and
        nobody waits for it. Collective.

        Raises TrainingError if a rank works longer than ``limit_s``, by default ``work_timeout_s``. Give infinity for
        work that has a limit of its own.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s if limit_s is None else limit_s):
                return work()
        return self.await_work(doing, Background(work, "harness-work"), limit_s)

    def await_work(self, doing: str, work: Background[Value], limit_s: float | None = None) -> Value:
        """Return ``patiently`` for work that every rank has already started. Collective."""
        limit_s = self.work_timeout_s if limit_s is None else limit_s
        if self.world_size == 1:
            with self.limited(doing, limit_s):
                return work.result()
        heartbeats.await_all(doing, work, limit_s, self.timeout_s, self.gather)
        with self.together(doing):
            if work.done():
                return work.result()
        raise AssertionError("unreachable: a rank failed, so all ranks have raised")

    @contextmanager
    def announced(self, doing: str) -> Iterator[None]:
        """Enter a stage with collectives, in which the ranks wait ``work_timeout_s`` for each other, such as the first
        step of a compiled model. A rank that stops in it is found that late. Collective.

        An error of one rank is not shared: it ends the run as anywhere else.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s):
                yield
            return
        previous = self.peer_limit_s
        self._set_peer_limit(self.work_timeout_s)
        try:
            yield
            self.barrier()  # a rank must not wait for timeout_s only, while another still does the work
        finally:
            self._set_peer_limit(previous)

    @contextmanager
    def limited(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """Enter a stage that the watchdog ends, with the process, if it takes the only rank longer than ``limit_s``, by
        default ``timeout_s``. Of several ranks, the others notice."""
        previous = self.alone_in
        self.alone_in = (doing, self.timeout_s if limit_s is None else limit_s) if self.world_size == 1 else None
        try:
            yield
        finally:
            self.alone_in = previous

    def _set_peer_limit(self, limit_s: float) -> None:
        self.peer_limit_s = limit_s
        if self.group is not None:
            limit_main_groups(limit_s)
