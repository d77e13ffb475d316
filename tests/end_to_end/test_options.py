"""Every training option does what it says, seen from outside: in the record, the weights or the exit code."""

from __future__ import annotations

import json
import math
import shutil
import tarfile

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.experiment import assert_same, last_checkpoint, losses, record, run, write_config, write_images


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("options") / "data")


def train(tmp_path, data, /, world_size=1, name="run", **settings):
    config = write_config(tmp_path / name, data, **settings)
    codes = run(config, world_size)
    return codes, config.parent / "runs" / "run"


def test_micro_batches_change_nothing_but_memory(tmp_path, data):
    """Gradients of 1 and of 4 micro-batches are the same mean, also in the ragged tail."""
    curves = []
    for accumulate in (1, 4):
        batch = {"global": 8, "accumulate": accumulate}
        codes, folder = train(tmp_path, data, name=str(accumulate), batch=batch, train={"log_every": 1})
        assert codes == [0]
        curves.append(losses(folder))
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_clipping_bounds_the_first_update(tmp_path, data):
    """One step of plain SGD moves the weights by at most lr times the norm."""
    settings = {"optimizer": {"lr": 1.0, "momentum": None}, "schedule": {"name": "constant", "warmup_epochs": 0.0}}
    _, before = train(tmp_path, data, name="tiny", train={"max_steps": 1, "clip_norm": 1e-9}, **settings)
    _, after = train(tmp_path, data, name="clipped", train={"max_steps": 1, "clip_norm": 0.05}, **settings)
    start, end = last_checkpoint(before)["model"], last_checkpoint(after)["model"]
    moved = math.sqrt(sum(((end[name] - start[name]) ** 2).sum().item() for name in start))
    assert moved == pytest.approx(0.05, rel=1e-3)


def test_schedule_counts_applied_updates_only(tmp_path, data):
    """A scale that overflows at first: skipped steps are counted, and the rate waits for applied ones."""
    codes, folder = train(
        tmp_path, data, precision={"opt_level": "O2", "loss_scale": "dynamic", "max_loss_scale": 2.0**24},
        train={"log_every": 1, "epochs": 2}, optimizer={"lr": 0.05}, schedule={"warmup_epochs": 1.0},
        model={"name": "tests.end_to_end.models.Overflowing", "args": {}},
    )  # fmt: skip
    assert codes == [0]
    lines = [line for line in record(folder) if line["split"] == "train"]
    skipped = lines[-1]["skipped"]
    assert 0 < skipped < len(lines)
    applied = [number - line["skipped"] for number, line in enumerate([{"skipped": 0}, *lines[:-1]])]
    assert [line["lr"] for line in lines[:8]] == pytest.approx([0.05 * (count + 1) / 8 for count in applied[:8]])
    assert lines[-1]["loss_scale"] == 65536 / 2**skipped
    state = last_checkpoint(folder)["state"]
    assert state["applied"] + state["skipped"] == state["step"] == len(lines)


def test_moving_average_is_what_is_evaluated_and_exported(tmp_path, data):
    codes, folder = train(tmp_path, data, train={"ema_decay": 0.9, "epochs": 1})
    assert codes == [0]
    content = last_checkpoint(folder)
    exported = load_file(folder / "weights.safetensors")
    for name, average in zip(content["model"], content["ema"]["average"], strict=True):
        assert_same(exported[name], average, name)
        assert not torch.equal(exported[name], content["model"][name])


def test_patience_stops_early(tmp_path, data):
    """A rate too small to learn from: no better accuracy, so the run ends after two evaluations more."""
    settings = {"optimizer": {"lr": 1e-9}, "schedule": {"name": "constant", "warmup_epochs": 0.0}}
    codes, folder = train(tmp_path, data, train={"epochs": 50, "patience": 2}, **settings)
    assert codes == [0]
    assert len([line for line in record(folder) if line["split"] == "eval"]) == 3
    assert json.loads((folder / "summary.json").read_text())["finished"]


def test_nan_stops_with_a_report_and_keeps_the_checkpoint_before(tmp_path, data):
    model = {"name": "tests.end_to_end.models.NanAtStep", "args": {"step": 11}}
    codes, folder = train(tmp_path, data, 2, model=model, train={"log_every": 1}, checkpoint={"every_steps": 1})
    assert codes == [70, 70]
    report = json.loads((folder / "failure.json").read_text())
    assert "the loss became nan" in report["message"]
    content = last_checkpoint(folder)
    assert content["state"]["step"] == 10
    assert all(tensor.isfinite().all() for tensor in content["model"].values())


def test_nan_can_be_skipped_on_all_ranks(tmp_path, data):
    """Only rank 1 meets the NaN; both ranks skip that step and go on."""
    model = {"name": "tests.end_to_end.models.NanAtStep", "args": {"step": 11, "rank": 1}}
    codes, folder = train(tmp_path, data, 2, model=model, train={"log_every": 1, "on_nan": "skip"})
    assert codes == [0, 0]
    lines = [line for line in record(folder) if line["split"] == "train"]
    assert lines[-1]["skipped"] == 1
    assert all(line["loss"] is None or math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] is not None


@pytest.mark.parametrize("name", ["constant", "cosine", "polynomial"])
def test_channels_last_and_schedules(tmp_path, data, name):
    codes, folder = train(tmp_path, data, model={"channels_last": True}, schedule={"name": name, "min_lr": 0.001})
    assert codes == [0]
    rates = [line["lr"] for line in record(folder) if line["split"] == "train"]
    assert rates[-1] == pytest.approx(0.05 if name == "constant" else 0.001, abs=3e-3)


def test_label_smoothing_raises_the_training_loss_only(tmp_path, data):
    """The same first step: smoothing shows in the logged training loss, not in what evaluation computes."""
    firsts = []
    for smoothing in (0.0, 0.3):
        settings = {"task": {"label_smoothing": smoothing}, "train": {"max_steps": 1, "log_every": 1}}
        _, folder = train(tmp_path, data, name=str(smoothing), **settings)
        firsts.append(losses(folder)[0])
    assert firsts[0] != firsts[1]


def test_unreadable_images_are_counted_and_replaced(tmp_path, data):
    broken = shutil.copytree(data, tmp_path / "broken")
    (broken / "images" / "train5.png").write_bytes(b"not an image")
    (broken / "images" / "eval3.png").unlink()
    codes, folder = train(tmp_path, broken, 2, task={"on_bad_image": "skip"}, train={"epochs": 2, "log_every": 1})
    assert codes == [0, 0]
    epochs = [line for line in record(folder) if line["split"] == "epoch"]
    assert [(line["rows_used"], line["rows"], line["bad_rows"]) for line in epochs] == [(60, 61, 1), (60, 61, 2)]
    evaluations = [line for line in record(folder) if line["split"] == "eval"]
    assert [(line["rows_used"], line["rows"], line["bad_rows"]) for line in evaluations] == [(22, 23, 1)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_last_row_alone_passes_batch_norm(tmp_path, data, world_size):
    """61 rows in batches of 12: one is left for the last step, and on two ranks one of them has none."""
    model = {"name": "tests.end_to_end.models.BatchNormed", "args": {}}
    batch = {"global": 12}
    codes, folder = train(tmp_path, data, world_size, model=model, batch=batch, train={"epochs": 2, "log_every": 1})
    assert codes == [0] * world_size
    lines = [line for line in record(folder) if line["split"] == "train"]
    assert [line["samples"] for line in lines[:6]] == [12, 24, 36, 48, 60, 61]
    assert [line["rows_used"] for line in record(folder) if line["split"] == "epoch"] == [61, 61]


def test_dropped_tail_is_told(tmp_path, data):
    codes, folder = train(tmp_path, data, 2, data={"tail": "drop"}, train={"epochs": 1, "log_every": 1})
    assert codes == [0, 0]
    (epoch,) = [line for line in record(folder) if line["split"] == "epoch"]
    assert (epoch["rows_used"], epoch["rows"]) == (56, 61)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_model_gives_the_same_curve(tmp_path, data):
    curves = []
    for compiled in (False, True):
        _, folder = train(
            tmp_path, data, name=str(compiled), model={"compile": compiled}, train={"max_steps": 6, "log_every": 1}
        )
        curves.append(losses(folder))
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


@pytest.mark.slow
def test_real_annotation_csv(tmp_path, shared_data):
    """2,000 MNIST images behind a CSV of somebody else's, with its own column names, on two ranks at O1."""
    source = shared_data / "mnist_png_csv"
    with tarfile.open(source / "images.tar.gz") as archive:
        archive.extractall(tmp_path / "images", filter="data")
    task = {
        "name": "image_csv", "train_csv": str(source / "train.csv"), "eval_csv": str(source / "test.csv"),
        "root": str(tmp_path / "images"), "path_column": "filepath", "color": "gray", "augment": {},
    }  # fmt: skip
    codes, folder = train(
        tmp_path, tmp_path, 2, task=task, model={"args": {"width": 8, "batch_norm": True}}, batch={"global": 64},
        optimizer={"lr": 0.1}, precision={"opt_level": "O1"}, train={"epochs": 5},
    )  # fmt: skip
    assert codes == [0, 0]
    evaluation = [line for line in record(folder) if line["split"] == "eval"][-1]
    assert evaluation["rows_used"] == 500
    assert evaluation["top1"] > 0.9
