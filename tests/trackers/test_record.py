"""The record: whole lines at full precision, cut where a checkpoint ends, no excuse for a full disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from harness.errors import CheckpointError
from harness.trackers.record import JsonLines, Nothing


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in path.open()]


def test_lines_are_whole_at_once_and_exact(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log("train", {"step": 1, "loss": 0.1 + 0.2, "name": "ü"})
    assert lines(tmp_path / "metrics.jsonl") == [{"split": "train", "step": 1, "loss": 0.1 + 0.2, "name": "ü"}]
    tracker.log("eval", {"a": math.nan, "b": math.inf, "c": np.float64("nan"), "d": None, "e": 2})
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl")[1] == {"split": "eval", "a": None, "b": None, "c": None, "d": None, "e": 2}


def test_rewinding_forgets_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.log("train", {"step": 1, "word": "ü"})
    offset = tracker.offset()
    assert offset == path.stat().st_size
    tracker.log("train", {"step": 2})
    tracker.close()
    resumed = JsonLines(path)
    assert resumed.offset() == path.stat().st_size
    resumed.rewind(offset)
    resumed.log("train", {"step": 2, "again": True})
    assert resumed.offset() == path.stat().st_size
    resumed.close()
    assert [line.get("again") for line in lines(path)] == [None, True]


def test_rewinding_to_nothing(tmp_path):
    tracker = JsonLines(tmp_path / "m")
    tracker.log("train", {"step": 1})
    tracker.rewind(0)
    assert tracker.offset() == 0
    tracker.log("train", {"step": 9})
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "m")] == [9]


def test_a_record_that_was_deleted_is_not_filled_with_zeros(tmp_path):
    tracker = JsonLines(tmp_path / "m")
    tracker.rewind(500)
    tracker.log("train", {"step": 1})
    tracker.close()
    assert lines(tmp_path / "m") == [{"split": "train", "step": 1}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_once(tmp_path):
    (tmp_path / "m").symlink_to("/dev/full")
    tracker = JsonLines(tmp_path / "m")
    with pytest.raises(CheckpointError, match="No space left"):
        tracker.log("train", {"step": 1})
    with pytest.raises(CheckpointError, match="No space left"):
        tracker.offset()
    tracker.close()  # which would write the line again


def test_other_ranks_write_nothing(tmp_path):
    tracker = Nothing()
    tracker.log("train", {"step": 1})
    tracker.rewind(7)
    assert tracker.offset() == 0
    tracker.close()
    assert not list(tmp_path.iterdir())
