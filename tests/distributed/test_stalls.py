"""The rank that keeps the others waiting is found, by what the ranks answer, or by the state of its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.distributed import stalls as module
from harness.distributed.launch_env import Launch
from harness.distributed.processes import Identity
from harness.distributed.rank_exit import Cause
from harness.distributed.runtime import Runtime
from harness.distributed.stalls import Stalls
from harness.distributed.store import LimitedStore, StoreTimeout
from tests.end_to_end.processes import wait_until


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
        assert "test_stalls.py" in "".join(found.traceback)
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


def test_rank_that_is_late_for_less_than_the_timeout_is_not_accused(monkeypatch):
    assert found_by_rank_0(monkeypatch, [{"0": 7}, {"0": 6}], timed_out=False) is None


def test_ranks_that_computed_for_long_are_not_accused_at_their_next_collective(monkeypatch):
    """Neither had waited: the clock looks once per second, and had not seen that rank 0 went on."""
    started = {"0": {"0": 6}, "1": {"0": 6}}
    monkeypatch.setattr(module, "num_started", lambda: started[threading.current_thread().name])
    monkeypatch.setattr(threading.current_thread(), "name", "0")
    mine, other = ranks_of(LimitedStore(dist.HashStore()), 2)
    for rank in (mine, other):
        rank.tick()
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


def test_pause_of_this_process_is_noticed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    (mine,) = ranks_of(None, 1)
    for _ in range(5):
        now[0] += 1.0
        mine.tick()
    assert mine.pause_s() == 0.0
    now[0] += 15.0
    assert mine.pause_s() == 15.0  # before the watchdog runs again
    mine.tick()
    now[0] += 2.0
    mine.tick()
    assert mine.pause_s() == 15.0
    now[0] += 1.0
    for _ in range(20):
        now[0] += 1.0
        mine.tick()
    assert mine.pause_s() == 0.0
