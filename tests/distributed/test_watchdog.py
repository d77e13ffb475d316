"""The watch ends a rank that waits for the dead: a peer's mark, a lost store, a lost launcher; and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.distributed import watchdog as module
from harness.distributed.launch_env import Launch, detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.distributed.stop import Stop
from harness.distributed.watchdog import Watch
from harness.errors import EXIT_FAILURE
from tests.ranks import run_ranks, start


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module.logging, "shutdown", lambda: None)


def wait_for(happened, seconds: float = 5.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def watching(store, **launch):
    runtime = Runtime(Launch(**launch), store=store)
    stop, left = Stop(runtime), []
    return Watch(runtime, stop, left.append), stop, left


def test_a_peer_s_failure_asks_for_a_stop_and_ends_a_rank_that_cannot_obey(quick):
    store = dist.HashStore()
    mine, stop, left = watching(store)
    peer, _, _ = watching(store)
    with mine:
        time.sleep(0.1)
        assert not stop.reason
        assert peer.report({"rank": 3}) == {"rank": 3}
        wait_for(lambda: left)
    assert stop.reason == "rank 3 failed"
    assert left == [EXIT_FAILURE]
    assert mine.report({"rank": 5}) == {"rank": 3}  # the first failure is the launch's
    assert peer.report({"rank": 3}) == {"rank": 3}


def test_the_first_failure_is_the_one_that_counts():
    store = dist.HashStore()
    ranks = [Watch(runtime, Stop(runtime)) for runtime in (Runtime(Launch(rank=r), store=store) for r in range(3))]
    assert [watch.report({"rank": rank}) for rank, watch in enumerate(ranks[1:], 1)] == [{"rank": 1}] * 2


def test_lingering_ends_when_all_have_heard(monkeypatch):
    monkeypatch.setattr(module, "NEWS_S", 2.0)
    store = dist.HashStore()
    ranks = [Watch(runtime, Stop(runtime)) for runtime in
             (Runtime(Launch(rank=r, world_size=2), store=store) for r in range(2))]  # fmt: skip
    ranks[0].report({"rank": 0})
    ranks[1].acknowledge()
    begun = time.monotonic()
    ranks[0].linger()
    assert time.monotonic() - begun < 1.5


def test_lingering_for_a_peer_that_never_hears_is_short(monkeypatch):
    monkeypatch.setattr(module, "NEWS_S", 0.3)
    runtime = Runtime(Launch(world_size=2), store=dist.HashStore())
    begun = time.monotonic()
    Watch(runtime, Stop(runtime)).linger()
    assert time.monotonic() - begun < 2


def test_a_rank_that_ends_in_time_is_left_alone(quick, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 5.0)
    store = dist.HashStore()
    mine, stop, left = watching(store)
    with mine:
        mine.report({"rank": 0})
        wait_for(lambda: stop.reason)
        time.sleep(0.3)
        assert not left
    time.sleep(0.3)
    assert not left


def test_a_lost_store_counts_as_a_failure(quick):
    class Gone:
        def check(self, *_):
            raise dist.DistNetworkError("Connection reset by peer")

        set = compare_set = wait = check

    mine, stop, left = watching(Gone())
    assert mine.report({"rank": 1}) is None  # and never raises
    mine.linger()
    with mine:
        wait_for(lambda: left)
    assert "rank 0, or the launcher, is gone" in stop.reason


def test_alone_there_is_nothing_to_watch(quick):
    mine, stop, left = watching(None)
    assert mine.report({"rank": 0}) is None
    mine.linger()
    with mine:
        assert not mine._thread.is_alive()
    assert not stop.reason


def test_a_launcher_that_lives_is_no_reason(quick):
    mine, stop, left = watching(None, elastic=True, supervised=True)
    with mine:
        time.sleep(0.2)
    assert not stop.reason
    assert not left


def _orphan(path: str, elastic: bool):
    """Start a grandchild that watches, and end."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        module.PERIOD_S, module.GRACE_S = 0.02, 0.1
        runtime = Runtime(Launch(elastic=elastic, supervised=elastic))
        stop = Stop(runtime)

        def leave(code: int) -> None:
            Path(path).write_text(f"{code} {stop.reason}")
            os._exit(0)

        with Watch(runtime, stop, leave):
            os.write(tell, b"x")
            time.sleep(2)
            Path(path).write_text("still here")
        os._exit(0)
    os.read(ready, 1)


@pytest.mark.parametrize(("elastic", "expected"), [(True, "70 the launcher is gone"), (False, "still here")])
def test_the_launcher_s_death_is_noticed(tmp_path, elastic, expected):
    told = tmp_path / "told"
    process, _ = start(_orphan, (str(told), elastic))
    process.join(10)
    wait_for(lambda: told.exists() and told.read_text(), 10)
    assert told.read_text() == expected


def _orphan_that_has_not_met(path: str):
    """Start a grandchild that waits for others, and end."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        module.PERIOD_S = 0.02

        def leave(code: int) -> None:
            Path(path).write_text(str(code))
            os._exit(0)

        with module.unless_orphaned(Launch(supervised=True), leave=leave):
            os.write(tell, b"x")
            time.sleep(3)
        Path(path).write_text("still here")
        os._exit(0)
    os.read(ready, 1)


def test_the_launcher_s_death_is_noticed_before_all_have_met(tmp_path):
    told = tmp_path / "told"
    process, _ = start(_orphan_that_has_not_met, (str(told),))
    process.join(10)
    wait_for(lambda: told.exists() and told.read_text(), 10)
    assert told.read_text() == "70"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_launcher_that_dies_later_is_the_watch_s_business(quick, supervised):
    left = []
    with module.unless_orphaned(Launch(supervised=supervised), parent=None if supervised else 1, leave=left.append):
        time.sleep(0.1)
    assert not left


def _fail_on_one():
    module.PERIOD_S, module.GRACE_S = 0.05, 0.2
    with open_runtime(detect(os.environ), "cpu", 30.0) as runtime:
        stop, left = Stop(runtime), []
        with Watch(runtime, stop, left.append) as watch:
            runtime.barrier()
            if runtime.rank == 1:
                watch.report({"rank": 1})
            wait_for(lambda: stop.reason and left, 10)
        runtime.barrier()
        return stop.reason, left


def test_the_mark_travels_through_the_launch_s_store():
    assert run_ranks(2, _fail_on_one, group=False, timeout_s=30) == [("rank 1 failed", [70])] * 2
