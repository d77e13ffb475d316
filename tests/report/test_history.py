"""A run's history: where things were, what the best was, where the time went."""

from __future__ import annotations

import json

import pytest

from benchmarks.synthetic_runs import PHASES, Fake, write_run
from harness.report import history
from harness.runs import reader


def read(folder, metric="top1", direction="max"):
    return history.read(reader.read(folder), metric, direction)


def write(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_points_along_epochs_samples_and_seconds(tmp_path):
    # 6400 rows in steps of 64: 100 steps and 6.4 s an epoch, then an evaluation of 1 s.
    past = read(write_run(tmp_path / "run", Fake(epochs=2, log_every=50)))
    assert past.train.steps.tolist() == [50, 100, 150, 200]
    assert past.train.at["epoch"].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert past.train.at["samples"].tolist() == [3200, 6400, 9600, 12800]
    assert past.train.at["seconds"].tolist() == pytest.approx([3.2, 6.4, 10.6, 13.8])
    assert past.held_out.at["epoch"].tolist() == [1.0, 2.0]
    assert past.held_out.at["samples"].tolist() == [6400, 12800]
    assert past.held_out.at["seconds"].tolist() == pytest.approx([7.4, 14.8])
    assert list(past.held_out.values) == ["loss", "top1"], "no bookkeeping, and nothing that is not a number"
    assert (past.steps, past.samples, past.wall_s) == (200, 12800, pytest.approx(14.8))


def test_an_epoch_that_is_under_way_goes_on_at_its_pace(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=3, log_every=50, state="stopped")))
    assert past.train.at["epoch"].tolist() == [0.5, 1.0, 1.5, 2.0]


def test_speed_leaves_evaluations_out(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=2, world=2, efficiency=0.75, speed=1000.0)))
    assert past.rows_per_s == pytest.approx(1500.0)
    assert past.train_s == pytest.approx(12800 / 1500)


def test_the_speed_is_of_all_the_time_not_the_mean_of_speeds(tmp_path):
    lines = [
        {"split": "train", "step": 1, "epoch": 0, "samples": 100, "samples_per_s": 100.0, "wall_s": 1.0},
        {"split": "train", "step": 2, "epoch": 0, "samples": 1000, "samples_per_s": 300.0, "wall_s": 4.0},
    ]
    assert read(write(tmp_path / "run", lines)).rows_per_s == pytest.approx(250.0)  # 1000 rows in 1 s + 3 s


@pytest.mark.parametrize(("direction", "gains"), [("max", [0.5, 0.6, 0.9]), ("min", [0.5, 0.4])])
def test_gains_are_the_evaluations_better_than_all_before(tmp_path, direction, gains):
    values = [None, 0.5, 0.6, 0.55, 0.9, 0.9, 0.4]
    lines = [
        {"split": "eval", "step": place, "epoch": place, "score": value, "wall_s": float(place)}
        for place, value in enumerate(values)
    ]
    past = read(write(tmp_path / "run", lines), "score", direction)
    assert past.gains.values["value"].tolist() == gains
    assert past.gains.at["seconds"][-1] == {"max": 4.0, "min": 6.0}[direction], "the first to have the best"


def test_shares_of_time_add_up_and_count_as_long_as_they_lasted(tmp_path):
    past = read(write_run(tmp_path / "run", Fake()))
    assert past.shares == pytest.approx(PHASES)
    lines = [
        {"split": "train", "step": 1, "samples": 100, "samples_per_s": 100.0, "data_wait": 0.9},
        {"split": "train", "step": 2, "samples": 400, "samples_per_s": 100.0, "data_wait": 0.1},
    ]
    old = read(write(tmp_path / "old", lines))
    assert old.shares == pytest.approx({"data": 0.3, "rest": 0.7})


def test_loss_scale_and_skipped_steps(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(skips=(30, 120))))
    assert past.loss_scales == (16384.0, 65536.0)
    assert past.skipped == 2


def test_a_long_run_is_thinned_but_keeps_its_spike(tmp_path):
    past = read(write_run(tmp_path / "run", Fake(epochs=40, log_every=1, spike_at=1234)))
    assert len(past.train) <= history.TRAIN_POINTS
    assert past.train.values["loss"].max() == 50.0
    assert past.train.steps[past.train.values["loss"].argmax()] == 1234
    assert past.samples == 40 * 6400


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
def test_odd_lines_are_no_error(tmp_path, line):
    known = line.get("split") in ("train", "eval")
    assert read(write(tmp_path / "run", [line, line])).steps == (line.get("step", 0) if known else 0)


def test_nothing_of_an_empty_folder(tmp_path):
    assert read(tmp_path).steps == 0


def test_an_uneven_pace_is_told(tmp_path):
    def lines(speeds):
        return [
            {"split": "train", "step": place, "samples": 100 * (place + 1), "samples_per_s": speed}
            for place, speed in enumerate(speeds)
        ]

    assert read(write(tmp_path / "even", lines([100.0] * 20))).swing == pytest.approx(1.0)
    # Windows of 100 rows, 16 of 1 s and 40 of 2 s: 5600 rows in 96 s, the fastest tenth at 100 rows/s.
    assert read(write(tmp_path / "odd", lines([100.0] * 16 + [50.0] * 40))).swing == pytest.approx(100 / (5600 / 96))
    assert read(write(tmp_path / "short", lines([100.0, 50.0]))).swing is None
