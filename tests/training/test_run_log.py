"""Lines of the log of a run."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest

from harness.training import run_log
from harness.training.rows.coverage import Covered
from harness.training.state import State


@pytest.mark.parametrize(
    ("tail", "missing", "told"),
    [
        ("use", ["3", "5"], "8 of 10 rows used; rows not used, counted from 0: 3, 5"),
        ("use", ["3"], "8 of 10 rows used; rows not used, counted from 0: 3, ..."),
        ("use", [], "8 of 10 rows used"),
        ("drop", ["3", "5"], "8 of 10 rows used"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_rows_that_an_epoch_did_not_use_are_named(caplog, tail, missing, told, named):
    """With their places if the dataset knows them; unless the rest of an epoch is dropped on purpose."""
    caplog.set_level(logging.INFO)
    run = SimpleNamespace(
        state=SimpleNamespace(step=3, epoch=0, epoch_skipped=0, bad_rows=0, epoch_rows=0),
        coverage=SimpleNamespace(num_rows=10, covered=lambda *_: Covered(8, 0, 0, missing)),
        tracker=SimpleNamespace(log=lambda *_: None),
        config=SimpleNamespace(data=SimpleNamespace(tail=tail), train=SimpleNamespace(epochs=1, on_nan="stop")),
        task=SimpleNamespace(train=SimpleNamespace(row_name=lambda row: str(row)) if named else ()), runtime=None,
        sizes=SimpleNamespace(total_steps=3), this_start=SimpleNamespace(unused_told=None),
    )  # fmt: skip
    run_log.log_coverage(run)
    assert caplog.messages == [f"epoch 1/1  step 3/3  end of the epoch: {told.replace(', counted from 0' * named, '')}"]
    run_log.log_coverage(run)
    assert caplog.messages[1].endswith("8 of 10 rows used"), "the same rows are named once"


@pytest.mark.parametrize(
    ("value", "before", "told"),
    [(0.5, None, "f1 0.5000 (best so far)"), (math.nan, None, "f1 nan (not finite)"),
     (math.nan, 0.25, "f1 nan (best: 0.2500 at step 2)"), (0.125, 0.25, "f1 0.1250 (best: 0.2500 at step 2)")],
)  # fmt: skip
def test_what_is_not_a_number_is_never_the_best(caplog, value, before, told):
    caplog.set_level(logging.INFO)
    state = State(step=3, best=before, best_step=2)
    better = state.add_evaluation({"f1": value}, "f1", increases=True)
    run = SimpleNamespace(
        state=state, sizes=SimpleNamespace(total_steps=3),
        config=SimpleNamespace(best_metric="f1", train=SimpleNamespace(epochs=1)),
    )  # fmt: skip
    run_log.show_evaluation(run, {"rows_used": 4, "rows": 4}, {"f1": value}, better)
    assert caplog.messages[0].endswith(told)
