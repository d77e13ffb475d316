"""The history of a run: positions of its points, best evaluations, shares of time, thinning."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_runs import PHASES, Fake, write_run
from harness.runs import reader
from harness.runs.files import read_sealed, write_sealed
from harness.tools.report import history


def read(folder, metric="top1", direction="max"):
    return history.read(reader.read(folder), metric, direction)


def write(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_points_along_all_axes(tmp_path):
    # 6400 rows in steps of 64: 100 steps and 6.4 s an epoch, then an evaluation of 1 s.
    past = read(write_run(tmp_path / "run", Fake(epochs=2, log_every=50)))
    assert past.train.steps.tolist() == [50, 100, 150, 200]
    assert past.train.at["epoch"].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert past.train.at["samples"].tolist() == [3200, 6400, 9600, 12800]
    assert past.train.at["seconds"].tolist() == pytest.approx([3.2, 6.4, 10.6, 13.8])
    assert past.validation.at["epoch"].tolist() == [1.0, 2.0]
    assert past.validation.at["samples"].tolist() == [6400, 12800]
    assert past.validation.at["seconds"].tolist() == pytest.approx([7.4, 14.8])
    assert list(past.validation.values) == ["loss", "top1"], "only metrics, and only numbers"
    assert past.wall_s == pytest.approx(14.8)
    summary = tmp_path / "run" / "summary.json"
    write_sealed(summary, {**read_sealed(summary), "wall_s": 15.0})
    assert read(tmp_path / "run").wall_s == 15.0, "the number that training says"


def test_unfinished_epoch_is_extrapolated(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=3, log_every=50, state="stopped")))
    assert past.train.at["epoch"].tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("resumed_to", [150, 200])
def test_run_that_ends_within_an_epoch(tmp_path, resumed_to):
    """It is evaluated at its last step, which is not the end of an epoch."""
    lines = [{"split": "train", "step": step, "epoch": (step + 99) // 100} for step in range(10, resumed_to + 1, 10)]
    for end in (100, 150, resumed_to):
        lines.append({"split": "eval", "step": end, "epoch": end // 100, "top1": 0.5, "wall_s": 1.0})
    lines += [{"split": "epoch", "step": end, "epoch": end // 100} for end in (100, resumed_to) if end % 100 == 0]
    past = read(write(tmp_path / "run", sorted(lines, key=lambda line: line["step"])))
    assert past.train.at["epoch"].tolist() == pytest.approx([step / 100 for step in range(10, resumed_to + 1, 10)])
    assert past.validation.at["epoch"].tolist() == pytest.approx([1.0, 1.5, resumed_to / 100])


def test_speed_excludes_evaluations(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=2, world=2, efficiency=0.75, speed=1000.0)))
    assert past.rows_per_s == pytest.approx(1500.0)


def test_speed_is_total_rows_by_total_time(tmp_path):
    lines = [
        {"split": "train", "step": 1, "epoch": 1, "samples": 100, "samples_per_s": 100.0, "wall_s": 1.0},
        {"split": "train", "step": 2, "epoch": 1, "samples": 1000, "samples_per_s": 300.0, "wall_s": 4.0},
    ]
    assert read(write(tmp_path / "run", lines)).rows_per_s == pytest.approx(250.0)  # 1000 rows in 1 s + 3 s


@pytest.mark.parametrize(("direction", "values"), [("max", [0.5, 0.6, 0.9]), ("min", [0.5, 0.4])])
def test_improvements_are_evaluations_better_than_all_before(tmp_path, direction, values):
    scores = [None, 0.5, 0.6, 0.55, 0.9, 0.9, 0.4]
    lines = [
        {"split": "eval", "step": place, "epoch": place, "score": value, "wall_s": float(place)}
        for place, value in enumerate(scores)
    ]
    past = read(write(tmp_path / "run", lines), "score", direction)
    assert past.improvements.values["value"].tolist() == values
    assert past.improvements.at["seconds"][-1] == {"max": 4.0, "min": 6.0}[direction], (
        "the first evaluation with the best value"
    )


def test_shares_of_time(tmp_path):
    assert read(write_run(tmp_path / "run", Fake())).shares == pytest.approx(PHASES)


def test_evaluations_without_a_finite_metric_have_their_place(tmp_path):
    lines = [
        {"split": "eval", "step": step, "epoch": step, "top1": float("nan"), "wall_s": 1.0 * step}
        for step in range(1, history.EVAL_POINTS + 2)
    ]
    past = read(write(tmp_path / "run", lines))
    assert past.validation.values == {}
    assert past.validation.at["epoch"][[0, -1]].tolist() == [1.0, history.EVAL_POINTS + 1.0]


def test_loss_scales_and_skipped_steps(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(skips=(30, 120))))
    assert set(past.train.values["loss_scale"]) == {16384.0, 32768.0, 65536.0}
    assert past.skipped == 2


def test_long_run_is_thinned_but_keeps_its_spike(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=40, log_every=1, spike_at=1234)))
    assert len(past.train) <= history.TRAIN_POINTS
    assert past.train.values["loss"].max() == 50.0
    assert past.train.steps[past.train.values["loss"].argmax()] == 1234
    assert past.train.at["samples"][-1] == 40 * 6400


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"split": "train"},
        {"split": "eval", "top1": 0.5},
        {"split": "train", "step": 1, "samples_per_s": 0.0, "samples": 5},
        {"split": "train", "step": 1, "time_data": "much", "lr": None},
        {"split": "eval", "step": 0, "epoch": 0, "top1": {"a": 1}},
        {"split": "other", "step": 3},
        {"split": "eval", "step": 1, "epoch": 1, "top1": float("inf"), "wall_s": float("-inf")},
        {"split": "train", "step": 1, "samples": 5, "loss_scale": float("inf"), "samples_per_s": float("inf")},
    ],
)
def test_odd_entries_are_no_error(tmp_path, line):
    past = read(write(tmp_path / "run", [line, line]))
    assert len(past.train) == (2 if line.get("split") == "train" else 0)


def test_empty_folder(tmp_path):
    assert len(read(tmp_path).train) == 0


VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=False, width=32), min_size=1, max_size=300)


@given(st.lists(VALUES, min_size=1, max_size=3), st.integers(min_value=4, max_value=60))
def test_thinning_keeps_ends_and_the_extremes_of_every_bucket(columns, limit):
    num_points = min(map(len, columns))
    series = [np.array(column[:num_points]) for column in columns]
    kept = history.downsample(series, limit)
    assert (np.diff(kept) > 0).all()
    assert {0, num_points - 1} <= set(kept.tolist())
    if num_points <= limit:
        assert kept.tolist() == list(range(num_points))
        return
    assert len(kept) <= max(limit, 2 + 2 * len(series))
    width = -(-num_points // max(1, (limit - 2) // (2 * len(series))))
    for start, values in itertools.product(range(0, num_points, width), series):
        bucket = values[start : start + width]
        mine = values[kept[(kept >= start) & (kept < start + width)]]
        if not np.isnan(bucket).all():
            assert np.nanmin(mine) == np.nanmin(bucket)
            assert np.nanmax(mine) == np.nanmax(bucket)


def test_thinning_of_nothing():
    assert history.downsample([], 10).tolist() == []
    assert history.downsample([np.array([])], 10).tolist() == []
