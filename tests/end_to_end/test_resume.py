"""Exact resume: a run killed at any moment ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal

import pytest

from harness.runs.files import read_sealed, write_sealed
from tests.end_to_end.experiment import (
    Kill,
    assert_same_run,
    last_checkpoint,
    newest_checkpoint,
    of_split,
    record,
    run,
    run_folder,
    train,
    write_config,
    write_images,
)

# Everything that a resume could get wrong, in one configuration: augmentation, mixing, dropout, batch norm,
# micro-batches, a moving average, parameter groups, clipping, skipped steps (the dynamic loss scale starts too high),
# and partly filled log windows.
SETTINGS = {
    "model": {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}},
    "batch": {"global": 8, "accumulate": 2},
    "optimizer": {
        "weight_decay": 0.01,
        "groups": [{"match": "1d", "weight_decay": 0}, {"match": "c*", "lr_scale": 0.5}],
    },
    "train": {"epochs": 5, "log_every": 3, "clip_norm": 1.0, "ema_decay": 0.9, "mixup": 0.4, "cutmix": 1.0},
    "checkpoint": {"every": 2, "keep": 2},
}
NUM_KILLS = 10


def kill_in_turn(tmp_path, data, level, world_size, places, chance):
    """Kill a run once in each of ``places``, damage its newest checkpoint so that the previous one is used, let it
    finish, and compare it with an unbroken run."""
    settings = {**SETTINGS, "precision": {"opt_level": level}}
    unbroken = train(tmp_path / "unbroken", data, world_size, **settings)
    broken = write_config(tmp_path / "broken", data, **settings)
    folder = run_folder(broken)
    for where in places:
        at = last_checkpoint(folder)["state"]["step"] if (folder / "checkpoints" / "latest").exists() else 0
        victim = 0 if where == "save" else chance.randrange(world_size)
        codes = run(broken, world_size, kill=Kill(victim, at + chance.randint(1, 3), where))
        assert codes[victim] == -signal.SIGKILL, f"the run ended before it could be killed: {codes}"
        assert all(code not in (0, -signal.SIGKILL) for rank, code in enumerate(codes) if rank != victim)
    state = newest_checkpoint(folder) / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    assert run(broken, world_size) == [0] * world_size
    rejected = f"checkpoint rejected: {state.parent}: state.pt is truncated"
    assert rejected in (broken.parent / "terminal-0.txt").read_text()
    assert_same_run(unbroken, folder)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_run_killed_ten_times_equals_the_unbroken_run(tmp_path, data):
    chance = random.Random("O1 2")
    places = [chance.choice(["step", "step", "save", "evaluation"]) for _ in range(NUM_KILLS)]
    kill_in_turn(tmp_path, data, "O1", 2, places, chance)


@pytest.mark.parametrize(("level", "world_size"), [("O0", 1), pytest.param("O2", 2, marks=pytest.mark.slow)])
def test_kill_in_each_place_is_resumed_exactly(tmp_path, data, level, world_size):
    kill_in_turn(tmp_path, data, level, world_size, ["step", "save", "evaluation"], random.Random(level))


@pytest.mark.slow
def test_modern_preset_is_resumed_exactly_on_a_cpu(tmp_path, data):
    """Channels-last bfloat16 with overlapped reduction and a fused optimizer: only a GPU may round differently."""
    settings = {"extends": "preset:modern", "precision": {"opt_level": "O4"}, "checkpoint": {"every": 3}}
    unbroken = train(tmp_path / "unbroken", data, 2, **settings)
    broken = write_config(tmp_path / "broken", data, **settings)
    run(broken, 2, kill=Kill(0, 13))
    assert run(broken, 2) == [0, 0]
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("level", "strategy", "world_size"), [("O1", "ddp", 2), ("O4", "fsdp", 2)])
def test_compiled_model_is_resumed_exactly(tmp_path, data, level, strategy, world_size):
    """One resume begins with the smaller last batch of an epoch, the other one after it."""
    settings = {
        "model": {"name": "small_cnn", "args": {"width": 4, "batch_norm": True}, "compile": True},
        "precision": {"opt_level": level}, "parallel": {"strategy": strategy}, "checkpoint": {"every": 1},
        "train": {"epochs": 2}, "runtime": {"timeout_s": 200},
    }  # fmt: skip
    unbroken = train(tmp_path / "unbroken", data, world_size, limit_s=280, **settings)
    broken = write_config(tmp_path / "broken", data, **settings)
    for step in (8, 11):  # of 8 in an epoch
        assert -signal.SIGKILL in run(broken, world_size, kill=Kill(0, step), timeout_s=280)
    assert run(broken, world_size, timeout_s=280) == [0] * world_size
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.slow
def test_plateau_is_resumed_exactly_also_with_more_epochs(tmp_path, data):
    """A rate too small to learn from is lowered at every second evaluation, equally on both ranks."""
    settings = {
        "schedule": {"name": "plateau", "args": {"patience": 1}, "warmup": 0.5}, "optimizer": {"lr": 1e-6},
        "checkpoint": {"every": 3}, "train": {"epochs": 7},
    }  # fmt: skip
    unbroken = train(tmp_path / "unbroken", data, 2, **settings)
    rates = [line["lr"] for line in of_split(unbroken, "train")]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert sorted({round(rate, 12) for rate in rates[3:]}, reverse=True)[:3] == pytest.approx([1e-6, 1e-7, 1e-8])
    broken = write_config(tmp_path / "broken", data, **settings)
    run(broken, 2, kill=Kill(1, 20, "evaluation"))
    assert run(broken, 2, "train.epochs=4") == [0, 0]  # the same run with another end
    run(broken, 2, kill=Kill(0, 43))
    assert run(broken, 2) == [0, 0]
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluations_in_an_epoch_are_resumed_exactly(tmp_path, data, world_size):
    """Of 8 steps, during them, after them, and with early stopping in an epoch."""
    settings = {
        **SETTINGS, "precision": {"opt_level": "O1"}, "data": {"num_workers": 1}, "schedule": {"name": "constant"},
        "train": {"evaluate_every": "0.4 epochs", "max_steps": 22, "log_every": "0.3 epochs", "patience": 5},
        "optimizer": {"lr": 1e-6}, "checkpoint": {"every": "0.6 epochs", "keep": 2},
    }  # fmt: skip
    unbroken = train(tmp_path / "unbroken", data, world_size, **settings)
    steps = [line["step"] for line in of_split(unbroken, "eval")]
    assert steps[:6] == [4, 7, 10, 13, 16, 20][: len(steps)]
    assert len(steps) >= 6
    broken = write_config(tmp_path / "broken", data, **settings)
    for kill in (Kill(0, 4, "evaluation"), Kill(0, 5), Kill(0, 10, "save"), Kill(0, 13, "evaluation"), Kill(0, 18)):
        run(broken, world_size, kill=kill)
    assert run(broken, world_size) == [0] * world_size
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.parametrize("end", [{"evaluate_every": "5 steps"}, {"max_steps": 5}])
def test_a_checkpoint_before_an_evaluation_is_after_its_log_line(tmp_path, data, end):
    """Also where ``checkpoint.every`` asks for a checkpoint at that step, which ends no other log line."""
    settings = {"train": {"epochs": 1, "log_every": "4 steps", **end}, "checkpoint": {"every": 5}}
    unbroken = train(tmp_path / "unbroken", data, **settings)
    assert [line["step"] for line in of_split(unbroken, "train")][:2] == [4, 5]
    broken = write_config(tmp_path / "broken", data, **settings)
    assert run(broken, kill=Kill(0, 5, "evaluation")) == [-signal.SIGKILL]
    assert run(broken) == [0]
    assert_same_run(unbroken, run_folder(broken))


@pytest.mark.slow
def test_scheduler_of_ones_own_is_resumed_exactly(tmp_path, data):
    """Its state cannot be computed from the number of updates. Gradients that overflow do not advance it."""
    settings = {
        "schedule": {"name": "tests.end_to_end.schedules.Walk", "args": {"factor": 0.9}, "warmup": 0.5},
        "precision": {"opt_level": "O1"}, "checkpoint": {"every": 3}, "train": {"epochs": 2, "log_every": 1},
    }  # fmt: skip
    unbroken = train(tmp_path / "unbroken", data, **settings)
    rates = [line["lr"] for line in of_split(unbroken, "train")]
    assert len(set(rates)) > 8
    broken = write_config(tmp_path / "broken", data, **settings)
    for step in (5, 10):
        run(broken, kill=Kill(0, step))
    assert run(broken) == [0]
    assert_same_run(unbroken, run_folder(broken))
    longer = train(tmp_path / "longer", data, **{**settings, "train": {"epochs": 1, "log_every": 1}})
    assert run(tmp_path / "longer" / "config.yaml", 1, "train.epochs=2") == [0]
    assert [line["lr"] for line in of_split(longer, "train")][8:] == rates[8:]


@pytest.mark.slow
def test_resume_with_another_number_of_loader_workers_is_exact(tmp_path, data):
    settings = {"optimizer": {"name": "adam", "lr": 0.01, "momentum": None}, "checkpoint": {"every": 3}}
    unbroken = train(tmp_path / "unbroken", data, **settings)
    broken = write_config(tmp_path / "broken", data, **settings)
    assert run(broken, 1, "data.num_workers=2", kill=Kill(0, 13)) == [-signal.SIGKILL]
    assert run(broken, 1, "data.num_workers=0") == [0]
    assert_same_run(unbroken, run_folder(broken))


def test_rows_that_are_skipped_are_named_in_the_record_also_after_a_kill(tmp_path):
    """Once per epoch, of those before the checkpoint too, on any number of ranks."""
    broken, bad = write_images(tmp_path / "broken"), (2, 17, 33, 58)
    for row in bad:
        (broken / "images" / f"train{row}.png").write_bytes(b"no image")
    settings = {"task": {"on_bad_row": "skip"}, "checkpoint": {"every": 2}, "train": {"epochs": 2, "log_every": 50}}
    config = write_config(tmp_path, broken, **settings)
    for ranks, kill in ((2, Kill(0, 5)), (1, Kill(0, 7)), (2, Kill(1, 13)), (2, None)):
        run(config, ranks, kill=kill)
    lines = of_split(run_folder(config), "train")
    named = {epoch: [name for line in lines if line["epoch"] == epoch for name in line.get("unreadable", ())]
             for epoch in (1, 2)}  # fmt: skip
    names = [f"row {row} (from 0): images/train{row}.png" for row in bad]
    assert named == {1: names, 2: names}


@pytest.mark.parametrize("rule", ["global", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_resume_on_another_world_size_uses_every_row_once(tmp_path, data, rule):
    """2 ranks, then 1, then 3, all within one epoch: the log still counts each row of the epoch once."""
    settings = {
        "data": {"shard": rule},
        "batch": {"global": 6},
        "train": {"epochs": 1, "log_every": 1},
        "schedule": {"warmup": None},
    }
    config = write_config(tmp_path / "run", data, **settings, checkpoint={"every": 1})
    run(config, 2, kill=Kill(0, 4))
    run(config, 1, kill=Kill(0, 7))
    assert run(config, 3) == [0, 0, 0]
    (epoch,) = of_split(run_folder(config), "epoch")
    assert epoch["rows_used"] == epoch["rows"] == 61
    assert epoch["rows_repeated"] == 0
    trained = of_split(run_folder(config), "train")
    assert trained[-1]["samples"] == 61
    if rule == "global":  # the global batches are those of the unbroken run, and so are the losses
        expected = [line["loss"] for line in of_split(train(tmp_path / "whole", data, **settings), "train")]
        assert [line["loss"] for line in trained] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "mistake", ["optimizer.name=adamv", "model.name=resnett", "optimizer.args={rho: 1}", "schedule.name=cosin"]
)
def test_a_mistake_in_the_command_leaves_a_finished_run_where_it_is(tmp_path, data, mistake):
    config = write_config(tmp_path / "run", data, train={"epochs": 1})
    folder = run_folder(config)
    assert [run(config), run(config, 1, mistake)] == [[0], [2]]
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert (folder / "summary.json").exists()


def test_a_run_is_never_erased(tmp_path, data):
    """Neither by another recipe nor because its checkpoints are refused, such as those of another version."""
    config = write_config(tmp_path / "run", data, train={"epochs": 1})
    folder, terminal = run_folder(config), config.parent / "terminal-0.txt"
    assert [run(config), run(config, 1, "optimizer.lr=0.01")] == [[0], [0]]
    assert (folder.with_name("run.1") / "summary.json").exists()
    assert "optimizer.lr 0.05 -> 0.01" in terminal.read_text()
    manifests = list(folder.glob("checkpoints/*/manifest.json"))
    for manifest in manifests:
        write_sealed(manifest, {**read_sealed(manifest), "version": 1})
    kept = [folder / "weights.safetensors", folder / "metrics.jsonl", *manifests]
    before = [path.read_bytes() for path in kept]
    assert run(config, 1, "optimizer.lr=0.01") == [70]
    assert "no checkpoint of this run can be used\n  step-8: its version is 1, but" in terminal.read_text()
    assert [path.read_bytes() for path in kept] == before
    assert run(config, 1, "optimizer.lr=0.01", "checkpoint.resume=never") == [0]
    moved = [folder.with_name("run.2") / path.relative_to(folder) for path in kept]
    assert [path.read_bytes() for path in moved] == before


@pytest.mark.slow
def test_starting_a_finished_run_changes_nothing_and_more_epochs_continue_it(tmp_path, data):
    config = write_config(tmp_path / "run", data, checkpoint={"keep": 1})
    folder = run_folder(config)
    assert run(config, 1, "train.epochs=2") == [0]
    shutil.copytree(folder, tmp_path / "before")
    # As if a kill had come before the removal of this one.
    outdated = shutil.copytree(newest_checkpoint(folder), folder / "checkpoints" / "step-1")
    assert run(config, 1, "train.epochs=2") == [0]
    assert not outdated.exists()
    assert (config.parent / "terminal-0.txt").read_text().count("nothing left to do: ") == 1
    assert_same_run(tmp_path / "before", folder)
    assert run(config, 1, "train.epochs=1", "train.max_steps=5") == [0]
    assert (folder / "config.yaml").read_bytes() == (tmp_path / "before" / "config.yaml").read_bytes()
    assert run(config, 1, "train.epochs=3") == [0]
    assert "epochs: 3" in (folder / "config.yaml").read_text()
    assert [line["epoch"] for line in of_split(folder, "eval")] == [1, 2, 3]


@pytest.mark.slow
def test_resume_from_an_earlier_checkpoint_of_the_same_run_needs_a_new_name(tmp_path, data):
    """The run's own folder keeps its content; under another name the earlier checkpoint starts a new run."""
    folder = train(tmp_path / "run", data, checkpoint={"every": 5, "keep": 9})
    config = tmp_path / "run" / "config.yaml"
    earlier = f"checkpoint.resume={folder}/checkpoints/step-10"
    assert run(config, 1, earlier) == [2]
    assert "start a new run with name=NAME" in (config.parent / "terminal-0.txt").read_text()
    assert run(config, 1, earlier, "name=other", "optimizer.lr=0.01") == [0]
    assert of_split(folder.parent / "other", "train")[0]["step"] == 12
    assert record(folder)[-1]["step"] == 24
    # The best weights of the new run come from its own evaluations, whatever was better before.
    assert {"weights.safetensors", "predictions.csv"} <= {path.name for path in (folder.parent / "other").iterdir()}


def test_changed_annotations_are_refused(tmp_path):
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path / "run", data, checkpoint={"every": 2})
    run(config, kill=Kill(0, 5))
    with open(data / "train.csv", "a") as file:
        file.write("images/train0.png,row\n")
    assert run(config) == [70]
    assert "the annotations have changed since it was written" in (config.parent / "terminal-0.txt").read_text()
