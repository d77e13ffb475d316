"""Markdown and CSV reports."""

from __future__ import annotations

import csv
import io
import re

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import run_set, scaling, tables


def forms(*paths, target=None):
    found = run_set.build(reader.find(paths))
    wanted = scaling.choose_target(found, target)
    series = scaling.series(found, wanted.value if wanted else None)
    return tables.markdown(found, wanted, series), list(csv.DictReader(io.StringIO(tables.csv_text(found, wanted))))


def test_csv_has_one_row_per_run_with_unrounded_numbers(tmp_path):
    fakes = [Fake(), Fake(world=2, lr=0.2), Fake(lr=0.3, state="failed")]
    _, rows = forms(write_sweep(tmp_path / "sweep", fakes), target=0.85)
    assert [row["state"] for row in rows] == ["finished", "finished", "failed"]
    assert [row["world_size"] for row in rows] == ["1", "2", "1"]
    assert [row["optimizer.lr"] for row in rows] == ["0.1", "0.2", "0.3"]
    assert float(rows[0]["seconds_to_target"]) == pytest.approx(5 * 7.4)
    assert float(rows[0]["last_top1"]) == float(rows[0]["best"]) > 0.94
    assert float(rows[0]["time_forward"]) > 0.29
    assert "the loss became nan" in rows[2]["problems"]
    assert rows[0]["trial"] == "0"
    assert rows[0]["sweep"] == "sweep"


def test_markdown_has_the_best_run_tables_and_problems(tmp_path):
    fakes = [Fake(world=1), Fake(world=2, efficiency=0.8), Fake(lr=0.3, state="failed"), Fake(seed=1)]
    text, _ = forms(write_sweep(tmp_path / "sweep", fakes))
    assert text.startswith("## sweep\n\n4 runs: 3 finished, 1 failed. Best accuracy (top-1): **0.94")
    assert re.search(r"\nmodel \S+, batch \d+, optimizer sgd, lr 0.1, level O1, \d ranks?\.\n", text), text
    assert "| lr 0.1 | 2 | 1,600 | 1.60× | 80.0 % |" in text
    assert "### Seeds" in text
    assert "(failed): TrainingError (rank 0 at step 7): the loss became nan" in text
    widths = {line.count("|") for line in text.split("\n\n")[3].splitlines()}
    assert len(widths) == 1, "every row has as many cells"


def test_markdown_cells_are_escaped(tmp_path):
    run = write_run(tmp_path / "run", Fake(name="a|b`<img>\n*c*"))
    text, rows = forms(run)
    (row,) = [line for line in text.splitlines() if "✓" in line]
    assert "a\\|b\\`\\<img> \\*c\\*" in row
    assert rows[0]["name"] == "a|b`<img>\n*c*"


def test_markdown_table_is_limited_but_csv_is_not(tmp_path):
    fakes = [Fake(lr=0.001 * (1 + n), epochs=1) for n in range(tables.MAX_ROWS + 3)]
    text, rows = forms(write_sweep(tmp_path / "sweep", fakes))
    assert "and 3 more runs." in text
    assert len(rows) == tables.MAX_ROWS + 3
