"""The rows of the tables, and the problems of runs."""

from __future__ import annotations

import pytest

from benchmarks.synthetic_runs import Fake, write_sweep
from harness.runs import reader
from harness.tools.report import run_set, scaling, tables


def test_runs_scaling_seeds_and_problems(tmp_path):
    fakes = [Fake(world=1), Fake(world=2, efficiency=0.8), Fake(lr=0.3, state="failed"), Fake(seed=1)]
    found = run_set.build(reader.find([write_sweep(tmp_path / "sweep", fakes)]))
    target = scaling.choose_target(found, 0.85)
    table = tables.all_runs(found, target)
    assert {len(row) for row in table.rows} == {len(table.header)}
    column = table.header.index("to 0.85")
    (first,) = [row for row, run in zip(table.rows, found.ranked, strict=True) if run.record.trial.number == 0]
    assert first[column].order == pytest.approx(5 * 7.4)
    assert first[column].text == "37.0 s"
    _, rows = tables.scaling_rows(scaling.series(found, target.value))
    assert [row[1:5] for row in rows][1] == ["2", "1,600", "1.60×", "80.0 %"]
    header, rows = tables.seeds_rows(found)
    assert dict(zip(header, rows[0], strict=True))["seeds"] == "0, 1"
    failed = next(run for run in found.runs if run.record.state == "failed")
    assert tables.problems(failed)[0] == "TrainingError (rank 0 at step 7): the loss became nan"
    assert tables.states(found.runs) == "3 finished, 1 failed"
