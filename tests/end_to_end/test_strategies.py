"""Every strategy trains the same run: same losses, exact resume, evaluation of each row once, and switching over."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.experiment import (
    Kill,
    assert_same,
    assert_same_run,
    last_checkpoint,
    losses,
    record,
    run,
    write_config,
    write_images,
)

FSDP = {"strategy": "fsdp"}
IN_TWO_PARTS = {
    "name": "mlp",
    "args": {"hidden": 1100},
}  # its first layer is a block of its own, see harness.training.fsdp


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("strategies") / "data")


# The same sums in another order: to float32's rounding at O0, to that of activations in float16 (2^-11) at O1 and in
# bfloat16 (2^-8) at O4.
TOLERANCE = {"O0": 1e-5, "O1": 2e-3, "O4": 2e-2}


@pytest.mark.parametrize("level", TOLERANCE)
def test_all_strategies_give_the_same_losses(tmp_path, data, level):
    """Micro-batches, clipping, a moving average and a ragged tail, over one global batch a step."""
    cases = {
        "none": (1, {"strategy": "none"}),
        "dp": (1, {"strategy": "dp"}),
        "delayed": (2, {"strategy": "ddp", "delay_allreduce": True}),
        "overlapped": (2, {"strategy": "ddp", "delay_allreduce": False}),
        "fsdp": (2, FSDP),
    }
    cases = cases if level != "O4" else {name: cases[name] for name in ("none", "dp", "fsdp")}
    records = {}
    for name, (world_size, parallel) in cases.items():
        config = write_config(
            tmp_path / name, data, parallel=parallel, precision={"opt_level": level}, model=IN_TWO_PARTS,
            data={"shard": "global"}, batch={"global": 8, "accumulate": 2},
            train={"epochs": 2, "log_every": 1, "clip_norm": 1.0, "ema_decay": 0.9},
        )  # fmt: skip
        assert run(config, world_size) == [0] * world_size
        records[name] = record(config.parent / "runs" / "run")
    assert "dp found one device (cpu)" in (tmp_path / "dp" / "terminal-0.txt").read_text()
    assert "fsdp in 2 parts" in (tmp_path / "fsdp" / "terminal-0.txt").read_text()
    assert records["dp"] == records["none"]
    for name in cases:
        for one, other in zip(records["none"], records[name], strict=True):
            for key, value in one.items():
                near = pytest.approx(value, abs=TOLERANCE[level]) if isinstance(value, float) else value
                assert other[key] == near, (name, key)


# What a resume could get wrong, all at once; the second convolution is a block of its own.
EVERYTHING = {
    "model": {"name": "small_cnn", "args": {"width": 48, "dropout": 0.2, "batch_norm": True}},
    "batch": {"global": 8, "accumulate": 2},
    "train": {"epochs": 2, "log_every": 3, "clip_norm": 1.0, "ema_decay": 0.9},
    "checkpoint": {"every_steps": 2, "keep": 2},
}


ADAM = {"name": "adamw", "lr": 0.01, "momentum": None, "args": {"betas": [0.8, 0.9]}}


@pytest.mark.parametrize(
    ("settings", "kill"),
    [
        ({"parallel": FSDP, "precision": {"opt_level": "O1"}}, (1, 5, "step")),
        ({"parallel": {"delay_allreduce": False}, "precision": {"opt_level": "O1"}}, (1, 5, "step")),
        ({"parallel": {"strategy": "dp"}, "precision": {"opt_level": "O1"}}, (0, 7, "step")),
        ({"parallel": {**FSDP, "sync_batchnorm": True}, "optimizer": ADAM}, (0, 6, "save")),
        (
            {"parallel": {"sync_batchnorm": True}, "optimizer": {"larc": {}}, "precision": {"opt_level": "O1"}},
            (1, 9, "step"),
        ),
        ({"optimizer": {**ADAM, "name": "fused_lamb"}, "precision": {"opt_level": "O2"}}, (0, 9, "step")),
    ],
    ids=["fsdp O1", "overlapped O1", "dp O1", "fsdp syncbn adamw", "syncbn larc", "fused_lamb O2"],
)
def test_killed_and_resumed_is_the_same_run(tmp_path, data, settings, kill):
    unbroken = write_config(tmp_path / "unbroken", data, **EVERYTHING, **settings)
    world_size = 1 if settings.get("parallel", {}).get("strategy") == "dp" else 2
    assert run(unbroken, world_size) == [0] * world_size
    broken = write_config(tmp_path / "broken", data, **EVERYTHING, **settings)
    victim, step, where = kill
    assert run(broken, world_size, kill=Kill(victim, step, where))[victim] == -signal.SIGKILL
    assert run(broken, world_size) == [0] * world_size
    assert_same_run(unbroken.parent / "runs" / "run", broken.parent / "runs" / "run")


def test_shards_of_two_ranks_go_on_with_one_with_four_and_as_ddp(tmp_path, data):
    """Each continuation gives the losses of the unbroken run, and its checkpoint holds whole tensors."""
    settings = {
        "model": IN_TWO_PARTS, "data": {"shard": "global"}, "train": {"epochs": 2, "log_every": 1, "ema_decay": 0.9},
        "optimizer": {"name": "adam", "lr": 0.01, "momentum": None},
    }  # fmt: skip
    config = write_config(tmp_path / "two", data, parallel=FSDP, **settings, checkpoint={"every_steps": 5, "keep": 9})
    assert run(config, 2) == [0, 0]
    folder = config.parent / "runs" / "run"
    expected = losses(folder)
    content = last_checkpoint(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in content["model"].items()}
    assert shapes["layers.1.weight"] == (1100, 64)
    assert content["optimizer"]["state"][0]["exp_avg"].shape == (1100, 64)
    assert type(content["ema"]["average"][0]) is torch.Tensor
    assert {name: tuple(tensor.shape) for name, tensor in load_file(folder / "weights.safetensors").items()} == shapes
    earlier = f"checkpoint.resume={folder}/checkpoints/step-5"
    for name, world_size, parallel in (("one", 1, FSDP), ("four", 4, FSDP), ("ddp", 2, {"strategy": "ddp"})):
        often = {"every_steps": 6, "keep": 9}
        other = write_config(tmp_path / name, data, parallel=parallel, **settings, checkpoint=often)
        assert run(other, world_size, earlier) == [0] * world_size
        assert losses(other.parent / "runs" / "run") == pytest.approx(expected[5:], abs=1e-5), name
    # and back: what ddp has saved goes on in shards
    back = write_config(tmp_path / "back", data, parallel=FSDP, **settings)
    assert run(back, 2, f"checkpoint.resume={tmp_path}/ddp/runs/run/checkpoints/step-6") == [0, 0]
    assert losses(back.parent / "runs" / "run") == pytest.approx(expected[6:], abs=1e-5)


@pytest.mark.parametrize(("num_eval", "world_size"), [(5, 2), (2, 3)])
def test_evaluation_in_shards_counts_each_row_once(tmp_path, num_eval, world_size):
    """Ranks with fewer batches than others, even none, call the model as often as these."""
    data = write_images(tmp_path / "data", num_train=12, num_eval=num_eval)
    found = {}
    for name, parallel, ranks in (("fsdp", FSDP, world_size), ("none", {"strategy": "none"}, 1)):
        config = write_config(
            tmp_path / name, data, parallel=parallel, data={"shard": "global"}, model=IN_TWO_PARTS,
            batch={"global": 6, "eval_per_rank": 1}, train={"epochs": 1},
        )  # fmt: skip
        assert run(config, ranks) == [0] * ranks
        (found[name],) = [line for line in record(config.parent / "runs" / "run") if line["split"] == "eval"]
    assert found["fsdp"]["rows_used"] == num_eval
    assert found["fsdp"] == pytest.approx(found["none"], abs=1e-5)


def test_nan_of_one_rank_is_skipped_by_all_shards(tmp_path, data):
    model = {"name": "tests.end_to_end.models.NanAtStep", "args": {"step": 3, "rank": 1}}
    train = {"max_steps": 5, "log_every": 1, "on_nan": "skip"}
    config = write_config(tmp_path, data, model=model, parallel=FSDP, train=train)
    assert run(config, 2) == [0, 0]
    lines = [line for line in record(config.parent / "runs" / "run") if line["split"] == "train"]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert all(tensor.isfinite().all() for tensor in last_checkpoint(config.parent / "runs" / "run")["model"].values())


def test_batch_norm_over_ranks_has_the_same_buffers_everywhere(tmp_path, data):
    model = {"name": "small_cnn", "args": {"width": 4, "batch_norm": True}}
    config = write_config(tmp_path, data, model=model, parallel={"sync_batchnorm": True}, train={"epochs": 1})
    assert run(config, 2) == [0, 0]
    content = last_checkpoint(config.parent / "runs" / "run")
    one, other = (rank["buffers"] for rank in content["ranks"])
    assert len(one) == 6
    assert_same(one, other, "buffers")
    assert_same(one, {name: content["model"][name] for name in one}, "buffers")


def test_several_processes_of_dp_are_refused_by_all(tmp_path, data):
    config = write_config(tmp_path, data, parallel={"strategy": "dp"})
    assert run(config, 2) == [2, 2]
    terminal = (tmp_path / "terminal-0.txt").read_text()
    assert "parallel.strategy=dp drives all devices of one process, but there are 2 processes" in terminal
    report = json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())
    assert "parallel.strategy=ddp" in report["message"]
