"""What a run cost, by hand."""

from __future__ import annotations

import json

import pytest

from harness.compare.pace import pace
from harness.report.history import PHASES
from harness.runs.reader import read


def write(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(folder)


def test_windows_count_as_long_as_they_took(tmp_path):
    shares = {f"time_{phase}": 0.0 for phase in PHASES}
    rows = [
        {"split": "train", "step": 1, "samples": 100, "samples_per_s": 100.0, "wall_s": 1.0,
         **shares, "time_forward": 1.0},
        {"split": "train", "step": 2, "samples": 200, "samples_per_s": 100 / 3, "wall_s": 4.5,
         **shares, "time_forward": 0.2, "time_host": 0.8},
        {"split": "eval", "step": 2, "samples_per_s": 5.0, "wall_s": 9.0},
    ]  # fmt: skip
    found = pace(write(tmp_path / "run", rows))
    assert (found.wall_s, found.rows_per_s) == (9.0, pytest.approx(50.0))
    assert found.shares["time_forward"] == pytest.approx((1 + 0.2 * 3) / 4)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_run_of_before_has_no_shares(tmp_path):
    found = pace(write(tmp_path / "old", [{"split": "train", "step": 1, "samples": 4, "samples_per_s": 2.0}]))
    assert (found.wall_s, found.rows_per_s, found.shares) == (None, 2.0, {})
    none = pace(write(tmp_path / "none", []))
    assert (none.wall_s, none.rows_per_s, none.shares) == (None, None, {})
