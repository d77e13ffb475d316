"""Output: a bar on a terminal, plain lines elsewhere, and a log file per rank."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import sys
import termios
import time

import pytest

from harness.training import console
from harness.training.console import ProgressBar


@pytest.fixture
def log():
    """The logger, restored after the test."""
    logger, warnings = logging.getLogger("harness"), logging.getLogger("py.warnings")
    before = (list(logger.handlers), logger.level, logger.propagate, list(warnings.handlers), warnings.propagate)
    yield logger
    logging.captureWarnings(False)
    for handler in [*logger.handlers, *warnings.handlers]:
        handler.close()
    logger.handlers, logger.level, logger.propagate, warnings.handlers, warnings.propagate = before


@pytest.fixture
def terminal():
    """A pseudo-terminal of 30 x 100: (stream to write to, function that returns what it shows)."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    stream = os.fdopen(inside, "w")
    os.set_blocking(outside, False)

    def shown() -> str:
        stream.flush()
        try:
            return os.read(outside, 1 << 16).decode()
        except BlockingIOError:
            return ""

    yield stream, shown
    stream.close()
    os.close(outside)


def use(progress: ProgressBar) -> None:
    progress.start(epoch=0, epochs=2, done=0, steps=4)
    for _ in range(4):
        progress.step()
        progress.show("loss 0.5000  lr 0.1  100 rows/s")
        time.sleep(0.12)  # a bar is drawn at most ten times a second
    progress.stop()


def test_bar_on_a_terminal(terminal, monkeypatch):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    use(ProgressBar(rank=0))
    text = shown()
    assert "epoch 1/2:" in text
    assert "4/4" in text
    assert "loss 0.5000  lr 0.1  100 rows/s" in text


def test_other_ranks_show_nothing(terminal, monkeypatch):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    use(ProgressBar(rank=1))
    assert shown() == ""


def test_plain_lines_without_a_terminal(log, monkeypatch, capsys):
    console.to_terminal(0)
    monkeypatch.setattr(console, "PLAIN_PERIOD_S", 0.2)
    use(ProgressBar(rank=0))
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 4, "one line per period, not per step"
    assert lines[0].startswith("epoch 1/2  step ")
    assert "loss 0.5000" in lines[0]


def test_terminal_shows_rank_0_and_errors_of_other_ranks(log, capsys):
    console.to_terminal(0)
    log.info("hello")
    console.to_terminal(3)
    log.info("quiet")
    log.error("broken")
    assert capsys.readouterr().err.splitlines() == ["hello", "rank 3: broken"]


def test_log_file_per_rank(log, tmp_path):
    console.to_terminal(1)
    console.to_file(tmp_path / "logs", 1)
    log.info("hello from rank 1")
    assert "INFO hello from rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()
