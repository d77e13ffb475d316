"""The page that make compatibility writes from the record of what was run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import compatibility


def test_compatibility_counts_what_was_run():
    run = compatibility.Run("a/b", "0" * 40, "trains", "train.py", "2026-11-22", steps=2, first_loss=2.0, last_loss=1.0)
    projects = [
        run,
        replace(run, last_loss=3.0, resumed="yes"),
        replace(run, resumed="cannot"),
        replace(run, resumed="yes"),
        replace(run, last_loss=1.99, resumed="yes"),
        replace(run, outcome="starts", note="stops"),
        replace(run, outcome="other", note="stops"),
    ]
    page = compatibility.page({**compatibility.read(), "projects": projects, "libraries": []})
    for line in (
        "chosen | 7",
        "nothing to do with Apex | 1",
        "the rest | 6",
        "is finite | 5",
        "the time limit | 1",
        "falls by more than 1 % | 3",
        "the script supports resuming | 4",
        "own checkpoints | 3",
        "resume if the script can** | **2 of 6 (33 %)**",
    ):
        assert f"{line} |" in page
    with pytest.raises(ValueError, match=r"compatibility.json: record of a/b: no command, date, steps"):
        replace(run, steps=0)
    with pytest.raises(ValueError, match="outcome 'works'"):
        replace(run, outcome="works")
    with pytest.raises(ValueError, match="no reason in note"):
        replace(run, outcome="other")
