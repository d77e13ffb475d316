"""Signals that ask for an end: which are counted, what stands before and after, and who obeys them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from harness.distributed import signals
from harness.distributed.monitor import Outcome, attend

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def terminal():
    """Whatever these tests were started under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


class Stoppable:
    """Stands for a run that ends when it is asked to, having sent ``numbers`` to this process."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers, self._asked = numbers, threading.Event()

    def follow(self) -> Outcome:
        for number in self._numbers:
            os.kill(os.getpid(), number)
        return Outcome(stopped=self._asked.wait(0.3))

    def stop(self) -> None:
        self._asked.set()


def test_each_one_counts_and_what_was_before_is_put_back(terminal):
    before = [signal.getsignal(number) for number in ASKING]
    with signals.counted() as stops:
        for count, number in enumerate(ASKING, 1):
            signal.raise_signal(number)  # to this thread; the process may be given one a moment later
            assert stops() == count
    assert [signal.getsignal(number) for number in ASKING] == before


def test_under_nohup_a_closed_terminal_is_no_request_to_stop(nohup):
    with signals.counted() as stops:
        signal.raise_signal(signal.SIGHUP)
        assert stops() == 0
        signal.raise_signal(signal.SIGTERM)
        assert stops() == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_in_a_thread_nothing_is_touched():
    def count(counts: list[int]) -> None:
        with signals.counted() as stops:
            counts.append(stops())

    counts: list[int] = []
    thread = threading.Thread(target=count, args=[counts])
    thread.start()
    thread.join(10)
    assert counts == [0]


def test_a_run_is_stopped_and_says_what_another_signal_would_do(capsys):
    assert attend(Stoppable(signal.SIGTERM)).stopped
    assert capsys.readouterr().err == "stopping: every rank writes a checkpoint; once more ends them at once\n"


def test_under_nohup_a_run_outlives_the_terminal(nohup, capsys):
    assert not attend(Stoppable(signal.SIGHUP)).stopped
    assert capsys.readouterr().err == ""
