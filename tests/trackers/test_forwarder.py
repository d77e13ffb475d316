"""Forwarding to any tracker: the log comes first, a failure is one warning, a slow tracker delays nobody."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import types

import pytest

from harness.config import loader
from harness.trackers import forwarder, metrics_log
from harness.trackers.base import Sample
from tests.fixtures import make_config, write_rows


class RecordingTracker:
    """A tracker that records its calls, and fails or waits where a test asks for it."""

    calls: list
    infos: list
    fail_in: str
    gate: threading.Event

    def _record(self, call, content):
        self.gate.wait(20)
        if self.fail_in == call:
            raise RuntimeError(f"broke in {call}\nsecond line")
        self.calls.append((call, content))

    def start(self, info, entries):
        self.infos.append(info)
        self._record("start", [entry["step"] for entry in entries])
        return "view here"

    def log(self, entry):
        self._record("log", entry["step"])

    def show(self, sample):
        self._record("show", sample.rows)

    def finish(self, files, done):
        self._record("finish", ([path.name for path in files], done))


@pytest.fixture
def tracker(monkeypatch):
    """Takes the place of the tracker ``tensorboard``."""
    gate = threading.Event()
    gate.set()
    module = types.ModuleType("harness.trackers.tensorboard")
    module.Tracker = type("Tracker", (RecordingTracker,), {"calls": [], "infos": [], "fail_in": "", "gate": gate})
    monkeypatch.setitem(sys.modules, "harness.trackers.tensorboard", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if installed
    return module.Tracker


@pytest.fixture
def open_log(tmp_path, tracker):
    write_rows(tmp_path, "train", 4)
    write_rows(tmp_path, "eval", 4)
    config = make_config(tmp_path, trackers=["tensorboard"])
    folder = tmp_path / "run"
    folder.mkdir()
    return lambda: metrics_log.open_log(folder / "metrics.jsonl", 0, config, loader.to_text(config))


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_entries_arrive_in_order_and_are_replayed_on_resume(tmp_path, open_log, tracker):
    log = open_log()
    log.rewind(0)
    log.log("train", {"step": 1, "loss": 0.5})
    offset = log.offset()
    log.log("train", {"step": 2, "loss": 0.4})
    log.show(Sample(["id"], [[1]], None))
    (tmp_path / "run" / "summary.json").write_text("{}")
    log.close(done=True)
    assert tracker.calls == [
        ("start", []), ("log", 1), ("log", 2), ("show", [[1]]), ("finish", (["summary.json"], True)),
    ]  # fmt: skip

    tracker.calls.clear()  # killed after step 2, with a checkpoint at step 1
    resumed = open_log()
    resumed.rewind(offset)
    resumed.log("train", {"step": 2, "loss": 0.3})
    resumed.close()
    assert tracker.calls == [("start", [1]), ("log", 2), ("finish", (["summary.json"], False))]


def test_run_keeps_its_id_and_start_time(open_log, tracker, tmp_path):
    def start():
        log = open_log()
        log.rewind(0)
        log.close()
        return tracker.infos[-1].id, tracker.infos[-1].started

    kept = tmp_path / "run" / "trackers.json"
    first = start()
    assert start() == first == tuple(json.loads(kept.read_text()).values())
    kept.write_text("{")
    assert start()[0] != first[0]


@pytest.mark.parametrize("where", ["import", "start", "log", "show", "finish"])
def test_failure_is_one_warning_and_the_log_continues(tmp_path, open_log, tracker, monkeypatch, warnings, where):
    tracker.fail_in = where
    if where == "import":
        monkeypatch.setitem(sys.modules, "harness.trackers.tensorboard", None)
    log = open_log()
    log.rewind(0)
    for step in range(1, 6):
        log.log("train", {"step": step})
    log.show(Sample(["id"], [[1]], None))
    log.close(done=True)
    (warning,) = warnings()
    assert "tracker tensorboard is off until the next start" in warning
    assert where == "import" or f"RuntimeError: broke in {where} (metrics.jsonl is complete)" in warning
    assert "second line" not in warning
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3, 4, 5]
    calls = [call for call, _ in tracker.calls]
    expected = ["start", *["log"] * 5, "show", "finish"]
    assert calls == ([] if where == "import" else expected[: expected.index(where)])


def test_slow_tracker_does_not_delay_training(open_log, tracker, monkeypatch, warnings):
    monkeypatch.setattr(metrics_log, "STOP_S", 0.2)
    tracker.gate.clear()
    log = open_log()
    before = time.monotonic()
    log.rewind(0)
    for step in range(1000):
        log.log("train", {"step": step})
    log.close()
    assert time.monotonic() - before < 20  # as long as a single call would wait
    (warning,) = warnings()
    assert "did not process everything within 0 s" in warning
    tracker.gate.set()


def test_tracker_that_falls_behind_is_turned_off(open_log, tracker, monkeypatch, warnings):
    monkeypatch.setattr(forwarder, "MAX_QUEUED", 10)
    tracker.gate.clear()
    log = open_log()
    log.rewind(0)
    for step in range(100):
        log.log("train", {"step": step})
    (warning,) = warnings()
    assert "it fell 10 entries behind" in warning
    tracker.gate.set()
    log.close()
    assert len(tracker.calls) <= 1
