"""What holds for any tool: the record comes first, a failure is one warning, a slow one holds nobody up."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import types

import pytest

from harness.config import loader
from harness.errors import ConfigError
from harness.trackers import mirrors
from harness.trackers.mirror import Clock, Sample, scalars
from harness.trackers.record import JsonLines, Nothing
from tests.fixtures import make_config, write_rows


class Listener:
    """A tool that writes down what it is told, and fails or waits where a test says so."""

    told: list
    fail_in: str
    gate: threading.Event

    def _note(self, call, content):
        self.gate.wait(20)
        if self.fail_in == call:
            raise RuntimeError(f"broke in {call}\nand says more")
        self.told.append((call, content))

    def start(self, facts, lines):
        self._note("start", [line["step"] for line in lines])
        return "look here"

    def log(self, line):
        self._note("log", line["step"])

    def show(self, sample):
        self._note("show", sample.rows)

    def finish(self, files, done):
        self._note("finish", ([path.name for path in files], done))


@pytest.fixture
def listener(monkeypatch):
    """The tool ``tensorboard``, for the length of a test."""
    gate = threading.Event()
    gate.set()
    kind = type("Mirror", (Listener,), {"told": [], "fail_in": "", "gate": gate})
    module = types.ModuleType("harness.trackers.tensorboard")
    module.Mirror = kind
    monkeypatch.setitem(sys.modules, "harness.trackers.tensorboard", module)
    monkeypatch.setattr(mirrors, "require", lambda names: None)
    return kind


@pytest.fixture
def make(tmp_path, listener):
    write_rows(tmp_path, "train", 4)
    write_rows(tmp_path, "eval", 4)
    config = make_config(tmp_path, trackers=["tensorboard"])
    folder = tmp_path / "run"
    folder.mkdir()
    return lambda: mirrors.make(folder / "metrics.jsonl", 0, config, loader.to_text(config))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)


def test_everything_is_told_in_order(tmp_path, make, listener):
    tracker = make()
    tracker.rewind(0)
    tracker.log("train", {"step": 1, "loss": 0.5})
    offset = tracker.offset()
    tracker.log("train", {"step": 2, "loss": 0.4})
    tracker.show(Sample(["id"], [[1]], None))
    (tmp_path / "run" / "summary.json").write_text("{}")
    tracker.close(done=True)
    assert listener.told == [
        ("start", []), ("log", 1), ("log", 2), ("show", [[1]]), ("finish", (["summary.json"], True)),
    ]  # fmt: skip

    listener.told.clear()  # killed after step 2; the checkpoint vouches for step 1
    again = make()
    again.rewind(offset)
    again.log("train", {"step": 2, "loss": 0.3})
    again.close()
    assert listener.told == [("start", [1]), ("log", 2), ("finish", (["summary.json"], False))]


def test_a_run_keeps_its_id_and_its_start(make, listener, tmp_path):
    first, second = make(), make()
    kept = json.loads((tmp_path / "run" / "trackers.json").read_text())
    facts = [tracker._followers[0]._facts for tracker in (first, second)]
    assert {(fact.id, fact.started) for fact in facts} == {(kept["id"], kept["started"])}
    (tmp_path / "run" / "trackers.json").write_text("{")
    assert make()._followers[0]._facts.id != kept["id"]


@pytest.mark.parametrize("where", ["start", "log", "show", "finish"])
def test_a_failure_is_one_warning_and_the_record_goes_on(tmp_path, make, listener, caplog, where):
    listener.fail_in = where
    tracker = make()
    tracker.rewind(0)
    for step in range(1, 6):
        tracker.log("train", {"step": step})
    tracker.show(Sample(["id"], [[1]], None))
    tracker.close(done=True)
    (warning,) = warnings(caplog)
    assert f"RuntimeError: broke in {where} (metrics.jsonl has everything)" in warning
    assert "says more" not in warning
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3, 4, 5]
    calls = [call for call, _ in listener.told]
    assert where not in calls  # and after it nothing more
    assert calls == ["start", *["log"] * 5, "show", "finish"][: len(calls)]


def test_a_tool_that_cannot_be_imported_is_a_warning(make, listener, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "harness.trackers.tensorboard", None)
    tracker = make()
    tracker.rewind(0)
    tracker.log("train", {"step": 1})
    tracker.close()
    (warning,) = warnings(caplog)
    assert "tensorboard is off" in warning


def test_a_slow_tool_holds_nobody_up(make, listener, monkeypatch, caplog):
    monkeypatch.setattr(mirrors, "STOP_S", 0.2)
    listener.gate.clear()
    tracker = make()
    before = time.monotonic()
    tracker.rewind(0)
    for step in range(1000):
        tracker.log("train", {"step": step})
    tracker.close()
    assert time.monotonic() - before < 5  # one call alone would wait 20 s
    (warning,) = warnings(caplog)
    assert "has not taken everything within 0 s" in warning
    listener.gate.set()


def test_a_tool_that_falls_behind_is_dropped(make, listener, monkeypatch, caplog):
    monkeypatch.setattr(mirrors, "MAX_WAITING", 10)
    listener.gate.clear()
    tracker = make()
    tracker.rewind(0)
    for step in range(100):
        tracker.log("train", {"step": step})
    (warning,) = warnings(caplog)
    assert "it is 10 lines behind" in warning
    listener.gate.set()
    tracker.close()
    assert len(listener.told) <= 1


def test_without_tools_there_is_the_record_alone(tmp_path):
    write_rows(tmp_path, "train", 4)
    config = make_config(tmp_path)
    assert isinstance(mirrors.make(tmp_path / "m", 0, config, ""), JsonLines)
    assert isinstance(mirrors.make(tmp_path / "n", 1, make_config(tmp_path, trackers=["wandb"]), ""), Nothing)
    assert not (tmp_path / "n").exists()
    assert not (tmp_path / "trackers.json").exists()


def test_a_tool_that_is_not_installed_is_a_config_error(monkeypatch):
    monkeypatch.setattr(mirrors.importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    mirrors.require(["tensorboard", "wandb"])
    with pytest.raises(ConfigError) as error:
        mirrors.require(["wandb", "mlflow"])
    assert error.value.where == "trackers"
    assert "mlflow is not installed" in str(error.value)
    assert "pip install 'apex-harness[mlflow]'" in str(error.value)


def test_numbers_of_a_line():
    line = {"split": "eval", "step": 3, "epoch": 1, "top1": 0.5, "loss": None, "name": "x", "good": True, "wall_s": 2.0}
    assert scalars(line) == {"eval/epoch": 1, "eval/top1": 0.5, "eval/wall_s": 2.0}


def test_times_come_from_the_record():
    clock = Clock(1000.0)
    assert [clock.time(line) for line in ({"wall_s": 2.5}, {}, {"wall_s": 4.0})] == [1002.5, 1002.5, 1004.0]
