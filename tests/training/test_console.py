"""Output: a bar on a terminal, plain lines elsewhere, and a log file per rank."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import select
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


@pytest.fixture(params=[100, 0], ids=["100 columns", "no width"])
def terminal(request):
    """A pseudo-terminal: (stream to write to, function that returns what it shows). Without a width, as in docker and
    kubectl."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, request.param, 0, 0))
    stream = os.fdopen(inside, "w")

    def shown() -> str:
        stream.write("<end>")
        stream.flush()
        text = b""
        while not text.endswith(b"<end>"):
            assert select.select([outside], [], [], 30)[0]
            text += os.read(outside, 1 << 16)
        return text.decode().removesuffix("<end>")

    yield stream, shown
    stream.close()
    os.close(outside)


class Clock:
    """A clock that passes 0.2 s with each step, so that a bar, drawn at most ten times a second, shows each."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("tqdm.std.time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def use(self, progress: ProgressBar, step_s: float = 0.2) -> None:
        progress.start(epoch=0, epochs=2, done=0, steps=4)
        for _ in range(4):
            self.now += step_s
            progress.step()
            progress.show("loss 0.5000  lr 0.1  100 rows/s")
        progress.stop()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_bar_on_a_terminal(terminal, monkeypatch, clock):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    clock.use(ProgressBar(rank=0, total_steps=8), step_s=60)
    text = shown()
    assert "epoch 1/2:" in text
    assert "4/4" in text
    assert "loss 0.5000  lr 0.1  100 rows/s  5 min left" in text, "of the run, which has 3 steps left in this epoch"


def test_bar_of_an_evaluation_and_a_checkpoint(terminal, monkeypatch, clock):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressBar(rank=0)
    progress.start_evaluation(batches=3)
    for _ in range(3):
        clock.now += 1
        progress.step()
    progress.stop()
    text = shown()
    assert "validation:" in text
    assert "3/3" in text
    with progress.during("writing a checkpoint"):
        assert "writing a checkpoint" in shown()
    progress.start(epoch=0, epochs=2, done=0, steps=4)
    with progress.during("writing a checkpoint"):
        assert "epoch 1/2, writing a checkpoint" in shown()
    progress.stop()


def test_other_ranks_show_nothing(terminal, monkeypatch, clock):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressBar(rank=1)
    clock.use(progress)
    with progress.during("writing a checkpoint"):
        assert shown() == ""


def test_plain_lines_without_a_terminal(log, capsys, clock):
    """The first after the first step, then new numbers after 10 s, and the position after 30 s without any."""
    console.to_terminal(0)
    progress = ProgressBar(rank=0, total_steps=1000)
    progress.start(epoch=0, epochs=2, done=0, steps=500)
    for step in range(1, 101):
        clock.now += 1
        progress.step()
        if step == 15:
            progress.show("loss 0.5000")
    progress.start_evaluation(batches=80)
    for _ in range(40):
        clock.now += 1
        progress.step()
    with progress.during("writing a checkpoint"):
        clock.now += 31
    with progress.during("writing a checkpoint"):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "epoch 1/2  step 1/500",
        "epoch 1/2  step 15/500  loss 0.5000  16 min left",
        "epoch 1/2  step 46/500  loss 0.5000  16 min left",
        "epoch 1/2  step 77/500  loss 0.5000  15 min left",
        "validation  batch 8/80  16 min left",
        "validation  batch 39/80  21 min left",
        "writing a checkpoint",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3660, "1 h 1 min")])
def test_times_in_words(seconds, text):
    assert console.in_words(seconds) == text


def test_terminal_shows_rank_0_and_errors_of_other_ranks(log, capsys):
    console.to_terminal(0)
    log.info("hello")
    log.info("%14s: %s", "steps per epoch", 3)
    log.error("error: wrong")
    console.to_terminal(3)
    log.info("quiet")
    log.error("broken")
    first, *others = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello", first)
    assert others == ["steps per epoch: 3", "error: wrong", "rank 3: broken"]


def test_first_rank_of_another_machine_says_how_it_joined_and_ended(log, capsys):
    for of_node in (False, True):
        console.to_terminal(2, of_node)
        log.info("quiet")
        log.info("joined the run", extra=console.OF_NODE)
    assert capsys.readouterr().err.splitlines() == ["rank 2: joined the run"]


def test_log_file_per_rank(log, tmp_path):
    console.to_terminal(1)
    console.to_file(tmp_path / "logs", 1)
    log.info("hello from rank 1")
    assert "INFO hello from rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()
