"""The first contact of the ranks, before torch.distributed: checks that all are there, and that they can connect.

Torch's process groups hang or abort if the ranks disagree about their number, their kind of device or the version of
torch, or if one does not come. Here, each rank adds its arrival to a list in the launch's store, also if an error keeps
it from starting. Rank 0 reads the list and publishes one verdict, which all ranks follow.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from harness.distributed import agreement, devices, store
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch
from harness.distributed.store import HINT, LimitedStore, PeersMissing, StoreTimeout, pauses
from harness.errors import EXIT_DATA, EXIT_USAGE, DataError, HarnessError, LaunchError, first_line, readable

_GRACE_S = 3.0  # for more ranks to arrive once something is wrong, and for all to read the verdict
_FAILED_S = 5.0  # for a rank that cannot start to inform the others
_ANSWER_S = 10.0  # for the store to answer a request

_ARRIVED, _VERDICT, _HEARD = (f"meeting/{name}" for name in ("arrived", "verdict", "heard"))

_REMEDIES = {
    "number of ranks (WORLD_SIZE)": "use the same number of machines and processes in the launch command on every "
    "machine",
    "device": devices.ALL_ALIKE,
    "version of torch": "install the same packages on every machine",
}
_ERRORS: dict[int, type[HarnessError]] = {EXIT_USAGE: LaunchError, EXIT_DATA: DataError}


class _Failure(NamedTuple):
    """An error that keeps ranks from starting, as the store holds it."""

    exit_code: int
    message: str
    hint: str

    def to_error(self) -> HarnessError:
        return _ERRORS.get(self.exit_code, PeersMissing)(self.message, hint=self.hint)


@dataclass(frozen=True)
class _Arrival:
    """A rank that has come."""

    rank: int
    host: str
    values: dict[str, int | str]
    """What must be equal on all ranks, by the names of ``_REMEDIES``."""
    error: _Failure | None


@dataclass(frozen=True)
class _Verdict:
    """What all ranks follow."""

    decided_by: _Arrival
    """The rank with whose values the others have agreed, or would have to."""
    error: _Failure | None


_AS_ARRIVAL, _AS_VERDICT = TypeAdapter(_Arrival), TypeAdapter(_Verdict)


def meet(launch: Launch, device: str, timeout_s: float, failed: BaseException | None = None) -> PrefixStore:
    """Wait for all ranks; return the store of this launch. Collective.

    ``device``: kind of device of this rank. ``failed``: the error that keeps this rank from starting; the other ranks
    then raise it, too. Raises LaunchError on all ranks if they cannot connect to each other as they were started, and
    PeersMissing, within ``timeout_s``, if some do not come.
    """
    until = time.monotonic() + timeout_s
    opened = store.open_store(launch, timeout_s)
    # A store that the launcher keeps still holds the keys of the start before a restart, hence the prefix. A store that
    # rank 0 opens is always new; there the launchers of several nodes may count their restarts differently.
    number = launch.restart if launch.store_is_held else 0
    prefixed = PrefixStore(f"harness/{number}/{launch.call}", opened)
    meeting = _Meeting(launch, LimitedStore(prefixed, _ANSWER_S), timeout_s, until)
    try:
        error = meeting.run(device, failed)
    except StoreTimeout:
        raise store.unanswered(launch) from None
    except RuntimeError as problem:
        lost = f"lost contact with rank 0 or the launcher at {store.address(launch)} while the ranks connected"
        raise PeersMissing(f"{lost}: {first_line(problem)}", hint=HINT) from None
    if error:
        raise failed or error
    opened.set_timeout(timedelta(seconds=timeout_s))
    return prefixed


@contextmanager
def telling_peers(launch: Launch) -> Iterator[None]:
    """Report an error of the body to the other ranks, which would otherwise wait for this one."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit of the user's code, too
        if launch.world_size > 1:
            try:
                meet(launch, "", _FAILED_S, error)
            except Exception as problem:
                if isinstance(error, HarnessError) and isinstance(problem, HarnessError):
                    error.unmet = problem.unmet
        raise


@dataclass
class _Meeting:
    """One start, as a rank takes part in it."""

    launch: Launch
    store: LimitedStore
    timeout_s: float
    until: float
    """Time (time.monotonic) at which this rank gives up."""

    def run(self, device: str, failed: BaseException | None) -> HarnessError | None:
        """Return the error that ends this start; None if all ranks agree."""
        arrival = self._arrive(device, failed)
        verdict = self._verdict(arrival)
        if verdict.error:
            _wait_until_heard(self.launch, self.store, len(_arrivals(self.store)), time.monotonic() + _GRACE_S)
            return verdict.error.to_error()
        return _problem({0: verdict.decided_by, arrival.rank: arrival})  # of a rank that came after the verdict

    def _arrive(self, device: str, failed: BaseException | None) -> _Arrival:
        """Publish that this rank has come. Raises LaunchError if another process has the same number."""
        rank, host = self.launch.rank, socket.gethostname()
        values: dict[str, int | str] = dict(
            zip(_REMEDIES, (self.launch.world_size, device, torch.__version__), strict=True)
        )
        error = _failure(failed, f"rank {rank} on {host}") if failed else None
        arrival, process = _Arrival(rank, host, values, error), f"process {os.getpid()} on {host}"
        present = self.store.compare_set(f"meeting/member/{rank}", "", process)
        if present != process:
            twice = LaunchError(
                f"two processes have RANK={rank}: {present} and {process}",
                hint="give each process its own RANK, and each run its own MASTER_PORT",
            )
            self._publish(_Verdict(arrival, _failure(twice)))
            raise twice
        self.store.append(_ARRIVED, f"{json.dumps(asdict(arrival))}\n")
        return arrival

    def _verdict(self, own_arrival: _Arrival) -> _Verdict:
        """Return the verdict of rank 0; of this rank, if there is none at its limit."""
        for _ in pauses(self.launch):
            if verdict := self.store.find(_VERDICT):
                return _AS_VERDICT.validate_python(json.loads(verdict))
            late = time.monotonic() > self.until
            if own_arrival.rank > 0 and not late:
                continue
            arrivals = _arrivals(self.store)
            problem = _problem(arrivals)
            counts = {arrival.values["number of ranks (WORLD_SIZE)"] for arrival in arrivals.values()}
            if late or (len(arrivals) >= self.launch.world_size and len(counts) == 1):
                if missing := set(range(self.launch.world_size)) - arrivals.keys():
                    problem = problem or self._missing(missing)
                return self._publish(_Verdict(own_arrival, _failure(problem) if problem else None))
            if problem:
                self.until = min(self.until, time.monotonic() + _GRACE_S)
        raise AssertionError("unreachable: the poll has no end")

    def _publish(self, verdict: _Verdict) -> _Verdict:
        """Publish ``verdict`` and return it, or return the one that another rank has published before."""
        published = self.store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))
        return _AS_VERDICT.validate_python(json.loads(published))

    def _missing(self, ranks: set[int]) -> PeersMissing:
        who, address = f"{agreement.rank_names(ranks)} of {self.launch.world_size}", store.address(self.launch)
        return PeersMissing(f"{who} did not connect at {address} within {self.timeout_s:g} s", hint=HINT)


def _arrivals(meeting_store: LimitedStore) -> dict[int, _Arrival]:
    """Return the ranks that have come, by rank."""
    arrivals = [_AS_ARRIVAL.validate_python(json.loads(line)) for line in meeting_store.find(_ARRIVED).splitlines()]
    return {arrival.rank: arrival for arrival in arrivals}


def _problem(arrivals: dict[int, _Arrival]) -> HarnessError | None:
    """Return the error of the lowest rank that cannot start, or the differences between the ranks."""
    for rank in sorted(arrivals):
        if error := arrivals[rank].error:
            return error.to_error()
    facts_by_rank: dict[int, Sequence[Facts]] = {
        rank: [Facts(_REMEDIES[name], {name: value}) for name, value in arrival.values.items()]
        for rank, arrival in arrivals.items()
    }
    return agreement.disagreement(facts_by_rank, {rank: arrival.host for rank, arrival in arrivals.items()})


def _wait_until_heard(launch: Launch, meeting_store: LimitedStore, num_ranks: int, until: float) -> None:
    """Note that this rank has read the news. If the store ends with this process, wait for ``num_ranks`` to do so."""
    meeting_store.append(_HEARD, f"{launch.rank} ")
    for _ in pauses(launch) if store.hosts_store(launch) else ():
        if len(set(meeting_store.find(_HEARD).split())) >= num_ranks or time.monotonic() > until:
            return


def _failure(error: BaseException, whose: str = "") -> _Failure:
    """Return ``error`` as the store holds it. ``whose``: the rank that cannot start because of it."""
    if not isinstance(error, HarnessError):
        error = PeersMissing(f"{type(error).__name__}: {first_line(readable(error))}")
    message = f"{error.where}: {error.message}" if error.where else error.message
    return _Failure(error.exit_code, f"{whose} cannot start: {message}" if whose else message, error.hint)
