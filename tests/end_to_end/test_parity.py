"""Comparable runs: the same recipe gives the same curve on one process or several, and the same weights twice."""

from __future__ import annotations

import math

import pytest

from tests.end_to_end.experiment import assert_same_run, losses, record, run, write_config, write_images

EVERY_STEP = {"epochs": 2, "log_every": 1}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_same_run_twice_is_bitwise_equal(tmp_path, level):
    data = write_images(tmp_path / "data")
    model = {"name": "small_cnn", "args": {"width": 4, "dropout": 0.3, "batch_norm": True}}
    folders = []
    for name in ("one", "two"):
        config = write_config(tmp_path / name, data, precision={"opt_level": level}, model=model)
        assert run(config) == [0]
        folders.append(config.parent / "runs" / "run")
    assert_same_run(*folders)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("delay", [True, False])
def test_one_two_and_four_ranks_agree(tmp_path, delay, accumulate):
    """`shard: global` at one global batch: every logged loss within 1e-5, every row used, the same metrics."""
    data = write_images(tmp_path / "data")
    records = {}
    for world_size in (1, 2, 4):
        config = write_config(
            tmp_path / str(world_size),
            data,
            data={"shard": "global"},
            batch={"global": 8, "accumulate": accumulate},
            train=EVERY_STEP,
            parallel={"delay_allreduce": delay},
        )
        assert run(config, world_size) == [0] * world_size
        records[world_size] = record(config.parent / "runs" / "run")
    for world_size in (2, 4):
        for one, other in zip(records[1], records[world_size], strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert other[key] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ({"name": "small_cnn", "args": {"width": 4, "batch_norm": True}}, 8),
        # One row is left for the last step, where batch norm sees it twice, and of four ranks three have none.
        ({"name": "tests.end_to_end.models.BatchNormed", "args": {}}, 12),
    ],
    ids=["images", "a last row alone"],
)
def test_batch_norm_over_all_ranks_does_not_depend_on_world_size(tmp_path, model, batch):
    """`parallel.sync_batchnorm`: every logged loss of 1, 2 and 4 ranks within 1e-5, evaluation included."""
    data = write_images(tmp_path / "data")
    records = {}
    for world_size in (1, 2, 4):
        config = write_config(
            tmp_path / str(world_size), data, data={"shard": "global"}, batch={"global": batch}, model=model,
            train=EVERY_STEP, parallel={"sync_batchnorm": True},
        )  # fmt: skip
        assert run(config, world_size) == [0] * world_size
        records[world_size] = record(config.parent / "runs" / "run")
    for world_size in (2, 4):
        for one, other in zip(records[1], records[world_size], strict=True):
            for key, value in one.items():
                assert other[key] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), key


def test_evaluation_does_not_depend_on_world_size(tmp_path):
    """One checkpoint evaluated by 1, 2, 3 and 5 ranks: each row once, counts equal, the loss to rounding."""
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path / "run", data, train={"epochs": 1})
    assert run(config) == [0]
    folder = config.parent / "runs" / "run"
    (expected,) = [line for line in record(folder) if line["split"] == "eval"]
    for world_size in (2, 3, 5):
        # The batch is said a rank here, so that any world size can restore the checkpoint and owes its evaluation.
        other = write_config(
            tmp_path / f"on{world_size}", data, train={"epochs": 1}, batch={"global": None, "per_rank": 8}
        )
        newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
        assert run(other, world_size, f"checkpoint.resume={newest}") == [0] * world_size
        (found,) = [line for line in record(other.parent / "runs" / "run") if line["split"] == "eval"]
        assert found["rows_used"] == found["rows"] == 23
        assert found["top1"] == expected["top1"]
        assert found["mean_class_accuracy"] == expected["mean_class_accuracy"]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_delayed_and_overlapped_reduction_agree(tmp_path, level):
    data = write_images(tmp_path / "data")
    curves = []
    for delay in (True, False):
        config = write_config(
            tmp_path / str(delay),
            data,
            precision={"opt_level": level},
            train=EVERY_STEP,
            parallel={"delay_allreduce": delay},
        )
        assert run(config, 2) == [0, 0]
        curves.append(losses(config.parent / "runs" / "run"))
    assert all(map(math.isfinite, curves[0]))
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
