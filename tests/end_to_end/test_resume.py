"""Exact resume: a run killed at any moment ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal

import pytest

from tests.end_to_end.experiment import Kill, assert_same_run, last_checkpoint, record, run, write_config, write_images

# Everything that a resume could get wrong, in one configuration: augmentation, dropout, batch norm, micro-batches,
# a moving average, clipping, a skipped step or two (the dynamic scale starts too high), and log windows left open.
SETTINGS = {
    "model": {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}},
    "batch": {"global": 8, "accumulate": 2},
    "train": {"epochs": 5, "log_every": 3, "clip_norm": 1.0, "ema_decay": 0.9},
    "checkpoint": {"every_steps": 2, "keep": 2},
}
NUM_KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_killed_ten_times_is_the_same_run(tmp_path, level, world_size):
    data = write_images(tmp_path / "data")
    settings = {**SETTINGS, "precision": {"opt_level": level}}
    unbroken = write_config(tmp_path / "unbroken", data, **settings)
    assert run(unbroken, world_size) == [0] * world_size

    broken = write_config(tmp_path / "broken", data, **settings)
    chance = random.Random(f"{level} {world_size}")
    folder = broken.parent / "runs" / "run"
    for _ in range(NUM_KILLS):
        at = last_checkpoint(folder)["state"]["step"] if (folder / "checkpoints" / "latest").exists() else 0
        where = chance.choice(["step", "step", "save", "evaluation"])
        victim = 0 if where == "save" else chance.randrange(world_size)
        codes = run(broken, world_size, kill=Kill(victim, at + chance.randint(1, 3), where))
        assert codes[victim] == -signal.SIGKILL, f"the run ended before it could be killed: {codes}"
        assert all(code not in (0, -signal.SIGKILL) for rank, code in enumerate(codes) if rank != victim)
    assert run(broken, world_size) == [0] * world_size
    assert_same_run(unbroken.parent / "runs" / "run", folder)


@pytest.mark.parametrize(("name", "workers"), [("adam", 2), ("sgd", 1)])
def test_loader_workers_do_not_matter(tmp_path, name, workers):
    """Stopped by one kill and resumed with another number of loader processes."""
    data = write_images(tmp_path / "data")
    settings = {"optimizer": {"name": name, "lr": 0.01, "momentum": None}, "checkpoint": {"every_steps": 3}}
    unbroken = write_config(tmp_path / "unbroken", data, **settings)
    assert run(unbroken) == [0]
    broken = write_config(tmp_path / "broken", data, **settings)
    assert run(broken, 1, f"data.num_workers={workers}", kill=Kill(0, 13)) == [-signal.SIGKILL]
    assert run(broken, 1, "data.num_workers=0") == [0]
    assert_same_run(unbroken.parent / "runs" / "run", broken.parent / "runs" / "run")


@pytest.mark.parametrize("rule", ["contiguous", "strided", "global"])
def test_resume_on_another_world_size_uses_every_row_once(tmp_path, rule):
    """2 ranks, then 1, then 3, all within one epoch: the record still counts each row of the epoch once."""
    data = write_images(tmp_path / "data")
    settings = {
        "data": {"shard": rule},
        "batch": {"global": 6},
        "train": {"epochs": 1, "log_every": 1},
        "schedule": {"warmup_epochs": 0.0},
    }
    config = write_config(tmp_path / "run", data, **settings, checkpoint={"every_steps": 1})
    run(config, 2, kill=Kill(0, 4))
    run(config, 1, kill=Kill(0, 7))
    assert run(config, 3) == [0, 0, 0]
    lines = record(config.parent / "runs" / "run")
    (epoch,) = [line for line in lines if line["split"] == "epoch"]
    assert epoch["rows_used"] == epoch["rows"] == 61
    trained = [line for line in lines if line["split"] == "train"]
    assert trained[-1]["samples"] == 61
    if rule == "global":  # and the global batches are those of the unbroken run, so the losses are too
        whole = write_config(tmp_path / "whole", data, **settings)
        assert run(whole, 1) == [0]
        expected = [line["loss"] for line in record(whole.parent / "runs" / "run") if line["split"] == "train"]
        assert [line["loss"] for line in trained] == pytest.approx(expected, abs=1e-5)


def test_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path):
    data = write_images(tmp_path / "data")
    unbroken = write_config(tmp_path / "unbroken", data)
    assert run(unbroken) == [0]
    broken = write_config(tmp_path / "broken", data)
    run(broken, kill=Kill(0, 20))
    folder = broken.parent / "runs" / "run"
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    assert run(broken) == [0]
    assert f"checkpoint refused: {newest}: state.pt is truncated" in (broken.parent / "terminal-0.txt").read_text()
    assert_same_run(unbroken.parent / "runs" / "run", folder)


def test_finished_run_started_again_changes_nothing(tmp_path):
    config = write_config(tmp_path / "run", write_images(tmp_path / "data"))
    assert run(config) == [0]
    folder = config.parent / "runs" / "run"
    shutil.copytree(folder, tmp_path / "before")
    assert run(config) == [0]
    assert (config.parent / "terminal-0.txt").read_text().count("nothing left to train: ") == 1
    assert_same_run(tmp_path / "before", folder)


def test_more_epochs_go_on_and_another_recipe_does_not(tmp_path):
    config = write_config(tmp_path / "run", write_images(tmp_path / "data"))
    folder = config.parent / "runs" / "run"
    assert run(config, 1, "train.epochs=2") == [0]
    assert run(config, 1, "train.epochs=3") == [0]
    assert [line["epoch"] for line in record(folder) if line["split"] == "eval"] == [1, 2, 3]
    assert run(config, 1, "optimizer.lr=0.01") == [0]
    assert (folder.parent / "run.1" / "summary.json").exists()
    assert "optimizer.lr 0.05 -> 0.01" in (config.parent / "terminal-0.txt").read_text()


def test_going_back_to_an_earlier_checkpoint_needs_a_name(tmp_path):
    """The run's own folder keeps what it has; under another name the earlier checkpoint starts a run of its own."""
    config = write_config(tmp_path / "run", write_images(tmp_path / "data"), checkpoint={"every_steps": 5, "keep": 9})
    assert run(config) == [0]
    folder = config.parent / "runs" / "run"
    earlier = f"checkpoint.resume={folder}/checkpoints/step-10"
    assert run(config, 1, earlier) == [2]
    assert "give the new run a name" in (config.parent / "terminal-0.txt").read_text()
    assert run(config, 1, earlier, "name=other", "optimizer.lr=0.01") == [0]
    lines = [line for line in record(folder.parent / "other") if line["split"] == "train"]
    assert lines[0]["step"] == 12
    assert record(folder)[-1]["step"] == 24
    # the best of a run of its own is one of its own evaluations, whatever was better before
    assert {"weights.safetensors", "predictions.csv"} <= {path.name for path in (folder.parent / "other").iterdir()}


def test_changed_annotations_are_refused(tmp_path):
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path / "run", data, checkpoint={"every_steps": 2})
    run(config, kill=Kill(0, 5))
    with open(data / "train.csv", "a") as file:
        file.write("images/train0.png,row\n")
    assert run(config) == [70]
    assert "the annotations are not those it was written with" in (config.parent / "terminal-0.txt").read_text()
