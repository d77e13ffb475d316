"""The first contact of the ranks, before torch.distributed: checks that all are there, and were started with equal
values.

Torch's first collectives hang or abort if the ranks disagree about their number or the shape of a tensor. If they
disagree about anything else, they train with mixed settings. Here, they exchange texts through the launch's store: each
rank compares its ``Facts`` with those of rank 0, and rank 0 publishes one verdict, which all ranks follow.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from harness.distributed import agreement, launch_store
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch
from harness.distributed.launch_store import HINT, Patience, PeersMissing, hosts_store
from harness.distributed.limited_store import LimitedStore
from harness.errors import (
    EXIT_DATA,
    EXIT_USAGE,
    DataError,
    HarnessError,
    LaunchError,
    TrainingError,
    first_line,
    readable,
)

_GRACE_S = 3.0  # for more ranks to arrive where their number is in doubt, and for all to read the verdict
_FAILED_S = 5.0  # for a rank that cannot start to inform the others

_FACTS, _DIGEST, _PROBLEMS, _VERDICT = (f"meeting/{name}" for name in ("facts", "digest", "problems", "verdict"))
_ARRIVED, _REPORTED, _HEARD, _DONE = (f"meeting/{name}" for name in ("arrived", "reported", "heard", "done"))  # counts
_FAILED = "failed"  # in place of a digest
_AGREED = "agreed"  # a verdict; others are errors

_NUMBER = "number of ranks (WORLD_SIZE)"

_ERRORS: dict[str, type[HarnessError]] = {
    kind.__name__: kind for kind in (LaunchError, DataError, TrainingError, PeersMissing)
}


def meet(launch: Launch, facts: Sequence[Facts], timeout_s: float, failed: BaseException | None = None) -> PrefixStore:
    """Wait for all ranks and compare ``facts``; return the store of this launch. Every rank calls it.

    ``failed``: the error that keeps this rank from starting; the other ranks then raise it, too. Raises LaunchError on
    all ranks if they were started differently, and PeersMissing, within ``timeout_s``, if some do not connect.
    """
    patience = Patience(timeout_s)
    number = Facts(
        "use the same number of machines and processes in the launch command on every machine",
        {_NUMBER: launch.world_size},
    )
    meeting = _Meeting(launch, agreement.to_text([number, *facts]), patience, failed)
    return patience.bound(meeting.run, lambda: launch_store.unanswered(launch))


def latecomer(launch: Launch, store: LimitedStore) -> HarnessError | None:
    """The error on rank 0 if another rank came after ``meet`` and was started differently, for example with another
    number of ranks: it has given up, and training continues without it."""
    if not hosts_store(launch) or not store.check([_PROBLEMS]):
        return None
    rank = int(store.get(_PROBLEMS).split()[0])
    report = json.loads(store.get(f"meeting/report/{rank}"))
    if report["error"]:
        return _from_text(report["error"])
    hosts = {other: str(json.loads(store.get(f"meeting/member/{other}"))[0]) for other in (0, rank)}
    return agreement.disagreement(hosts, {rank: report["differs"]})


@contextmanager
def telling_peers(launch: Launch) -> Iterator[None]:
    """Context that reports an error of this rank to the others, which would otherwise wait for it."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit of the user's code, too
        if launch.world_size > 1:
            try:
                meet(launch, (), _FAILED_S, error)
            except Exception as problem:
                if isinstance(error, HarnessError) and isinstance(problem, HarnessError):
                    error.unmet = problem.unmet
        raise


def not_connected(launch: Launch, store: PrefixStore, error: Exception, hint: str) -> HarnessError:
    """What to raise for ``error``, raised when torch.distributed could not connect the ranks in ``store``:
    PeersMissing if some of them no longer report here, else LaunchError with ``hint``."""
    patience, missing = Patience(_GRACE_S), list(range(launch.world_size))

    def all_report() -> bool:
        missing[:] = [rank for rank in missing if not store.check([f"meeting/stuck/{rank}"])]
        return not missing

    def report() -> None:
        store.set(f"meeting/stuck/{launch.rank}", "")
        patience.poll(all_report)
        store.add(_DONE, 1)
        if hosts_store(launch):
            here = launch.world_size - len(missing)
            patience.poll(lambda: store.add(_DONE, 0) >= here, patience.until + _GRACE_S)

    met = f"the ranks met at {launch_store.address(launch)}, but"
    try:
        patience.bound(report, lambda: launch_store.unanswered(launch))
    except Exception:  # from the store
        return PeersMissing(f"{met} rank 0 was lost while they connected", hint=HINT)
    if missing:
        return PeersMissing(f"{met} {agreement.named(missing)} did not connect to the others", hint=HINT)
    return LaunchError(f"{met} rank {launch.rank} could not connect to the others: {first_line(error)}", hint=hint)


class _Meeting:
    def __init__(self, launch: Launch, facts: str, patience: Patience, failed: BaseException | None) -> None:
        self._launch, self._facts, self._patience, self._failed = launch, facts, patience, failed
        self._store: Any = None

    def run(self) -> PrefixStore:
        opened = launch_store.open_store(self._launch, self._patience)
        # A store that the launcher keeps still holds the keys of the start before a restart, hence the prefix. A store
        # that rank 0 opens is always new; there the launchers of several nodes may count their restarts differently.
        number = self._launch.restart if self._launch.store_is_held else 0
        self._store = PrefixStore(f"harness/{number}/{self._launch.call}", opened)
        try:
            self._exchange()
        except RuntimeError as error:
            lost = (
                f"lost contact with rank 0 or the launcher at {launch_store.address(self._launch)} while the ranks "
                "connected"
            )
            raise PeersMissing(f"{lost}: {first_line(error)}", hint=HINT) from None
        opened.set_timeout(timedelta(seconds=self._patience.timeout_s))
        return self._store

    def _exchange(self) -> None:
        rank, store = self._launch.rank, self._store
        self._arrive()
        if rank == 0:
            store.set(_FACTS, self._facts)
            store.set(_DIGEST, _FAILED if self._failed else agreement.digest(self._facts))
        differs = self._report()
        if verdict := self._lead() if rank == 0 else self._follow():
            store.add(_HEARD, 1)
            error = _from_text(verdict)
            if hosts_store(self._launch):  # which ends with this process
                expected = 0 if isinstance(error, PeersMissing) else self._launch.world_size
                self._patience.poll(lambda: self._all_heard(expected), time.monotonic() + _GRACE_S)
            raise self._failed or error
        if differs:  # but this rank came after the verdict
            raise agreement.disagreement({other: self._host(other) for other in (0, rank)}, {rank: differs})

    def _arrive(self) -> None:
        self._patience.expect()
        mine = json.dumps([socket.gethostname(), os.getpid()])
        there = self._store.compare_set(f"meeting/member/{self._launch.rank}", "", mine).decode()
        if there != mine:
            processes = [f"process {pid} on {host}" for host, pid in map(json.loads, (there, mine))]
            twice = LaunchError(
                f"two processes have RANK={self._launch.rank}: {' and '.join(processes)}",
                hint="give each process its own RANK, and each run its own MASTER_PORT",
            )
            self._decide(_to_text(twice))
            raise twice
        self._store.add(_ARRIVED, 1)

    def _report(self) -> agreement.Differences:
        """Publish what differs from rank 0, or the error of this rank; return the former."""
        rank, store, differs = self._launch.rank, self._store, agreement.Differences()
        if rank > 0 and not self._failed:
            if not self._patience.poll(lambda: store.check([_DIGEST]) or store.check([_VERDICT])):
                return differs  # and give up, in ``_follow``
            if store.check([_DIGEST]) and store.get(_DIGEST).decode() not in (_FAILED, agreement.digest(self._facts)):
                differs = agreement.differences(store.get(_FACTS).decode(), self._facts)
        if differs or self._failed:
            error = _to_text(self._failed, f"rank {rank} on {socket.gethostname()}") if self._failed else ""
            store.set(f"meeting/report/{rank}", json.dumps({"error": error, "differs": differs}))
            store.append(_PROBLEMS, f"{rank} ")
        store.add(_REPORTED, 1)
        return differs

    def _lead(self) -> str:
        """Rank 0's verdict on all reports: the text of an error, or empty."""
        store, world_size, until = self._store, self._launch.world_size, self._patience.until
        reports: dict[int, dict[str, Any]] = {}
        miscounted = False

        def is_over() -> bool:
            nonlocal until, miscounted
            all_reported = store.add(_REPORTED, 0) >= world_size  # before the reports, or the last one could be missed
            for rank in map(int, store.get(_PROBLEMS).split() if store.check([_PROBLEMS]) else ()):
                reports[rank] = reports.get(rank) or json.loads(store.get(f"meeting/report/{rank}"))
            if not miscounted and any(_NUMBER in report["differs"] for report in reports.values()):
                miscounted, until = True, min(until, time.monotonic() + _GRACE_S)  # the number to wait for is unknown
            if time.monotonic() > until or store.check([_VERDICT]):
                return True
            return all_reported and not miscounted

        self._patience.poll(is_over, math.inf)
        if errors := [reports[rank]["error"] for rank in sorted(reports) if reports[rank]["error"]]:
            return self._decide(errors[0])
        if reports:
            hosts = {rank: self._host(rank) for rank in sorted({*range(world_size), *reports} - {*self._missing()})}
            differs = {rank: report["differs"] for rank, report in reports.items()}
            return self._decide(_to_text(agreement.disagreement(hosts, differs)))
        return self._decide("" if store.add(_REPORTED, 0) >= world_size else self._given_up())

    def _follow(self) -> str:
        """The verdict that rank 0 publishes."""
        if not self._patience.poll(lambda: self._store.check([_VERDICT])):
            return _to_text(self._failed) if self._failed else self._decide(self._given_up())
        return self._decide("")

    def _decide(self, verdict: str) -> str:
        """Publish ``verdict``; return it, or the one that another rank published before."""
        first: str = self._store.compare_set(_VERDICT, "", verdict or _AGREED).decode()
        return "" if first == _AGREED else first

    def _given_up(self) -> str:
        missing, size = self._missing(), self._launch.world_size
        who = f"{agreement.named(missing)} of {size} did not connect" if missing else f"not all {size} ranks were ready"
        place, timeout_s = launch_store.address(self._launch), self._patience.timeout_s
        return _to_text(PeersMissing(f"{who} at {place} within {timeout_s:g} s", hint=HINT))

    def _missing(self) -> list[int]:
        ranks = range(self._launch.world_size)
        return [rank for rank in ranks if not self._store.check([f"meeting/member/{rank}"])]

    def _host(self, rank: int) -> str:
        return str(json.loads(self._store.get(f"meeting/member/{rank}"))[0])

    def _all_heard(self, expected: int) -> bool:
        arrived: int = self._store.add(_ARRIVED, 0)
        return arrived >= expected and self._store.add(_HEARD, 0) >= arrived


def _to_text(error: BaseException, whose: str = "") -> str:
    """``error`` as JSON; ``whose``: the rank that cannot start because of it."""
    kind = type(error).__name__
    if not isinstance(error, HarnessError):
        error = TrainingError(f"{kind}: {first_line(readable(error))}")
    if kind not in _ERRORS:
        kind = {EXIT_USAGE: "LaunchError", EXIT_DATA: "DataError"}.get(error.exit_code, "TrainingError")
    message = f"{error.where}: {error.message}" if error.where else error.message
    return json.dumps([kind, f"{whose} cannot start: {message}" if whose else message, error.hint])


def _from_text(text: str) -> HarnessError:
    kind, message, hint = json.loads(text)
    return _ERRORS[kind](message, hint=hint)
