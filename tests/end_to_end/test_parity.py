"""Comparable runs: the same recipe gives the same curve on one process or several, and the same weights twice."""

from __future__ import annotations

import math

import pytest

from tests.end_to_end.experiment import (
    assert_same_run,
    losses,
    newest_checkpoint,
    of_split,
    record,
    train,
)

EVERY_STEP = {"epochs": 2, "log_every": 1}


def assert_close(expected: list[dict], found: list[dict], tolerance: float = 1e-5) -> None:
    """Assert that two logs have the same keys and counts, and numbers within ``tolerance``."""
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == (pytest.approx(value, abs=tolerance) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    "level", ["O1", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O2", "O4"))]
)
def test_same_run_twice_is_bitwise_equal(tmp_path, data, level):
    model = {"name": "small_cnn", "args": {"width": 4, "dropout": 0.3, "batch_norm": True}}
    assert_same_run(
        *(train(tmp_path / name, data, precision={"opt_level": level}, model=model) for name in ("one", "two"))
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"parallel": {"delay_allreduce": True}}, marks=pytest.mark.slow),
        pytest.param(
            {"parallel": {"delay_allreduce": False}, "batch": {"global": 8, "accumulate": 2}}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "parallel": {"sync_batchnorm": True},
                "model": {"name": "small_cnn", "args": {"width": 4, "batch_norm": True}},
            },
            marks=pytest.mark.slow,
        ),
        # One row is left for the last step, where batch norm gets it twice. Three of four ranks have none.
        {
            "parallel": {"sync_batchnorm": True},
            "model": {"name": "tests.end_to_end.models.BatchNormed", "args": {}},
            "batch": {"global": 12},
        },
    ],
    ids=["delayed", "overlapped, accumulating", "batch norm", "batch norm, single last row"],
)
def test_one_two_and_four_ranks_agree(tmp_path, data, settings):
    """With ``shard: global`` and one global batch, every logged loss agrees to 1e-5 and all counts agree exactly."""
    records = [
        record(train(tmp_path / str(ranks), data, ranks, **settings, data={"shard": "global"}, train=EVERY_STEP))
        for ranks in (1, 2, 4)
    ]
    assert_close(records[0], records[1])
    assert_close(records[0], records[2])


def test_evaluation_does_not_depend_on_world_size(tmp_path, data):
    """One checkpoint evaluated by 1, 2, 3 and 5 ranks: each row once, equal counts, the loss equal to rounding."""
    folder = train(tmp_path / "run", data, train={"epochs": 1})
    (expected,) = of_split(folder, "eval")
    for ranks in (2, 3, 5):
        # A batch per rank, so that any world size can restore the checkpoint. It then still has to be evaluated.
        settings = {"train": {"epochs": 1}, "batch": {"global": None, "per_rank": 8}}
        resume = f"checkpoint.resume={newest_checkpoint(folder)}"
        (found,) = of_split(train(tmp_path / f"on{ranks}", data, ranks, resume, **settings), "eval")
        assert found["rows_used"] == found["rows"] == 23
        assert found["top1"] == expected["top1"]
        assert found["mean_class_accuracy"] == expected["mean_class_accuracy"]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.slow
def test_delayed_and_overlapped_reduction_agree(tmp_path, data):
    """At O2; ``test_strategies.py`` compares them at O0 and O1."""
    settings = {"precision": {"opt_level": "O2"}, "train": EVERY_STEP}
    delayed, overlapped = (
        losses(train(tmp_path / str(delay), data, 2, **settings, parallel={"delay_allreduce": delay}))
        for delay in (True, False)
    )
    assert all(map(math.isfinite, delayed))
    assert delayed == pytest.approx(overlapped, abs=1e-6)
