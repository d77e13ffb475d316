"""Signals that end a supervised run: which are counted, and what the first and the second one do."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from harness.distributed import signals
from harness.distributed.monitor import EngineReport, follow_until_done

COUNTED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def hangup(request):
    """Sets the handler of SIGHUP to the parameter, whatever these tests were started under."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


terminal = pytest.mark.parametrize("hangup", [signal.SIG_DFL], indirect=True)
nohup = pytest.mark.parametrize("hangup", [signal.SIG_IGN], indirect=True)


class Stoppable:
    """A run that ends when it is stopped, after it has sent ``number`` to this process."""

    def __init__(self, number: signal.Signals) -> None:
        self._number, self._stopped = number, threading.Event()

    def follow(self) -> EngineReport:
        os.kill(os.getpid(), self._number)
        return EngineReport(stopped=self._stopped.wait(0.3))

    def stop(self) -> None:
        self._stopped.set()


@terminal
def test_every_signal_counts_and_handlers_are_restored(hangup):
    before = [signal.getsignal(number) for number in COUNTED]
    with signals.counted() as requests:
        for expected, number in enumerate(COUNTED, 1):
            signal.raise_signal(number)  # to this thread; os.kill may deliver a moment later
            assert len(requests.numbers) == expected
        signal.raise_signal(signal.SIGHUP)  # the kernel and the shell both send it when a terminal closes
        signal.raise_signal(signal.SIGUSR1)
        assert len(requests.numbers) == len(COUNTED)
    assert [signal.getsignal(number) for number in COUNTED] == before


@nohup
def test_under_nohup_sighup_is_ignored(hangup):
    with signals.counted() as requests:
        signal.raise_signal(signal.SIGHUP)
        assert len(requests.numbers) == 0
        signal.raise_signal(signal.SIGTERM)
        assert len(requests.numbers) == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_handlers_are_left_alone_outside_the_main_thread():
    def run(seen: list[object]) -> None:
        with signals.counted() as requests:
            seen += [len(requests.numbers), signal.getsignal(signal.SIGTERM)]

    seen: list[object] = []
    thread = threading.Thread(target=run, args=[seen])
    thread.start()
    thread.join(10)
    assert seen == [0, signal.getsignal(signal.SIGTERM)]


def test_signal_stops_a_run_and_the_message_explains_the_next_one(capsys):
    assert follow_until_done(lambda: Stoppable(signal.SIGTERM)).signal == signal.SIGTERM
    expected = "stopping (SIGTERM): every rank will write a checkpoint; Ctrl-C or another signal kills the ranks\n"
    assert capsys.readouterr().err == expected


@nohup
def test_under_nohup_a_run_outlives_the_terminal(hangup, capsys):
    assert not follow_until_done(lambda: Stoppable(signal.SIGHUP)).stopped
    assert capsys.readouterr().err == ""
