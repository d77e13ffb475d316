"""Time to target, speed-up and efficiency, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import run_set, scaling


def of(folder, fakes):
    return run_set.build(reader.find([write_sweep(folder / "sweep", fakes)]))


def test_speed_up_and_time_to_target(tmp_path):
    """One rank: 1000 rows/s, so 6.4 s an epoch and 1 s of evaluation. Two at 80 %: 1600 rows/s, 4 s and 1 s."""
    found = of(tmp_path, [Fake(world=1), Fake(world=2, efficiency=0.8)])
    # top1 after epoch e is 0.95 - 0.85 exp(-e/2): 0.758 after 3, 0.835 after 4, 0.880 after 5.
    (series,) = scaling.series(found, 0.85)
    one, two = series.points
    assert (one.world, two.world) == (1, 2)
    assert (one.rows_per_s, two.rows_per_s) == (pytest.approx(1000), pytest.approx(1600))
    assert (one.speed_up, two.speed_up) == (pytest.approx(1.0), pytest.approx(1.6))
    assert (one.efficiency, two.efficiency) == (pytest.approx(1.0), pytest.approx(0.8))
    assert (one.seconds, two.seconds) == (pytest.approx(5 * 7.4), pytest.approx(5 * 5.0))
    assert two.times_sooner == pytest.approx(7.4 / 5.0)
    assert series.same_batches
    at = scaling.reached(found.runs[0], 0.85, "max")
    assert (at.epoch, at.samples) == (5.0, 5 * 6400)


def test_seeds_are_averaged_at_each_world_size(tmp_path):
    fakes = [Fake(seed=0), Fake(seed=1, speed=3000.0), Fake(seed=0, world=4, efficiency=0.5)]
    (series,) = scaling.series(of(tmp_path, fakes), None)
    assert [point.rows_per_s for point in series.points] == [pytest.approx(2000), pytest.approx(2000)]
    assert series.points[1].efficiency == pytest.approx(0.25)
    assert len(series.points[0].runs) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 0.2},
        {"batch": 128},
        {"epochs": 11},
        {"settings": {"model.name": "resnet18"}},
        {"settings": {"batch.global": None, "batch.per_rank": 64}},  # 128 rows on two ranks
        {"state": "failed"},
        {"state": "unfinished"},
        {"shard": "contiguous"},
    ],
)
def test_different_recipes_are_not_compared(tmp_path, other):
    assert scaling.series(of(tmp_path, [Fake(), Fake(world=2, **other)]), None) == []


def test_batches_are_compared_over_all_ranks(tmp_path):
    one = Fake(batch=128)
    two = Fake(batch=128, world=2, settings={"batch.global": None, "batch.per_rank": 64})
    (series,) = scaling.series(of(tmp_path, [one, two]), None)
    assert [point.world for point in series.points] == [1, 2]


def test_different_devices_are_not_compared(tmp_path):
    runs = [write_run(tmp_path / str(world), Fake(world=world)) for world in (1, 2)]
    content = json.loads((runs[1] / "provenance.json").read_text())
    content[0]["ranks"] = [{"host": "there", "device": "cuda:0", "name": "NVIDIA H100"}] * 2
    (runs[1] / "provenance.json").write_text(json.dumps(content))
    assert scaling.series(run_set.build(reader.find(runs)), None) == []


def test_series_with_different_batches_are_marked(tmp_path):
    (series,) = scaling.series(of(tmp_path, [Fake(shard="contiguous"), Fake(shard="contiguous", world=2)]), None)
    assert not series.same_batches


def test_missed_target_has_no_time(tmp_path):
    found = of(tmp_path, [Fake(), Fake(world=2, final=0.9)])
    one, two = scaling.series(found, 0.92)[0].points
    assert one.seconds is not None
    assert two.seconds is None
    assert two.times_sooner is None
    assert two.speed_up is not None


def test_requested_target_is_used(tmp_path):
    found = of(tmp_path, [Fake()])
    assert scaling.choose_target(found, 0.5).value == 0.5


def test_default_target_is_reached_by_half_of_the_recipes_at_each_world_size(tmp_path):
    levels = {0.1: (0.99, 0.9), 0.2: (0.8, 0.8), 0.3: (0.7, 0.75)}
    fakes = [
        Fake(lr=lr, world=world, final=final)
        for lr, pair in levels.items()
        for world, final in zip((1, 2), pair, strict=True)
    ]
    found = of(tmp_path, fakes)
    target = scaling.choose_target(found, None)
    # 0.8 - 0.7 exp(-5) = 0.79528: the middle one of the three recipes
    assert target.value == 0.795
    assert "half of the recipes" in target.why


@pytest.mark.parametrize(
    ("best", "direction", "rounded"),
    [(0.98765, "max", 0.987), (0.98765, "min", 0.988), (2.23501, "min", 2.24), (0.95, "max", 0.95),
     (0.95, "min", 0.95), (1234.5, "max", 1230.0), (-0.5555, "max", -0.556), (0.0, "max", 0.0)],
)  # fmt: skip
def test_default_target_is_rounded_to_the_easier_side(tmp_path, best, direction, rounded):
    runs = of(tmp_path, [Fake()])
    runs = replace(runs, runs=[replace(runs.runs[0], best=best)], direction=direction)
    assert scaling.choose_target(runs, None).value == rounded


def test_no_target_without_evaluations(tmp_path):
    found = of(tmp_path, [Fake(epochs=1, state="unfinished")])
    assert scaling.choose_target(found, None) is None
