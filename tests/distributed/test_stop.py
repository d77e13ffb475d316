"""Stopping together: one verdict on one call on all ranks, whoever asks; signals ask, and are put back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.data.loader_workers import in_loader_worker
from harness.distributed import signals
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop, on_signals
from harness.errors import EXITS_BY_SIGNAL
from tests.end_to_end.processes import wait_until
from tests.ranks import run_ranks, start, wait_for


def test_single_rank_stops_immediately():
    for ask in (Stop.poll, Stop.decide_now):
        stop = Stop(Runtime())
        assert not ask(stop)
        stop.request("SIGTERM")
        stop.request("a second reason")
        assert ask(stop)
        assert ask(stop)
        assert stop.reason == "SIGTERM"


def _calls_until_verdict(asking: int, pace_s: float):
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        stop = Stop(runtime)
        calls, deadline = 0, time.monotonic() + 60
        while not stop.poll():
            calls += 1
            assert time.monotonic() < deadline, "no verdict"
            if runtime.rank == asking and calls == 7:
                stop.request(f"asked by {asking}")
            time.sleep(pace_s * (1 + runtime.rank))
        return calls, stop.poll(), stop.decide_now(), stop.reason


@pytest.mark.parametrize(("world", "asking", "pace_s"), [(2, 0, 0.0), (3, 2, 0.001)])
def test_all_ranks_agree_on_the_same_call(world, asking, pace_s):
    results = run_ranks(world, _calls_until_verdict, asking, pace_s, group=False, timeout_s=90)
    calls = {result[0] for result in results}
    assert len(calls) == 1
    assert calls.pop() >= 7
    assert all(result[1:3] == (True, True) for result in results)
    assert [rank for rank, result in enumerate(results) if result[3] == f"asked by {asking}"] == [asking]


def _decide_now(asking: int):
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        stop = Stop(runtime)
        before = [stop.poll() for _ in range(4)], stop.decide_now(), stop.poll()  # a question is under way
        if runtime.rank == asking:
            stop.request("now")
        return before, stop.decide_now(), stop.poll()


@pytest.mark.parametrize("asking", [0, 1])
def test_decision_now_includes_every_request(asking):
    for before, decided, after in run_ranks(2, _decide_now, asking, group=False, timeout_s=30):
        assert before == ([False] * 4, False, False)
        assert decided
        assert after


# Signals


def test_the_exit_code_of_each_signal_is_known_to_launchers():
    for number in NUMBERS:
        stop = Stop(Runtime())
        stop.signal = number
        assert stop.exit_code in EXITS_BY_SIGNAL


NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_request_a_stop_and_handlers_are_restored(number, request):
    stop = Stop(Runtime())
    if signal.getsignal(number) is signal.SIG_IGN:  # as SIGHUP is under nohup, where a run leaves it ignored
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
    before = [signal.getsignal(one) for one in NUMBERS]
    with suppress(ZeroDivisionError), on_signals(stop):
        assert not stop.poll()
        signal.raise_signal(number)
        assert stop.poll()
        assert (stop.reason, stop.signal) == (signal.Signals(number).name, number)
        raise ZeroDivisionError
    assert [signal.getsignal(one) for one in NUMBERS] == before


def test_warning_signal_before_and_after_the_run_is_harmless():
    """The one before counts. In a process of its own: threads of this one would take the signal."""
    process, result = start(_early_word)
    assert wait_for([(process, result)], 30) == [0]


def _early_word() -> None:
    signals.install()
    signal.raise_signal(signal.SIGUSR1)
    stop = Stop(Runtime())
    with on_signals(stop):
        heard = stop.poll()
    for number in NUMBERS:
        signals.finish(0)
        signal.raise_signal(number)
    raise SystemExit(0 if heard else 1)


@pytest.mark.parametrize("supervised", [False, True])
def test_a_signal_is_answered_at_once_with_what_has_to_end_first(supervised, tmp_path):
    """Also by a rank whose launcher has said the rest, and while the main thread is in C code."""
    process, result = start(_answer, (supervised, str(tmp_path / "log")))
    assert wait_for([(process, result)], 30) == [0]
    left = "after this step (about 50 s)"
    alone = f"stopping (SIGTERM): a checkpoint is written first, {left}; Ctrl-C or another signal ends it immediately"
    assert (tmp_path / "log").read_text().splitlines() == [f"stopping (SIGTERM) {left}" if supervised else alone]


def _answer(supervised: bool, path: str) -> None:
    signals.install()
    log = logging.getLogger("harness")
    log.addHandler(logging.FileHandler(path))
    log.setLevel(logging.INFO)
    runtime = Runtime()
    runtime.launch = replace(runtime.launch, supervised=supervised)
    with on_signals(Stop(runtime), unfinished=lambda: "after this step (about 50 s)"):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: Path(path).read_text(), 20, "the answer")
    raise SystemExit(0)


def test_handlers_are_left_alone_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with on_signals(Stop(Runtime())):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert seen == [before]


def _loader_process(ready) -> None:
    in_loader_worker(0)
    ready.set()
    time.sleep(100)


def _started_loader_process():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_loader_process, args=(ready,), daemon=True)
    child.start()
    assert ready.wait(30)
    return child


def _pending(pid: int) -> bool:
    """Whether a SIGTERM waits until the process takes it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def _end_a_loader_process(by_parent: bool) -> bool:
    """True if a child that follows a loader process's rules ends of SIGTERM."""
    child = _started_loader_process()
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGUSR1)
    if by_parent:
        os.kill(child.pid, signal.SIGTERM)
        child.join(30)
    for _ in range(2 * (not by_parent)):  # a process that takes the second has survived the first
        messenger = os.fork()
        if messenger == 0:
            os.kill(child.pid, signal.SIGTERM)
            os._exit(0)
        os.waitpid(messenger, 0)
        wait_until(lambda: not _pending(child.pid), 30, "the process takes the signal")
    ended = not child.is_alive()
    child.kill()
    child.join(5)
    return ended


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a signal's sender is not told")


@linux
@pytest.mark.parametrize("by_parent", [True, False])
def test_only_the_parent_can_terminate_a_loader_process(by_parent):
    process, receiver = start(_end_a_loader_process, (by_parent,))
    assert receiver.poll(100)
    assert receiver.recv() == ("value", by_parent)
    process.join(5)


def _be_killed(path: str) -> None:
    Path(path).write_text(str(_started_loader_process().pid))
    os.kill(os.getpid(), signal.SIGKILL)


@linux
def test_loader_process_ends_with_its_killed_parent(tmp_path):
    process, _ = start(_be_killed, (str(tmp_path / "pid"),))
    process.join(60)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _running(child), 30, "it ends after its parent")


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
