"""Comparable runs: the same recipe gives the same curve on one process or several."""

from __future__ import annotations

import pytest

from tests.end_to_end.experiment import (
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
    "settings",
    [
        pytest.param(
            {"parallel": {"delay_allreduce": False}, "batch": {"global": 8, "accumulate": 2}}, marks=pytest.mark.slow
        ),
        # One row is left for the last step, where batch norm gets it twice. Three of four ranks have none.
        {
            "parallel": {"sync_batchnorm": True},
            "model": {"name": "tests.end_to_end.models.BatchNormed", "args": {}},
            "batch": {"global": 12},
        },
    ],
    ids=["overlapped, accumulating", "batch norm, single last row"],
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
    """One checkpoint evaluated by 1 and by 5 ranks: each row once, equal counts, the loss equal to rounding."""
    folder = train(tmp_path / "run", data, train={"epochs": 1})
    (expected,) = of_split(folder, "eval")
    # A batch per rank, so that any world size can restore the checkpoint. It then still has to be evaluated.
    settings = {"train": {"epochs": 1}, "batch": {"global": None, "per_rank": 8}}
    resume = f"checkpoint.resume={newest_checkpoint(folder)}"
    (found,) = of_split(train(tmp_path / "on5", data, 5, resume, **settings), "eval")
    assert found["rows_used"] == found["rows"] == 23
    assert found["top1"] == expected["top1"]
    assert found["mean_class_accuracy"] == expected["mean_class_accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
