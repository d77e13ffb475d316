"""The counters of a run in a checkpoint, and the measurements since the last log line."""

from __future__ import annotations

import io
import math
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.data.shards import Segment
from harness.distributed.launch_env import detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.training.progress import Coverage, Meter, State
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_state_survives_a_file():
    state = State(epoch=3, segments=[Segment(2, 4, 7), Segment(1, 8, 1)], step=40, applied=38, skipped=2, best=0.5,
                  best_step=30, history=[{"step": 30, "top1": 0.5}], wall_s=1.5)  # fmt: skip
    file = io.BytesIO()
    torch.save(state.to_dict(), file)
    file.seek(0)
    again = State.from_dict(torch.load(file, weights_only=True))
    assert again == state
    assert isinstance(again.segments[0], Segment)


def test_saved_state_is_a_copy():
    state = State(segments=[Segment(1, 4, 1)])
    saved = state.to_dict()
    state.segments[0].steps += 1
    state.history.append({"step": 1})
    assert State.from_dict(saved) == State(segments=[Segment(1, 4, 1)])


def test_next_epoch():
    state = State(epoch=1, segments=[Segment(1, 4, 1)])
    assert state.in_epoch
    state.next_epoch()
    assert (state.epoch, state.segments, state.in_epoch) == (2, [], False)
    assert State().segments is not State().segments


def recorded(num_rows: int, rows: list[int]) -> tuple[int, list[str]]:
    coverage = Coverage(num_rows)
    for part in np.array_split(np.asarray(rows, np.int64), 3):
        coverage.add(part)
    with open_runtime(detect({}), "cpu") as runtime:
        again = Coverage(num_rows)
        again.load(coverage.sums(runtime))
        return coverage.found(again.sums(runtime), lambda row: f"{row} (row{row}.png)")


@pytest.mark.parametrize("num_rows", [1, 61, 4096, 4097, 100_003])
def test_each_missing_row_is_named(num_rows):
    rows = np.random.default_rng(num_rows).permutation(num_rows).tolist()
    assert recorded(num_rows, rows) == (num_rows, [])
    assert recorded(num_rows, rows[1:]) == (num_rows - 1, [f"{rows[0]} (row{rows[0]}.png)"])


def test_several_missing_rows_of_a_bucket_are_a_range():
    """Buckets of 25 rows."""
    rows = [row for row in range(100_003) if row not in (7, 8, 60, 99_990)]
    assert recorded(100_003, rows) == (99_999, ["some of 0 to 24", "60 (row60.png)", "99990 (row99990.png)"])


@given(st.integers(4097, 9000), st.data())
def test_rows_that_are_used_twice_are_not_counted_for_others(num_rows, data):
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, num_rows - 1)] * 2), min_size=1, max_size=4))
    lost, doubled = {lost for lost, _ in pairs}, [row for _, row in pairs]
    rows = [*(row for row in range(num_rows) if row not in lost), *(row for row in doubled if row not in lost)]
    used, missing = recorded(num_rows, rows)
    assert used < num_rows
    assert missing


def filled(losses: list[tuple[float, int]]) -> Meter:
    meter = Meter(CPU)
    for mean, rows in losses:
        meter.add_loss(torch.tensor(mean, requires_grad=True), rows)
        meter.steps += 1
    return meter


def test_loss_is_the_mean_over_rows():
    meter = filled([(1.0, 4), (3.0, 1)])
    meter.bad, meter.wait_s, meter.time_s = 2, 0.25, 1.0
    meter.add_skipped(torch.tensor(9.0), 3)
    seen = meter.reduce(Runtime())
    assert (seen.loss, seen.rows, seen.rows_skipped) == (pytest.approx(7 / 5), 8, 3)
    assert (seen.bad, seen.waited) == (2, 0.25)
    assert (meter.rows, meter.bad, meter.steps, meter.wait_s, meter.time_s, meter.loss.item()) == (0, 0, 0, 0, 0, 0)
    seen = meter.reduce(Runtime())
    assert math.isnan(seen.loss)
    assert seen.rows == 0
    for tolerated, total in ((None, 0.0), (torch.tensor(math.inf), math.nan)):
        meter.add_skipped(tolerated, 3)
        assert meter.reduce(Runtime()).total == pytest.approx(total, nan_ok=True)


def test_loss_resumes_exactly():
    whole, first = filled([(0.1, 3), (0.2, 3), (0.3, 2)]), filled([(0.1, 3)])
    first.add_skipped(None, 5)
    second = Meter(CPU)
    second.load_state_dict(first.state_dict())
    for mean, rows in [(0.2, 3), (0.3, 2)]:
        second.add_loss(torch.tensor(mean), rows)
    assert torch.equal(second.loss, whole.loss)
    assert (second.rows, second.rows_skipped, second.steps, second.bad) == (whole.rows, 5, 1, 0)


def test_time_outside_training_is_excluded(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    meter = Meter(CPU)
    now_s = 100.0
    meter.restart_clock()
    now_s = 107.0
    meter.tick()
    assert meter.time_s == 7.0


def _reduce():
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        meter = filled([(1.0, 4)] if runtime.rank == 0 else [])
        meter.bad = runtime.rank
        meter.add_skipped(None, 2)
        return meter.reduce(runtime)[1:5]


def test_loss_over_ranks():
    assert run_ranks(2, _reduce, group=False, timeout_s=30) == [(1.0, 8, 4, 1)] * 2
