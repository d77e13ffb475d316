"""Output: a bar on a terminal, plain lines elsewhere, and a log file per rank."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import struct
import sys
import termios
import time
import warnings
from contextlib import contextmanager

import pytest

from harness import cli
from harness.runs import console, fetch
from harness.runs.console import ProgressBar
from tests.end_to_end.processes import wait_until


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
        progress.start("epoch 1/2", 0)
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
    assert "4/8" in text, "of the run, as in the lines"
    assert "loss 0.5000  lr 0.1  100 rows/s  5 min left" in text, "of the run, which has 5 steps left"


def test_bar_of_an_evaluation(terminal, monkeypatch, clock):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressBar(rank=0)
    progress.open("validation", "batch", 0, 3)
    for _ in range(3):
        clock.now += 1
        progress.step()
    progress.stop()
    text = shown()
    assert "validation:" in text
    assert "3/3" in text


def test_other_ranks_show_nothing(terminal, monkeypatch, clock):
    stream, shown = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    clock.use(ProgressBar(rank=1))
    assert shown() == ""


def test_plain_lines_without_a_terminal(log, capsys, clock):
    """The first after the first step, then the first numbers at once, new numbers after 10 s, and the position after
    30 s without any. Numbers are written once."""
    console.to_terminal(0)
    progress = ProgressBar(rank=0, total_steps=1000)
    progress.start("epoch 1/2", 0)
    for step in range(1, 101):
        clock.now += 1
        progress.step()
        if step in (4, 12, 15, 20):
            progress.show(f"loss 0.{step} (step {step})")
    progress.open("validation", "batch", 0, 80)
    for _ in range(40):
        clock.now += 1
        progress.step()
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "epoch 1/2  step 1/1000",
        "epoch 1/2  step 4/1000  loss 0.4 (step 4)  17 min left",
        "epoch 1/2  step 15/1000  loss 0.15 (step 15)  16 min left",
        "epoch 1/2  step 46/1000  loss 0.20 (step 20)  16 min left",
        "epoch 1/2  step 77/1000  15 min left",
        "validation  batch 8/80  16 min left",
        "validation  batch 39/80  21 min left",
    ]


def test_numbers_are_written_once_and_steps_are_those_of_the_run(log, capsys, clock):
    """Also in the next epoch, and after an evaluation."""
    console.to_terminal(0)
    progress = ProgressBar(rank=0, total_steps=300)
    progress.start("epoch 1/2", 0)
    progress.show("loss 0.9000 (step 149)")
    progress.show("loss 0.8000 (step 150)")
    progress.stop()
    for done in (150, 200):
        progress.open("validation", "batch", 0, 1)
        progress.start("epoch 2/2", done)
        clock.now += 31
        progress.step()
        clock.now += 11
        progress.show("loss 0.5000")
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"  \d+ min left", "", line[9:]) for line in lines] == [
        "epoch 1/2  step 0/300  loss 0.9000 (step 149)",
        "epoch 2/2  step 151/300  loss 0.8000 (step 150)",
        "epoch 2/2  step 151/300  loss 0.5000",
        "epoch 2/2  step 201/300",
        "epoch 2/2  step 201/300  loss 0.5000",
    ]


def test_lines_of_a_table_without_a_run(log, capsys, clock):
    console.to_terminal(0)
    progress = ProgressBar(rank=0)
    progress.open("predictions.csv", "batch", 0, 90)
    for _ in range(40):
        clock.now += 1
        progress.step()
    lines = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in lines] == [
        "predictions.csv  batch 1/90",
        "predictions.csv  batch 32/90  58 s left",
    ]


@pytest.fixture
def at_once(monkeypatch):
    """Work that shows itself at once and often."""
    for name in ("WORK_S", "SILENT_S", "_REDRAWN_S"):
        monkeypatch.setattr(console, name, 0.01)
    monkeypatch.setattr(console, "_shown_by", None)


@pytest.mark.parametrize("logs", [False, True])
def test_lines_of_other_work(log, capsys, at_once, logs):
    """Again and again, with the count: in the log, or from a command that has none."""
    log.handlers = []
    console.to_terminal(0) if logs else console.show_work()
    text = ""

    def shown(line: str) -> bool:
        nonlocal text
        text += capsys.readouterr().err
        return bool(re.search(rf"^\d\d:\d\d:\d\d {line}, 0 s$", text, re.M))

    with console.working("converting a.csv", "rows") as work:
        work.done = 1200
        wait_until(lambda: shown("converting a.csv: 1,200 rows"), 30, "a line")
        work.done, work.total = 1300, 5000
        wait_until(lambda: shown("converting a.csv: 1,300 of 5,000 rows"), 30, "another one")
    with console.working("copying b", "MiB", measure=lambda: 7):
        wait_until(lambda: shown("copying b: 7 MiB"), 30, "what is measured")
    with console.working("exporting c"):
        wait_until(lambda: shown("exporting c"), 30, "work without a count")


class Terminal(io.StringIO):
    """A terminal that tells no width."""

    def isatty(self) -> bool:
        return True


def test_bar_of_other_work(monkeypatch, at_once):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console.show_work()
    with console.working("copying b", "MiB", total=8) as work:
        work.done = 4
        wait_until(lambda: re.search(r"copying b:  50%\|.*\| 4/8", stream.getvalue()), 30, "a bar")
    assert re.search(r"\r +\r$", stream.getvalue()), "it is erased"
    with console.working("exporting c"):
        wait_until(lambda: "exporting c, 0 s" in stream.getvalue(), 30, "work without a count")


def test_other_work_of_another_rank_or_process_is_not_shown(monkeypatch, at_once):
    """It would draw into the bar of rank 0. A process that was forked is none that this one has told to."""
    monkeypatch.setattr(console, "thread", None)  # which fails where work is shown
    with console.working("copying b"):
        pass
    console.show_work(rank=1)
    with console.working("copying b"):
        pass
    console.show_work()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with console.working("copying b"):
        pass


def test_what_is_left_of_a_long_step(clock):
    """A stop waits for it, and says how long."""
    progress = ProgressBar(rank=0, total_steps=8)
    assert progress.rest() == ""
    progress.start("epoch 1/2", step=0)
    clock.now += 70
    assert progress.rest() == "after this step (1 min so far)"
    progress.step()
    clock.now += 20
    assert progress.rest() == "after this step (about 50 s)"
    clock.now += 60
    assert progress.rest() == "after this step (1 min so far)"
    progress.open("validation", "batch", 0, 3)
    clock.now += 1
    assert progress.rest() == ""
    clock.now += 2
    assert progress.rest() == "after this batch (3 s so far)"


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


@pytest.mark.parametrize("rank", [0, 1])
def test_log_file_per_rank(log, tmp_path, capsys, rank):
    console.to_terminal(rank)
    console.to_file(tmp_path / "logs", rank)
    log.info("hello from rank %d", rank, extra=console.IN_FILE)
    assert f"INFO hello from rank {rank}" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_of_own_code_are_shown_once_for_each_line_by_rank_0(log, tmp_path, capsys, rank):
    console.to_terminal(rank)
    console.to_file(tmp_path / "logs", rank)
    for file, line, text in [("mine.py", 3, "one"), ("mine.py", 3, "two"), (console.__file__, 3, "three"),
                             ("mine.py", 7, "four")]:  # fmt: skip
        warnings.showwarning(text, UserWarning, file, line)
    assert re.findall(r"mine.py:\d: UserWarning: (\w+)", (tmp_path / "logs" / f"rank-{rank}.log").read_text()) == [
        "one", "two", "four"]  # fmt: skip
    shown = ["mine.py:3: UserWarning: one", "mine.py:7: UserWarning: four"] if rank == 0 else []
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == shown


def test_what_takes_long_shows_its_progress(log, tmp_path, monkeypatch):
    """Data verbs, conversions, downloads and exports: each says what it does, and how far it is in the end."""
    shown = {}

    @contextmanager
    def recorded(what, unit="", total=0, measure=None):
        work = console.Work(what, unit, 0, total)
        yield work
        work.done = measure() if measure else work.done
        shown[what.replace(str(tmp_path), "DIR")] = work.describe().partition(": ")[2]

    for module in ("runs.fetch", "data.table.convert", "data.texts", "tools.data.table_file", "tools.data.split",
                   "inference.export"):  # fmt: skip
        monkeypatch.setattr(f"harness.{module}.working", recorded)
    monkeypatch.setattr(console, "_shown_by", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "photos" / name / f"{number}.png").touch()
    assert cli.main(["data", "folder", "photos", "p.csv"]) == 0
    assert cli.main(["data", "split", "p.csv", "--eval", "0.3"]) == 0
    (tmp_path / "big").write_bytes(bytes(3 << 20))
    fetch.fetched(f"file://{tmp_path}/big", tmp_path / "copy")
    (tmp_path / "t.csv").write_text("text,label\n" + "a b,x\nc d,y\n" * 4)
    config = {"name": "t", "task": {"name": "text_csv", "train_csv": "t.csv", "eval_csv": "t.csv"},
              "batch": {"global": 4}, "optimizer": {"name": "sgd", "lr": 0.1}, "model": {"name": "text_cnn"},
              "precision": {"opt_level": "O0"}, "train": {"epochs": 1, "deterministic": False}}  # fmt: skip
    (tmp_path / "t.yaml").write_text(json.dumps(config))
    assert cli.main(["train", "t.yaml", "runtime.device=cpu"]) == 0
    assert cli.main(["export", "runs/t", "--format", "safetensors"]) == 0
    assert shown == {
        "writing p.csv": "20 rows", "reading p.csv": "", "writing p.train.csv and p.eval.csv": "20 of 20 rows",
        "copying file://DIR/big": "3 of 3 MiB", "converting t.csv": "8 rows",
        "counting the words of t.csv": "0 of 8 rows", "exporting the model to model.safetensors": "",
    }  # fmt: skip
