"""Collectives hold at one, two and three ranks, and errors of one are those of all."""

from __future__ import annotations

import os
import time
import traceback
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from harness.distributed import collectives as module
from harness.distributed import process_group
from harness.distributed.launch_env import Launch, detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.threads import Background
from harness.errors import DataError, LaunchError, OwnCodeError, TrainingError
from tests.end_to_end.processes import wait_until
from tests.ranks import run_ranks


@contextmanager
def opened(timeout_s: float = 20.0, work_timeout_s: float = 60.0):
    with open_runtime(detect(os.environ), "cpu", timeout_s, work_timeout_s) as runtime:
        yield runtime


def collectives(runtime: Runtime) -> dict:
    rank, world = runtime.rank, runtime.world_size
    found = {
        "sum": runtime.sum(torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)).tolist(),
        "sum on host": runtime.sum_on_host(torch.tensor([1 << 60, rank])).tolist(),
        "gather": runtime.gather({"rank": rank}),
        "first": runtime.gather_to_first(rank),
        "from": runtime.from_first(f"rank {rank}"),
    }
    runtime.all_equal(7, "the number", "")
    late = runtime.max_async([rank, -rank])
    runtime.barrier()
    found["max"] = late()
    with runtime.together("nothing wrong"):
        pass
    if world > 1:
        with pytest.raises(LaunchError, match='the digest: "') as caught:
            runtime.all_equal("b" if rank == world - 1 else "a", "the digest", "copy it")
        found["odd"] = str(caught.value)
    return found


def expected(rank: int, world: int) -> dict:
    return {
        "sum": [world * (world + 1) / 2, float(world)],
        "sum on host": [world << 60, world * (world - 1) // 2],
        "gather": [{"rank": other} for other in range(world)],
        "first": list(range(world)) if rank == 0 else [],
        "from": "rank 0",
        "max": [world - 1, 0],
    }


def _all_collectives():
    with opened() as runtime:
        assert runtime.host
        return collectives(runtime)


def test_collectives_of_one_rank():
    with open_runtime(Launch(), "cpu") as runtime:
        assert not torch.distributed.is_initialized()
        assert collectives(runtime) == expected(0, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives(world):
    for rank, found in enumerate(run_ranks(world, _all_collectives, group=False, timeout_s=40)):
        assert '"b" on rank' in found.pop("odd")
        assert found == expected(rank, world)


def _errors_together():
    told = []
    with opened() as runtime:
        rank = runtime.rank
        for failing in ([1], [2, 1], [0, 1, 2]):
            try:
                with runtime.together("reading"):
                    if rank in failing:
                        if rank == 2:
                            time.sleep(0.3)
                        raise DataError(f"row of rank {rank}", where="a.csv:3", hint="mend it")
            except DataError as error:
                told.append((error.message, error.where, error.hint, error.origin_rank))
        try:
            with runtime.together("building"):
                if rank == 1:
                    raise ValueError("odd shape")
        except Exception as error:
            told.append((type(error).__name__, str(error), getattr(error, "origin_rank", None)))
        runtime.barrier()  # and the ranks are still in step
    return told


def test_together_raises_the_lowest_ranks_error_everywhere():
    for rank, told in enumerate(run_ranks(3, _errors_together, group=False, timeout_s=40)):
        firsts = [1, 1, 0]
        assert told[:3] == [
            (f"row of rank {first}", "a.csv:3", "mend it", None if rank == first else first) for first in firsts
        ]
        own = ("ValueError", "odd shape", None)
        kind, text, origin = told[3]
        assert (kind, text.rpartition("building: ")[2], origin) == (
            own if rank == 1 else ("OwnCodeError", "ValueError: odd shape", 1)
        )


def _read_row(rank: int):
    if rank == 1:
        raise ValueError("odd row")


def _nested():
    with opened() as runtime:
        try:
            with runtime.together("saving"), runtime.together("reading"):
                _read_row(runtime.rank)
        except Exception as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            return type(error).__name__, getattr(error, "origin_rank", None), "_read_row" in frames


def test_a_rank_that_hears_of_its_own_error_raises_the_one_with_the_traceback():
    """Rank 0, which is asked first, has only a copy."""
    assert run_ranks(2, _nested, group=False) == [("OwnCodeError", 1, False), ("ValueError", None, True)]


def _leave_together(how: type[BaseException]):
    """Rank 1 leaves a stage in a way that is no Exception."""
    began = time.monotonic()
    try:
        with opened(timeout_s=30.0) as runtime, runtime.together("building"):
            if runtime.rank == 1:
                raise how
    except BaseException as error:
        return type(error).__name__, getattr(error, "origin_rank", None), time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("how", "of_rank_0"),
    [(SystemExit, ("OwnCodeError", 1, True)), (KeyboardInterrupt, ("RuntimeError", None, True))],  # connection lost
)
def test_rank_that_leaves_together_keeps_nobody_waiting(how, of_rank_0):
    found = run_ranks(2, _leave_together, how, group=False, timeout_s=60)
    assert found == [of_rank_0, (how.__name__, None, True)]


def _fork_in_together():
    child = 0
    with opened() as runtime:
        with suppress(SystemExit), runtime.together("building"):
            child = os.fork()
            if child == 0:
                raise SystemExit
        if child == 0:
            os._exit(3)
        wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 3 << 8), 10, "the end of the forked process")
        return runtime.gather(runtime.rank)


def test_forked_process_that_ends_takes_no_part_in_together():
    assert run_ranks(2, _fork_in_together, group=False, timeout_s=60) == [[0, 1]] * 2


def test_together_on_one_rank_raises_the_error_itself():
    with pytest.raises(ZeroDivisionError), Runtime().together("dividing"):
        raise ZeroDivisionError


# Announced work


def _slow_work():
    """Rank 1 works for longer than a rank may be silent, alone and then inside a stage with collectives."""
    with opened(timeout_s=0.8) as runtime:
        slow = partial(time.sleep, 1.6 * runtime.rank)
        found = [runtime.patiently("resting", lambda: slow() or runtime.rank)]
        with runtime.announced("compiling"):
            slow()
            found += runtime.sum(torch.ones(1)).tolist()
            found += runtime.gather(runtime.rank)
        began = time.monotonic()
        try:
            slow()
            runtime.barrier()
        except RuntimeError:
            found.append(time.monotonic() - began < 4)  # the limit is that of silence again
    return found


def test_announced_work_may_take_longer_than_a_rank_may_be_silent():
    assert run_ranks(2, _slow_work, group=False, timeout_s=60) == [[rank, 2.0, 0, 1, True] for rank in range(2)]


def _stuck():
    time.sleep(60)


def _hangs_in_work():
    began = time.monotonic()
    with opened(timeout_s=1.0, work_timeout_s=2.0) as runtime:
        with pytest.raises(TrainingError) as caught:
            runtime.patiently("saving", _stuck if runtime.rank == 1 else time.time)
        return caught.value.message, caught.value.origin_rank, time.monotonic() - began < 20


def test_rank_that_hangs_in_announced_work_is_found():
    for message, rank, soon in run_ranks(2, _hangs_in_work, group=False, timeout_s=60):
        assert "_stuck (test_runtime.py:" in message
        assert (rank, soon) == (1, True)


def _fails_in_work(failing):
    """The others do not wait until their own work is done."""

    def work():
        if runtime.rank in failing:
            raise DataError(f"row of rank {runtime.rank}")
        time.sleep(60)

    began = time.monotonic()
    with opened() as runtime:
        with pytest.raises(DataError) as caught:
            runtime.patiently("reading", work)
        return caught.value.message, caught.value.origin_rank, time.monotonic() - began < 20


@pytest.mark.parametrize("failing", [(1,), (0, 1, 2)])
def test_an_error_in_announced_work_ends_it_everywhere(failing):
    for rank, found in enumerate(run_ranks(3, _fails_in_work, failing, group=False, timeout_s=60)):
        assert found == (f"row of rank {failing[0]}", None if rank == failing[0] else failing[0], True)


def _fails_while_another_is_late():
    with opened() as runtime:
        work = Background((lambda: time.sleep(60)) if runtime.rank == 0 else partial(_read_row, 1), "work")
        if runtime.rank == 1:
            wait([work])
        runtime.barrier()
        with pytest.raises((TrainingError, OwnCodeError, ValueError)) as caught:
            runtime.await_work("reading", work, limit_s=0.0)
        return str(caught.value)


def test_a_failure_is_the_cause_of_what_is_late_since():
    for text in run_ranks(2, _fails_while_another_is_late, group=False):
        assert "odd row" in text


def _late_rank():
    """Rank 0 gives up after a second; rank 1 would wait for a minute, but must not."""
    start = time.monotonic()
    try:
        with opened(1.5 if os.environ["RANK"] == "0" else 60.0) as runtime:
            if runtime.rank == 1:
                time.sleep(2.5)
            runtime.barrier()
            return "met", 0.0
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - start


def test_different_timeouts_do_not_hang():
    results = run_ranks(2, _late_rank, group=False, timeout_s=100)
    assert all(kind != "met" and seconds < 60 for kind, seconds in results)


def _counted_differently():
    """As on two nodes of which one took a restart and the other was asked to come along."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    with open_runtime(detect(os.environ), "cpu", 10.0) as runtime:
        return runtime.gather(runtime.launch.restart)


def test_nodes_with_different_restart_counts_meet():
    assert run_ranks(2, _counted_differently, group=False, timeout_s=30) == [[0, 1]] * 2


def _two_starts(port: int):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    seen = []
    for restart in ("0", "1"):
        with open_runtime(detect({**os.environ, "TORCHELASTIC_RESTART_COUNT": restart}), "cpu", 10.0) as runtime:
            seen.append(runtime.store.check(["left"]))
            runtime.barrier()
            runtime.store.set("left", "by an earlier start")
    return seen


def test_restarted_ranks_ignore_old_keys_of_the_launchers_store():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(2, _two_starts, store.port, group=False, timeout_s=30) == [[False] * 2] * 2


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "WARN"), ("INFO", "INFO")])
def test_nccl_says_why_it_fails(monkeypatch, set_by_user, expected):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_DEBUG", set_by_user or "")  # so that it is restored
    if not set_by_user:
        monkeypatch.delenv("NCCL_DEBUG")
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get("NCCL_DEBUG")))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    process_group._connect(Launch(world_size=2), torch.device("cuda", 0), dist.HashStore(), 5.0, 60.0)
    assert seen == [expected]


def test_nccl_aborts_only_after_the_missing_rank_has_been_named(monkeypatch):
    """The watchdog needs some time after the limit. Then torch dumps what NCCL was doing, and aborts the process."""
    limits: list[float] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: limits.append(timeout.total_seconds()))
    for device in ("cpu", "cuda"):
        runtime = process_group._connect(Launch(world_size=2), torch.device(device), dist.HashStore(), 5.0, 60.0)
    assert limits == [5.0, 50.0]
    limits.clear()
    runtime.work_timeout_s, runtime.group = 60.0, "gloo"
    monkeypatch.setattr(runtime, "barrier", lambda: None)
    monkeypatch.setattr(module, "main_groups", lambda: ["cpu:gloo,cuda:nccl", "gloo"])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group)
    monkeypatch.setattr(dist, "set_timeout", lambda limit, group: limits.append(limit.total_seconds()), raising=False)
    with runtime.announced("compiling"):
        pass
    assert limits == [105.0, 60.0, 50.0, 5.0]
    with runtime.announced("compiling"):
        with runtime.announced("loading the compiler"):
            pass
        assert runtime.peer_limit_s == 60.0  # still
    assert runtime.peer_limit_s == 5.0
