"""The rows of the tables, against numbers worked out by hand, and the problems of runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.runs.locks import locked
from harness.tools.report import run_set, tables


def of(folder, fakes):
    return run_set.build(reader.find([write_sweep(folder / "sweep", fakes)]))


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_runs_speed_up_seeds_and_problems(tmp_path):
    found = of(tmp_path, [Fake(), Fake(world=2, efficiency=0.8), Fake(lr=0.3, state="failed"), Fake(seed=1)])
    table = tables.all_runs(found)
    assert {len(row) for row in table.rows} == {len(table.header)}
    rows = texts(tables.speed_up(found))
    assert [row[1:5] for row in rows] == [["1", "1,000", "1.00×", "100.0 %"], ["2", "1,600", "1.60×", "80.0 %"]]
    table = tables.seeds(found)
    assert dict(zip(table.header, texts(table)[0], strict=True))["seeds"] == "0, 1"
    failed = next(run for run in found.runs if run.record.state == "failed")
    assert tables.problems(failed)[0] == "TrainingError (rank 0 at step 7): the loss became nan"
    assert tables.states(found.runs) == "3 finished, 1 failed"


@pytest.mark.parametrize(("state", "line"), [("stopped", 0), ("unfinished", 1)])
def test_a_run_that_is_not_done_has_the_command_that_resumes_it(tmp_path, monkeypatch, state, line):
    monkeypatch.chdir(tmp_path)
    record = reader.read(write_run(tmp_path / "runs" / "a", Fake("a", world=2, state="unfinished")))
    (run,) = run_set.build([replace(record, state=state)]).runs
    assert tables.problems(run)[line] == "-> to resume it: harness launch -c runs/a/config.yaml --nproc 2"


def test_rows_that_could_not_be_read_are_a_problem(tmp_path):
    record = reader.read(write_run(tmp_path / "a", Fake("a")))
    for counts, told in (((0, 0), []), ((3, 0), ["3 times", "left out 0"]), ((0, 2), ["0 times", "left out 2"])):
        found = record.summary | {"bad_rows": counts[0], "evaluation": {"bad_rows": counts[1]}}
        (run,) = run_set.build([replace(record, summary=found)]).runs
        lines = tables.problems(run)
        assert bool(lines) == bool(told) == tables.has_problem(run)
        assert all(part in lines[0] for part in told)


def test_a_running_run_is_no_problem(tmp_path):
    run = write_run(tmp_path / "a", Fake(state="failed"))
    (run / "failure.json").unlink()
    with locked(run / ".lock", 10):
        found = run_set.build(reader.find([run])).runs
    assert [tables.has_problem(run) for run in found] == [False]
    assert tables.states(found) == "1 running"


def test_speed_is_the_mean_over_seeds(tmp_path):
    fakes = [Fake(seed=0), Fake(seed=1, speed=3000.0), Fake(seed=0, world=4, efficiency=0.5)]
    rows = texts(tables.speed_up(of(tmp_path, fakes)))
    assert [row[2:5] for row in rows] == [["2,000", "1.00×", "100.0 %"], ["2,000", "1.00×", "25.0 %"]]


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 0.2},
        {"epochs": 11},
        {"settings": {"batch.global": None, "batch.per_rank": 64}},  # 128 rows on two ranks
        {"state": "failed"},
    ],
)
def test_different_recipes_have_no_speed_up(tmp_path, other):
    assert tables.speed_up(of(tmp_path, [Fake(), Fake(world=2, **other)])).rows == []


def test_batches_are_compared_over_all_ranks(tmp_path):
    two = Fake(batch=128, world=2, settings={"batch.global": None, "batch.per_rank": 64})
    assert len(tables.speed_up(of(tmp_path, [Fake(batch=128), two])).rows) == 2


def test_different_devices_have_no_speed_up(tmp_path):
    runs = [write_run(tmp_path / str(world), Fake(world=world)) for world in (1, 2)]
    content = json.loads((runs[1] / "provenance.json").read_text())
    content[0]["ranks"] = [{"host": "there", "device": "cuda:0", "name": "NVIDIA H100"}] * 2
    (runs[1] / "provenance.json").write_text(json.dumps(content))
    assert tables.speed_up(run_set.build(reader.find(runs))).rows == []
