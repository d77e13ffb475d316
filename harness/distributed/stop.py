"""Stopping early: a signal sets a flag on one rank, and all ranks agree on the step at which they stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGTERM

from harness.distributed import signals
from harness.distributed.runtime import Runtime

log = logging.getLogger("harness")

PERIOD_S = 0.5  # between two reductions of the flags


class Stop:
    """The request to stop, made by any rank with ``request``; ``poll`` returns the common decision between
    steps, and between the batches of an evaluation."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reason = ""  # why this rank requests a stop; empty: it requests none
        self.signal: int | None = None  # the first that this rank has received
        self.verdict = False  # the common decision
        self._pending: Callable[[], list[int]] | None = None  # waits for the reduction that is under way
        self._pause = 0  # calls of ``poll`` until the next reduction; the same on every rank
        self._calls, self._since = 0, time.monotonic()  # of ``poll``, since the last reduction

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a request stopped without a checkpoint."""
        return signals.ended_by(self.signal or SIGTERM)

    def poll(self) -> bool:
        """Take part in the decision, and return it: True from the first call at which a request has reached all ranks.
        Collective: all ranks must call it equally often.

        One call starts a reduction of the flags, and the next, a step later, reads it, mostly without waiting. If steps
        are shorter than PERIOD_S, some calls then pause: their number is rank 0's, in the same reduction.
        """
        if self.runtime.world_size == 1:
            self.verdict = self.verdict or bool(self.reason)
        elif not self.verdict:
            self._calls += 1
            if self._pending is not None:
                requested, self._pause = self._pending()
                self.verdict, self._pending = bool(requested), None
            elif self._pause > 0:
                self._pause -= 1
            else:
                self._pending = self.runtime.max_async([bool(self.reason), self._next_pause()])
        return self.verdict

    def ends_wait(self) -> bool:
        """Return True if a stop ends a wait for data, on the only rank. Several ranks decide together, and the others
        wait for this one."""
        return self.runtime.world_size == 1 and bool(self.reason)

    def decide_now(self) -> bool:
        """Return the decision, including every request made so far. Waits for all ranks, so it is for rare points only.
        Collective."""
        if not self.verdict:
            self._pending = None  # its requests are in the next reduction, too
            requested, self._pause = self.runtime.max_async([bool(self.reason), 0])()
            self.verdict = bool(requested)
            self._calls, self._since = 0, time.monotonic()  # the next calls may come at another pace
        return self.verdict

    def _next_pause(self) -> int:
        """Return the calls in PERIOD_S at the present pace, at most four times those since the last reduction; 0 on
        ranks other than 0."""
        now = time.monotonic()
        calls, elapsed = self._calls, max(now - self._since, 1e-6)
        self._calls, self._since = 0, now
        return min(int(calls * PERIOD_S / elapsed), 4 * calls) if self.runtime.rank == 0 else 0


@contextmanager
def on_signals(
    stop: Stop, action: str = "a checkpoint is written first", unfinished: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Let SIGINT, SIGTERM, SIGHUP and SIGUSR1 request a stop while the body runs, as harness.distributed.signals says.
    ``action``: what follows, for the message; ``unfinished``: returns what has to end before that, if it takes long."""
    launch = stop.runtime.launch

    def request(number: int) -> None:
        stop.signal = stop.signal or number
        stop.request(signals.signal_name(number))

    def notice(number: int) -> None:
        name, remaining = signals.signal_name(number), unfinished()
        if launch.elastic or not launch.supervised:  # otherwise harness launch has printed it
            again = "" if number == signals.TIME_LIMIT_SIGNAL else "; Ctrl-C or another signal ends it immediately"
            log.info("stopping (%s): %s%s", name, ", ".join(filter(None, (action, remaining))), again)
        elif remaining:
            log.info("stopping (%s) %s", name, remaining)

    with signals.during(signals.Phase(request, notice)):
        yield
