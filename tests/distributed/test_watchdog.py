"""The watchdog ends a rank that waits for a process that is gone, and leaves all others alone. The rank that keeps the
others waiting is found by what the ranks answer, or by the state of its process."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.distributed import watchdog as module
from harness.distributed.launch_env import Launch, detect
from harness.distributed.process_group import open_runtime
from harness.distributed.processes import Identity
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.distributed.store import LimitedStore, StoreTimeout
from harness.distributed.watchdog import Stalls, Watchdog
from harness.errors import EXIT_FAILURE
from tests.end_to_end.processes import wait_until
from tests.ranks import run_ranks, start


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    monkeypatch.setattr(module.logging, "shutdown", lambda: None)


def failure(rank: int) -> RankExit:
    return RankExit(rank, Cause.ERROR, EXIT_FAILURE, host=f"n{rank}", step=3, message="bad")


class Watched:
    """A watchdog over ``store``, and what it did: ``stop.reason``, the cause it reported, and exit codes."""

    def __init__(self, store, timeout_s: float = math.inf, **launch) -> None:
        self.exits: list[int] = []
        self.causes: list[Cause] = []
        self.records: list[RankExit] = []
        self.runtime = Runtime(Launch(**launch), store=store and LimitedStore(store), timeout_s=timeout_s)
        self.stop = Stop(self.runtime)
        self.dog = Watchdog(
            self.runtime,
            self.stop,
            exit_process=self.exits.append,
            on_blocked=lambda exit, first: (self.causes.append(exit.cause), self.records.append(exit)),
        )
        self.rounds = 0
        self.dog.stalls.answer = self._end_round

    def _end_round(self) -> None:
        """Of the watchdog, which found nothing."""
        self.rounds += 1

    def wait_for_rounds(self) -> None:
        wait_until(lambda: self.rounds >= 3, 30, "the watchdog looks three times")

    def wait_for_exit(self) -> None:
        wait_until(lambda: self.exits, 30, "the watchdog ends the process")


def test_no_rank_is_accused_where_another_has_failed(monkeypatch):
    """The first failure is known before anything is measured: the ranks that wait for it may have ended."""
    store = dist.HashStore()
    mine, peer = Watched(store, world_size=2), Watched(store, rank=1, world_size=2)
    peer.dog.publish_failure(failure(1))
    monkeypatch.setattr(mine.dog.stalls, "missing", lambda doing, timed_out: failure(0))
    assert mine.dog.missing("all_reduce", timed_out=False) is None
    assert mine.dog.first_failure == failure(1)


def test_peer_failure_requests_a_stop_and_ends_a_blocked_rank(quick, caplog):
    store = dist.HashStore()
    mine, peer = Watched(store), Watched(store)
    with mine.dog:
        mine.wait_for_rounds()
        assert not mine.stop.reason
        assert peer.dog.publish_failure(failure(3)) == failure(3)
        mine.wait_for_exit()
    assert mine.stop.reason == "rank 3 failed"
    assert "this rank is blocked: rank 3 failed" in caplog.text
    assert (mine.exits, mine.causes) == ([EXIT_FAILURE], [Cause.PEER_LOST])
    (record,) = mine.records
    assert (record.error, record.message, record.made_by_rank) == ("PeerLost", "rank 3 failed", True)
    assert record.doing
    assert mine.dog.publish_failure(failure(5)) == failure(3)  # the first failure of the launch


@pytest.mark.parametrize(("peer_knows", "news_s"), [(True, 60.0), (False, 0.3)])
def test_linger_waits_until_all_peers_know(monkeypatch, peer_knows, news_s):
    monkeypatch.setattr(module, "NEWS_S", news_s)
    store = dist.HashStore()
    mine, peer = (Watched(store, rank=rank, world_size=2).dog for rank in range(2))
    mine.publish_failure(failure(0))
    if peer_knows:
        peer.acknowledge()
    begin = time.monotonic()
    mine.linger()
    assert (time.monotonic() - begin < news_s) is peer_knows


def test_rank_that_ends_in_time_is_left_alone(quick, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 60.0)
    mine = Watched(dist.HashStore())
    with mine.dog:
        mine.dog.publish_failure(failure(0))
        wait_until(lambda: mine.stop.reason, 30, "the request to stop")
    wait_until(lambda: not watching(), 30, "the watchdog ends")
    assert not mine.exits


def test_lost_store_counts_as_a_failure(quick):
    class Gone:
        def check(self, *_):
            raise dist.DistNetworkError("Connection reset by peer")

        set = compare_set = check

    mine = Watched(Gone())
    assert mine.dog.publish_failure(failure(1)) is None  # and never raises
    mine.dog.linger()
    with mine.dog:
        mine.wait_for_exit()
    assert "rank 0, or the launcher, is gone" in mine.stop.reason
    assert mine.causes == [Cause.PEER_LOST]


@pytest.mark.parametrize("launch", [{}, {"elastic": True, "supervised": True}])
def test_single_rank_with_a_living_launcher_is_left_alone(quick, launch):
    """However long it runs: it starts no collectives by which to see that it lives."""
    mine = Watched(None, timeout_s=0.01, **launch)
    assert mine.dog.publish_failure(failure(0)) is None
    mine.dog.linger()
    with mine.dog, mine.runtime.limited("uploading", math.inf):
        wait_until(lambda: mine.rounds >= 10, 30, "the watchdog looks often")
    assert not mine.stop.reason
    assert not mine.exits


def test_single_rank_that_takes_too_long_is_ended(quick):
    mine, ended = Watched(None, timeout_s=0.2), []
    mine.dog._on_blocked = lambda *exits: ended.append(exits)
    with mine.dog:
        for _ in range(3):  # each of which is allowed the time
            with mine.runtime.limited("reading a batch"):
                rounds = mine.rounds
                wait_until(lambda rounds=rounds: mine.rounds >= rounds + 5, 30, "half of the time")
        assert not mine.exits
        with mine.runtime.limited("reading a batch"), mine.runtime.limited("inner work", 100.0):
            rounds = mine.rounds
            wait_until(lambda: mine.rounds >= rounds + 20, 30, "longer than the outer limit")
        assert not mine.exits
        with mine.runtime.limited("reading a batch"):
            mine.wait_for_exit()
    ((exit, first),) = ended
    assert exit is first
    assert (exit.cause, exit.rank, mine.exits) == (Cause.HUNG, 0, [EXIT_FAILURE])
    assert exit.message.startswith("reading a batch has not ended within 0.2 s: it was in ")
    assert "wait_until" in "".join(exit.traceback)
    assert exit.doing


def test_work_of_a_single_rank_is_limited(quick):
    runtime = Watched(None, timeout_s=0.2).runtime
    runtime.work_timeout_s = 9.0
    assert runtime.patiently("opening", lambda: runtime.alone_in) == ("opening", 9.0)
    assert runtime.patiently("uploading", lambda: runtime.alone_in, math.inf) == ("uploading", math.inf)
    with runtime.announced("compiling"):
        assert runtime.alone_in == ("compiling", 9.0)
        with runtime.limited("reading a batch"):
            pass
        assert runtime.alone_in == ("compiling", 9.0)
    assert runtime.alone_in is None
    assert pair(dist.HashStore(), 1.0)[0].runtime.alone_in is None


def watching() -> list[threading.Thread]:
    """The threads that may end this process."""
    return [thread for thread in threading.enumerate() if thread.name == "harness-watchdog"]


def _outlive(parent: int, path: str, looks: Callable[[], int]) -> None:
    """``looks``: how often the watchdog has looked."""
    wait_until(lambda: os.getppid() != parent, 30, "the parent's death")
    before = looks()
    wait_until(lambda: looks() > before + 5, 30, "the watchdog looks, or ends the process")
    Path(path).write_text("left alone")


def _orphan(path: str, elastic: bool):
    """Start a grandchild with a watchdog, and end."""
    (ready, started), parent = os.pipe(), os.getpid()
    if os.fork() == 0:
        module.PERIOD_S, module.GRACE_S = 0.02, 0.1
        runtime = Runtime(Launch(elastic=elastic, supervised=elastic, parent=os.getppid()))
        stop = Stop(runtime)
        causes = []

        def exit_process(code: int) -> None:
            Path(path).write_text(f"{code} {causes[0].value} {stop.reason}")
            os._exit(0)

        looks = []
        with Watchdog(
            runtime, stop, exit_process=exit_process, on_blocked=lambda exit, first: causes.append(exit.cause)
        ) as dog:
            dog.stalls.answer = lambda: looks.append(None)
            os.write(started, b"x")
            _outlive(parent, path, lambda: len(looks))
        os._exit(0)
    os.read(ready, 1)


@pytest.mark.parametrize(
    ("supervised", "expected"), [(True, "70 launcher_lost the launcher is gone"), (False, "left alone")]
)
def test_death_of_the_launcher_is_noticed(tmp_path, supervised, expected):
    result = tmp_path / "result"
    process, _ = start(_orphan, (str(result), supervised))
    process.join(30)
    wait_until(lambda: result.exists() and result.read_text(), 50, "the result")
    assert result.read_text() == expected


def _fail_on_one():
    module.PERIOD_S, module.GRACE_S = 0.05, 0.2
    with open_runtime(detect(os.environ), "cpu", 30.0) as runtime:
        stop, exits = Stop(runtime), []
        with Watchdog(runtime, stop, exit_process=exits.append) as dog:
            runtime.barrier()
            if runtime.rank == 1:
                dog.publish_failure(failure(1))
            wait_until(lambda: stop.reason and exits, 30, "the watchdog ends the process")
        runtime.barrier()
        return stop.reason, exits


def test_failure_travels_through_the_store_of_the_launch():
    assert run_ranks(2, _fail_on_one, group=False, timeout_s=60) == [("rank 1 failed", [70])] * 2


def pair(store, timeout_s: float, place: str = "another machine") -> list[Watched]:
    """Two ranks that wait at most ``timeout_s``; each takes the other's process for one at ``place``."""
    here = Identity.of_this_process()
    peers = [replace(here, host=f"n{rank}", place=place) for rank in range(2)]
    ranks = [Watched(store, timeout_s, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.runtime.peers = peers
        rank.dog = Watchdog(
            rank.runtime, rank.stop, exit_process=rank.exits.append,
            on_blocked=lambda exit, first, rank=rank: rank.causes.append((exit.cause, first)),
        )  # fmt: skip
    return ranks


def test_silent_machine_ends_a_rank_that_is_blocked_outside_of_a_collective(quick):
    """As in a CUDA synchronization, from which nothing returns when the other machine is gone."""
    mine, other = pair(dist.HashStore(), timeout_s=0.5)
    with mine.dog:
        other.dog._thread.start()
        wait_until(lambda: other.dog.stalls._answered, 30, "it is asked, after longer than the limit")
        assert not mine.stop.reason  # both live, however long they compute
        assert not other.stop.reason
        other.dog._finished.set()  # its machine loses power
        wait_until(lambda: mine.exits, 30, "the end")
    ((cause, first),) = mine.causes
    assert (cause, first.rank, first.cause) == (Cause.PEER_LOST, 1, Cause.NODE_LOST)
    assert mine.exits == [EXIT_FAILURE]


def test_rank_that_ends_in_order_is_not_missed(quick, monkeypatch):
    mine, other = pair(dist.HashStore(), timeout_s=0.1)
    asked, ask = [], mine.dog.stalls._ask
    monkeypatch.setattr(mine.dog.stalls, "_ask", lambda *question: asked.append(ask(*question)) or asked[-1])
    with other.dog:
        pass
    with mine.dog:
        wait_until(lambda: len(asked) > 2, 30, "it asks, and nobody answers")
    assert list(asked[0]) == [0]
    assert not mine.stop.reason


def test_record_that_cannot_be_read_is_no_loss_of_the_store(quick):
    store = dist.HashStore()
    store.set("failed", "{}")
    mine = Watched(store)
    with mine.dog:
        mine.wait_for_exit()
    assert mine.stop.reason == "another rank failed, and its record cannot be read"


class _Dead:
    """A store whose machine has lost power: requests are not answered."""

    def check(self, *_):
        raise StoreTimeout

    get = find = set = compare_set = delete = check


@pytest.mark.parametrize("store_is_held", [False, True])
def test_machine_of_the_store_that_is_silent_ends_a_rank_that_waits(quick, store_is_held):
    mine = pair(dist.HashStore(), timeout_s=0.3)[1]
    mine.runtime.launch = replace(mine.runtime.launch, store_is_held=store_is_held)
    mine.runtime.store = _Dead()
    with mine.dog:
        wait_until(lambda: mine.exits, 30, "the end")
    ((cause, first),) = mine.causes
    assert cause is Cause.PEER_LOST
    assert (first and (first.rank, first.cause)) == (None if store_is_held else (0, Cause.NODE_LOST))


def test_launcher_that_is_frozen_harms_no_rank_that_proceeds(quick, monkeypatch):
    mine = pair(dist.HashStore(), timeout_s=0.3)[1]
    mine.runtime.store = _Dead()
    looks = []
    monkeypatch.setattr(mine.dog.stalls, "waited_s", lambda: looks.append(time.monotonic()) or 0.1)
    with mine.dog:
        wait_until(lambda: looks and looks[-1] - looks[0] > 1.0, 30, "it looks for longer than the limit")
    assert not mine.stop.reason


# The missing rank


def started_at(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


HERE = Identity.of_this_process()


def ranks_of(store, num: int, peers=None, **launch) -> list[Stalls]:
    runtimes = [
        Runtime(Launch(rank=rank, world_size=num, **launch), store=store, timeout_s=20.0, peers=peers or [HERE] * num)
        for rank in range(num)
    ]
    return [Stalls(runtime, lambda: 4) for runtime in runtimes]


def found_by_rank_0(monkeypatch, counts, *later, timed_out=True):
    """What rank 0 finds if the ranks have started ``counts`` collectives, {group: number} for each rank, and when it
    asks again for each of ``later``."""
    counts = list(counts)
    monkeypatch.setattr(module, "num_started", lambda: counts[int(threading.current_thread().name)])
    ranks = ranks_of(LimitedStore(dist.HashStore()), len(counts))
    monkeypatch.setattr(threading.current_thread(), "name", "0")
    finished = threading.Event()

    def answer(rank):
        while not finished.wait(0.05):
            rank.answer()

    others = [threading.Thread(target=answer, args=(rank,), name=str(i)) for i, rank in enumerate(ranks[1:], 1)]
    for thread in others:
        thread.start()
    try:
        found = ranks[0].missing("all_reduce", timed_out)
        for following in later:
            assert found is None
            counts[:] = following
            found = ranks[0].missing("all_reduce", timed_out)
        return found
    finally:
        finished.set()
        for thread in others:
            thread.join()


BEHIND = {
    "one of two": ([{"0": 7}, {"0": 6}], 1),
    "one of three": ([{"0": 7, "1": 3}, {"0": 7, "1": 3}, {"0": 7, "1": 2}], 2),
    "the one that is behind most": ([{"0": 7}, {"0": 6}, {"0": 5}], 2),
    "the one that waits": ([{"0": 6}, {"0": 7}], 0),
    "a rank without any collective": ([{"0": 1}, {}], 1),
    "different collectives": ([{"0": 7, "1": 4}, {"0": 8, "1": 3}], 1),
    "different collectives, the odd one out": ([{"0": 8, "1": 3}, {"0": 7, "1": 4}, {"0": 7, "1": 4}], 0),
    "nobody": ([{"0": 7}, {"0": 7}], None),
}


@pytest.mark.parametrize("case", BEHIND)
def test_rank_with_fewer_collectives_is_found(monkeypatch, case):
    counts, expected = BEHIND[case]
    found = found_by_rank_0(monkeypatch, counts)
    assert (found and found.rank) == expected
    if found:
        assert (found.cause, found.step, found.host) == (Cause.HUNG, 4, HERE.host)
        assert "test_watchdog.py" in "".join(found.traceback)
        reason = found.message.removeprefix("it did not join the other ranks within 20 s: ")
        other = 0 if expected else 1
        differs = rf"its collective, in .+, does not match that of rank {other}, in .+"
        late = rf"it was in .+; rank {other} waited for it in .+"
        assert re.fullmatch(differs if case.startswith("different") else late, reason)


def test_answers_to_an_earlier_question_do_not_count(monkeypatch):
    """Else all other ranks would seem to be where they were then, behind the one that asks."""
    both = [{"0": 7}, {"0": 7}], [{"0": 9}, {"0": 9}]
    assert found_by_rank_0(monkeypatch, *both) is None
    assert found_by_rank_0(monkeypatch, *both, [{"0": 9}, {"0": 8}]).rank == 1


def test_a_question_whose_rank_is_gone_is_taken_over(monkeypatch):
    monkeypatch.setattr(module, "num_started", lambda: {"0": 7})
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    store = LimitedStore(dist.HashStore())
    rank_0 = ranks_of(store, 2, peers=[HERE, replace(HERE, pid=2**22 + 1)])[0]
    store.set("asked", "1:abc")  # and has ended since
    assert rank_0.missing("all_reduce", True) is None
    time.sleep(0.3)
    assert rank_0.missing("all_reduce", True).rank == 1
    assert store.find("asked").startswith("0:")


def test_rank_that_is_late_for_less_than_the_timeout_is_not_accused(monkeypatch):
    assert found_by_rank_0(monkeypatch, [{"0": 7}, {"0": 6}], timed_out=False) is None


def test_ranks_that_computed_for_long_are_not_accused_at_their_next_collective(monkeypatch):
    """Neither had waited: the clock looks once per second, and had not seen that rank 0 went on."""
    started = {"0": {"0": 6}, "1": {"0": 6}}
    monkeypatch.setattr(module, "num_started", lambda: started[threading.current_thread().name])
    monkeypatch.setattr(threading.current_thread(), "name", "0")
    mine, other = ranks_of(LimitedStore(dist.HashStore()), 2)
    for rank in (mine, other):
        rank.waited_s()
        rank._since -= 30.0  # longer than the timeout
    assert mine.waited_s() > 20.0
    answering = threading.Thread(target=lambda: [other.answer() or time.sleep(0.05) for _ in range(20)], name="1")
    answering.start()
    started["0"] = {"0": 7}
    try:
        assert mine.missing("all_reduce", timed_out=False) is None
    finally:
        answering.join()
    assert mine.waited_s() < 20.0


@pytest.mark.parametrize(
    ("number", "cause", "message"),
    [
        (signal.SIGSTOP, Cause.HUNG, "is stopped, by SIGSTOP or a debugger"),
        (signal.SIGKILL, Cause.NODE_LOST, "ended without a report"),
        (None, Cause.HUNG, "does not release the GIL"),
    ],
)
def test_silent_rank_is_found_by_the_state_of_its_process(monkeypatch, number, cause, message):
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    process = subprocess.Popen(["sleep", "60"])
    peer = replace(HERE, pid=process.pid, started=started_at(process.pid))
    try:
        if number:
            os.kill(process.pid, number)
        expected = {signal.SIGSTOP: "T", signal.SIGKILL: "X"}.get(number, "S")
        wait_until(lambda: peer.state() == expected, 5, "its state")
        mine = ranks_of(LimitedStore(dist.HashStore()), 2, [HERE, peer])[0]
        found = mine.missing("all_reduce", True)
        assert (found.rank, found.cause) == (1, cause)
        assert message in found.message
        if found.cause is Cause.HUNG:
            mine.release()
            wait_until(lambda: peer.state() == ("S" if number else "X"), 5, "it continues, or ends")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("held", "expected"), [(False, 0), (True, None)])
def test_silent_store_accuses_rank_0_only_if_it_holds_the_store(held, expected):
    class Frozen:
        def compare_set(self, *_):
            time.sleep(2)

    store = LimitedStore(Frozen(), limit_s=0.1)
    with pytest.raises(StoreTimeout):
        store.compare_set("a", "", "b")
    elsewhere = replace(HERE, place="another machine")
    rank_1 = ranks_of(store, 2, [elsewhere, HERE], store_is_held=held)[1]
    found = rank_1.missing("all_reduce", True)
    assert (found and found.rank) == expected
    if found:
        assert found.cause is Cause.NODE_LOST
        assert "its machine is out of reach" in found.message


def test_a_silent_store_does_not_accuse_a_rank_0_that_runs():
    """Its store runs in a thread of its own: a late answer is no proof, and rank 0 would be killed."""

    class Frozen:
        def compare_set(self, *_):
            time.sleep(2)

    process = subprocess.Popen(["sleep", "60"])
    try:
        first = replace(HERE, pid=process.pid, started=started_at(process.pid))
        wait_until(lambda: first.state() == "S", 5, "its state")
        rank_1 = ranks_of(LimitedStore(Frozen(), limit_s=0.1), 2, [first, HERE])[1]
        assert rank_1.missing("all_reduce", True) is None
        rank_1.release()
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: first.state() == "T", 5, "its state")
        found = rank_1.missing("all_reduce", True)
        assert (found.rank, found.cause) == (0, Cause.HUNG)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
