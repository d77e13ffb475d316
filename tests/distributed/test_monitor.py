"""A signal to the launcher reaches the run, whatever has become of the terminal."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

from harness.distributed.monitor import EngineReport, follow_until_done


class Run:
    """It goes on until it is asked to stop."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        signal.raise_signal(signal.SIGTERM)

    def follow(self) -> EngineReport:
        return EngineReport(stopped=self.stopped.wait(20))

    def stop(self) -> None:
        self.stopped.set()


class Closed:
    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    flush = isatty


@pytest.mark.parametrize("terminal", [sys.stderr, Closed()])
def test_signal_stops_the_run(monkeypatch, terminal):
    """Also without a terminal, whose end sends SIGHUP."""
    monkeypatch.setattr(sys, "stderr", terminal)
    report = follow_until_done(Run)
    assert (report.stopped, report.signal) == (True, signal.SIGTERM)
