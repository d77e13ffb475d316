"""Every strategy trains the same run: same losses, exact resume, each row evaluated once, and switching over."""

from __future__ import annotations

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
    of_split,
    record,
    run,
    run_folder,
    train,
    write_config,
    write_images,
)
from tests.end_to_end.test_parity import assert_close

FSDP = {"strategy": "fsdp"}
# Its first layer is large enough to be an FSDP unit of its own, see harness.training.strategies.sharding.
TWO_UNITS = {"name": "mlp", "args": {"hidden": 1100}}

# Sums are taken in another order: equal to float32's rounding at O0, to that of float16 activations (2^-11) at O1 and
# of bfloat16 (2^-8) at O4.
TOLERANCE = {"O0": 1e-5, "O1": 2e-3, "O4": 2e-2}


@pytest.mark.parametrize("level", ["O0", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O1", "O4"))])
def test_all_strategies_give_the_same_losses(tmp_path, data, level):
    """With micro-batches, clipping, a moving average and a ragged last batch, at the same global batch."""
    cases = {
        "none": (1, {"strategy": "none"}),
        "fsdp": (2, FSDP),
    }
    half = {**FSDP, "param_dtype": "bfloat16"}
    if level == "O4":
        cases["fsdp in bfloat16"] = (2, half)
    else:
        cases["delayed"] = (2, {"strategy": "ddp", "delay_allreduce": True})
        cases["overlapped"] = (2, {"strategy": "ddp", "delay_allreduce": False})
    settings = {
        "precision": {"opt_level": level},
        "model": TWO_UNITS,
        "data": {"shard": "global"},
        "batch": {"global": 8, "accumulate": 2},
        "train": {"epochs": 1, "log_every": 1, "clip_norm": 1.0, "ema_decay": 0.9},
    }
    records = {
        name: record(train(tmp_path / name, data, ranks, parallel=parallel, **settings))
        for name, (ranks, parallel) in cases.items()
    }
    assert "fsdp in 2 parts" in (tmp_path / "fsdp" / "terminal-0.txt").read_text()
    for found in records.values():
        assert_close(records["none"], found, TOLERANCE[level])
    if level != "O4":
        assert_close(records["delayed"], records["overlapped"], 1e-6)


# Everything that a resume could get wrong. The second convolution is an FSDP unit of its own.
EVERYTHING = {
    "model": {"name": "small_cnn", "args": {"width": 48, "dropout": 0.2, "batch_norm": True}},
    "batch": {"global": 8, "accumulate": 2},
    "train": {"epochs": 2, "log_every": 3, "clip_norm": 1.0, "ema_decay": 0.9},
    "checkpoint": {"every": 2, "keep": 2},
}
ADAM = {"name": "adamw", "lr": 0.01, "momentum": None, "args": {"betas": [0.8, 0.9]}}
ASYNC = {"async_save": True}
O1, O2, O4 = {"opt_level": "O1"}, {"opt_level": "O2"}, {"opt_level": "O4"}


@pytest.mark.parametrize(
    ("settings", "kill"),
    [
        pytest.param(
            {"parallel": {**FSDP, "sync_batchnorm": True}, "optimizer": ADAM, "precision": O1},
            (0, 6, "save"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"parallel": {**FSDP, "param_dtype": "bfloat16"}, "precision": O4, "checkpoint": {"format": "sharded"}},
            (0, 7, "save"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"parallel": FSDP, "optimizer": ADAM, "checkpoint": {"format": "sharded", "async_save": True}},
            (1, 9, "step"),
            marks=pytest.mark.slow,
        ),
        ({"parallel": {"delay_allreduce": False}, "precision": O1, "checkpoint": ASYNC}, (0, 6, "save")),
        pytest.param(
            {"parallel": {"sync_batchnorm": True}, "optimizer": {"larc": {}}, "precision": O1},
            (1, 9, "step"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"parallel": {"strategy": "dp"}, "optimizer": {**ADAM, "name": "fused_lamb"}, "precision": O2},
            (0, 9, "step"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "fsdp syncbn O1",
        "sharded",
        "sharded async",
        "async overlapped O1",
        "syncbn larc",
        "dp fused_lamb O2",
    ],
)
def test_killed_run_is_resumed_exactly(tmp_path, data, settings, kill):
    ranks = 1 if settings.get("parallel", {}).get("strategy") == "dp" else 2
    settings = {**EVERYTHING, **settings, "checkpoint": {**EVERYTHING["checkpoint"], **settings.get("checkpoint", {})}}
    unbroken = train(tmp_path / "unbroken", data, ranks, **settings)
    broken = write_config(tmp_path / "broken", data, **settings)
    assert run(broken, ranks, kill=Kill(*kill))[kill[0]] == -signal.SIGKILL
    assert run(broken, ranks) == [0] * ranks
    assert_same_run(unbroken, run_folder(broken))


RECOMPUTED = {
    "O1 delayed": (2, {"precision": O1, "parallel": {"delay_allreduce": True}, "batch": {"accumulate": 2}}),
    "O2 overlapped, norms over all ranks": (
        2,
        {"precision": O2, "parallel": {"delay_allreduce": False, "sync_batchnorm": True}},
    ),
    "O4 fsdp": (2, {"precision": {"opt_level": "O4"}, "parallel": FSDP, "model": {"args": {"width": 96}}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECOMPUTED)
def test_activation_checkpointing_gives_the_same_weights_bit_for_bit(tmp_path, data, name):
    """One epoch with all blocks, and one with another choice: it is no part of the recipe."""
    ranks, settings = RECOMPUTED[name]
    model = {"name": "tests.end_to_end.models.Blocks", "args": {"width": 8}, **settings.get("model", {})}
    trained = {"epochs": 2, **settings.get("train", {})}
    settings = {**settings, "train": trained, "model": model, "schedule": {"name": "constant"}}
    plain = train(tmp_path / "plain", data, ranks, **settings)
    config = write_config(tmp_path / "again", data, **settings)
    assert run(config, ranks, "model.activation_checkpointing=true", "train.epochs=1") == [0] * ranks
    first = "model.activation_checkpointing=[blocks.0, blocks.2]" if ranks == 2 else "seed=0"
    assert run(config, ranks, first) == [0] * ranks
    assert_same_run(plain, run_folder(config))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_sharded_checkpoint_resumes_on_one_rank_on_four_and_as_ddp(tmp_path, data, form):
    """Each continuation gives the losses of the unbroken run, and what is read of a checkpoint are whole tensors."""
    settings = {
        "model": TWO_UNITS,
        "data": {"shard": "global"},
        "train": {"epochs": 2, "log_every": 1, "ema_decay": 0.9},
        "optimizer": {"name": "adam", "lr": 0.01, "momentum": None},
    }
    saved = {"every": 5, "keep": 9, "format": form}
    folder = train(tmp_path / "two", data, 2, parallel=FSDP, **settings, checkpoint=saved)
    names = {path.name for path in (folder / "checkpoints" / "step-5").iterdir()}
    shards = {"__0_0.distcp", "__1_0.distcp", ".metadata"} if form == "sharded" else set()
    assert names == {"state.pt", "manifest.json", *shards}
    expected = losses(folder)
    content = last_checkpoint(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in content["model"].items()}
    assert shapes["layers.1.weight"] == (1100, 64)
    assert content["optimizer"]["state"][0]["exp_avg"].shape == (1100, 64)
    assert type(content["ema"]["average"][0]) is torch.Tensor
    assert {name: tuple(tensor.shape) for name, tensor in load_file(folder / "weights.safetensors").items()} == shapes
    earlier = f"checkpoint.resume={folder}/checkpoints/step-5"
    for name, ranks, parallel in (("one", 1, FSDP), ("four", 4, FSDP), ("ddp", 2, {"strategy": "ddp"})):
        often = {"every": 6, "keep": 9}
        other = train(tmp_path / name, data, ranks, earlier, parallel=parallel, **settings, checkpoint=often)
        assert losses(other) == pytest.approx(expected[5:], abs=1e-5), name
    from_ddp = f"checkpoint.resume={tmp_path}/ddp/runs/run/checkpoints/step-6"
    back = train(tmp_path / "back", data, 2, from_ddp, parallel=FSDP, **settings)
    assert losses(back) == pytest.approx(expected[6:], abs=1e-5)


@pytest.mark.parametrize(("num_eval", "ranks"), [pytest.param(5, 2, marks=pytest.mark.slow), (2, 3)])
def test_sharded_evaluation_counts_each_row_once(tmp_path, num_eval, ranks):
    """Ranks with fewer batches than others, even with none, call the model equally often."""
    data = write_images(tmp_path / "data", num_train=12, num_eval=num_eval)
    settings = {
        "data": {"shard": "global"},
        "model": TWO_UNITS,
        "batch": {"global": 6, "eval_per_rank": 1},
        "train": {"epochs": 1},
    }
    (sharded,) = of_split(train(tmp_path / "fsdp", data, ranks, parallel=FSDP, **settings), "eval")
    (whole,) = of_split(train(tmp_path / "none", data, parallel={"strategy": "none"}, **settings), "eval")
    assert sharded["rows_used"] == num_eval
    assert sharded == pytest.approx(whole, abs=1e-5)


def test_sync_batch_norm_has_the_same_buffers_on_all_ranks(tmp_path, data):
    model = {"name": "small_cnn", "args": {"width": 4, "batch_norm": True}}
    folder = train(tmp_path, data, 2, model=model, parallel={"sync_batchnorm": True}, train={"epochs": 1})
    content = last_checkpoint(folder)
    one, other = (rank["buffers"] for rank in content["ranks"])
    assert len(one) == 6
    assert_same(one, other, "buffers")
    assert_same(one, {name: content["model"][name] for name in one}, "buffers")
