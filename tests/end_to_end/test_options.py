"""Every training option does what it promises, seen from outside: in the log, the weights or the exit code."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import cli
from harness.training import loop
from tests.end_to_end.experiment import (
    assert_same,
    last_checkpoint,
    losses,
    of_split,
    run,
    run_folder,
    train,
    write_config,
    write_images,
)
from tests.ranks import run_ranks

MODELS = "tests.end_to_end.models"
CONSTANT_RATE = {"name": "constant", "warmup": None}


def test_schedule_counts_only_applied_updates(tmp_path, data):
    """The loss scale overflows at first: skipped steps are counted, also their rows over both ranks, and the learning
    rate waits for applied ones."""
    folder = train(
        tmp_path,
        data,
        2,
        precision={"opt_level": "O2", "loss_scale": "dynamic", "max_loss_scale": 2.0**24},
        train={"log_every": 1, "epochs": 2},
        optimizer={"lr": 0.05},
        schedule={"warmup": 1.0},
        model={"name": f"{MODELS}.Overflowing", "args": {}},
    )
    lines = of_split(folder, "train")
    skipped = lines[-1]["skipped"]
    assert 0 < skipped < len(lines)
    applied = [number - line["skipped"] for number, line in enumerate([{"skipped": 0}, *lines[:-1]])]
    assert [line["lr"] for line in lines[:8]] == pytest.approx([0.05 * (count + 1) / 8 for count in applied[:8]])
    assert lines[-1]["loss_scale"] == 65536 / 2**skipped
    state = last_checkpoint(folder)["state"]
    assert state["applied"] + state["skipped"] == state["step"] == len(lines)
    left_out = 8 * skipped
    first, second = of_split(folder, "epoch")
    assert (first["rows_used"], first["rows_updated"], first["steps_skipped"]) == (61, 61 - left_out, skipped)
    assert (second["rows_used"], second["rows_updated"], second["steps_skipped"]) == (61, 61, 0)
    assert [line["samples"] for line in lines[:8]] == [8, 16, 24, 32, 40, 48, 56, 61]
    assert lines[-1]["samples_skipped"] == left_out
    said = f"61 of 61 rows used; {61 - left_out} of them updated the weights, and {left_out} belonged to {skipped} step"
    assert said in (tmp_path / "terminal-0.txt").read_text()


def test_moving_average_is_exported_and_a_dropped_tail_reported(tmp_path, data):
    folder = train(tmp_path, data, 2, train={"ema_decay": 0.9, "epochs": 1}, data={"tail": "drop"})
    content = last_checkpoint(folder)
    exported = load_file(folder / "weights.safetensors")
    for name, average in zip(content["model"], content["ema"]["average"], strict=True):
        assert_same(exported[name], average, name)
        assert not torch.equal(exported[name], content["model"][name])
    (epoch,) = of_split(folder, "epoch")
    assert (epoch["rows_used"], epoch["rows"]) == (56, 61)
    model = {"name": "small_cnn", "args": {"width": 4}, "weights": str(folder / "weights.safetensors")}
    kept = train(tmp_path / "kept", data, model=model, optimizer={"lr": 1e-9}, train={"epochs": 1})
    evaluated, expected = (of_split(each, "eval")[-1]["loss"] for each in (folder, kept))
    assert evaluated == pytest.approx(expected, abs=1e-5), "the average is evaluated"


def test_patience_stops_early(tmp_path, data):
    """A rate too small to learn from never improves the accuracy, so the run ends after two more evaluations."""
    settings = {"optimizer": {"lr": 1e-9}, "schedule": CONSTANT_RATE}
    folder = train(tmp_path, data, train={"epochs": 50, "patience": 2}, **settings)
    assert len(of_split(folder, "eval")) == 3
    summary, why = json.loads((folder / "summary.json").read_text()), "was not better in the last 2 evaluations"
    assert summary["finished"]
    assert why in summary["ended_early"]
    assert why in (tmp_path / "terminal-0.txt").read_text()


@pytest.mark.parametrize(("strategy", "level"), [("ddp", "O0"), pytest.param("fsdp", "O1", marks=pytest.mark.slow)])
def test_nan_stops_all_ranks_and_keeps_the_last_good_checkpoint(tmp_path, data, strategy, level):
    """A NaN on one rank under O1 is no overflow that a smaller loss scale could cure."""
    model = {"name": f"{MODELS}.NanAtStep", "args": {"step": 11, "rank": 1}}
    config = write_config(
        tmp_path, data, model=model, checkpoint={"every": 1}, parallel={"strategy": strategy},
        precision={"opt_level": level},
    )  # fmt: skip
    assert run(config, 2) == [70, 70]
    failure = json.loads((run_folder(config) / "failure.json").read_text())
    assert "the loss became nan" in failure["message"]
    assert ("first non-finite layer: layer.weight" if level == "O0" else "all weights are finite") in failure["message"]
    assert f"checkpoint.resume={run_folder(config)}/checkpoints/step-10" in failure["hint"]
    content = last_checkpoint(run_folder(config))
    assert content["state"]["step"] == 10
    assert all(tensor.isfinite().all() for tensor in content["model"].values())


def test_nan_on_one_rank_can_be_skipped_by_all(tmp_path, data):
    """Under FSDP; the norm below is skipped under ddp."""
    model = {"name": f"{MODELS}.NanAtStep", "args": {"step": 3, "rank": 1}}
    settings = {"train": {"max_steps": 5, "log_every": 1, "on_nan": "skip"}, "parallel": {"strategy": "fsdp"}}
    folder = train(tmp_path, data, 2, model=model, **settings)
    lines = of_split(folder, "train")
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert all(line["loss"] is None or math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] is not None
    assert all(tensor.isfinite().all() for tensor in last_checkpoint(folder)["model"].values())


def _trained_with_an_endless_norm_on_rank_1(config: str) -> int:
    plain, steps = loop.get_total_norm, itertools.count(1)

    def total_norm(gradients):
        norm = plain(gradients)
        return norm * math.inf if next(steps) == 3 and os.environ["RANK"] == "1" else norm

    loop.get_total_norm = total_norm
    return cli.main(["train", "-c", config])


def test_norm_that_overflows_on_one_rank_only_skips_the_step_on_all(tmp_path, data):
    """Another processor may add up the squares in another order. The ranks would not agree on what an epoch skipped."""
    settings = {"train": {"epochs": 1, "log_every": 1, "on_nan": "skip"}}
    config = write_config(tmp_path, data, **settings)
    assert run_ranks(2, _trained_with_an_endless_norm_on_rank_1, str(config), group=False) == [0, 0]
    assert [line["skipped"] for line in of_split(run_folder(config), "train")][:5] == [0, 0, 1, 1, 1]


def test_unreadable_images_are_counted_and_skipped(tmp_path):
    broken = write_images(tmp_path / "broken")
    (broken / "images" / "train5.png").write_bytes(b"not an image")
    (broken / "images" / "eval3.png").unlink()
    folder = train(tmp_path, broken, 2, task={"on_bad_row": "skip"}, train={"epochs": 2})
    counts = {
        split: [(line["rows_used"], line["rows"], line["bad_rows"]) for line in of_split(folder, split)]
        for split in ("epoch", "eval")
    }
    assert counts == {"epoch": [(60, 61, 1), (60, 61, 2)], "eval": [(22, 23, 1)] * 2}
    named = {split: [line["unreadable"] for line in of_split(folder, split) if "unreadable" in line]
             for split in ("train", "eval")}  # fmt: skip
    assert named == {
        split: [[f"row {row} (from 0): images/{split}{row}.png"]] * 2 for split, row in (("train", 5), ("eval", 3))
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("strategy", "ranks", "mode"), [("fsdp", 2, "true"), ("ddp", 1, "reduce-overhead")])
def test_compiled_model_gives_the_same_curve(tmp_path, data, strategy, ranks, mode):
    settings: dict[str, Any] = {
        "model": {"name": f"{MODELS}.Blocks", "args": {"width": 96, "num_blocks": 1, "dropout": 0.0}},
        "train": {"max_steps": 6, "log_every": 1},
        "parallel": {"strategy": strategy},
        "runtime": {"timeout_s": 200},
        "limit_s": 240,
    }
    plain, compiled = (  # torch's compiler takes minutes on a busy machine
        losses(train(tmp_path / str(on), data, ranks, f"model.compile={on}", **settings)) for on in ("false", mode)
    )
    assert plain == pytest.approx(compiled, abs=1e-4)
