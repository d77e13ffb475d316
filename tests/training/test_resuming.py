"""The checkpoint to resume from, and a log that was damaged since. tests/end_to_end/test_resume.py has the rest."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from harness import cli
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError
from harness.runs import checkpoint, trained_run
from harness.runs.checkpoint import steps
from harness.runs.checkpoints import Checkpoints
from harness.runs.weights_file import load_weights
from harness.training import loop
from harness.training.checkpoints import resuming
from harness.training.checkpoints.checkpointing import save
from harness.training.checkpoints.resuming import checkpoint_to_resume, restore, resume, verify
from tests.fixtures import make_config, settings, write_rows, write_yaml
from tests.ranks import run_ranks


@pytest.mark.parametrize("resume", ["auto", "s3://bucket/gone/checkpoints/step-7"])
def test_own_checkpoint_comes_first(tmp_path, resume):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.write(8, {"state": {}})
    run = SimpleNamespace(config=make_config(tmp_path, [f"checkpoint.resume={resume}"]), runtime=Runtime(),
                          checkpoints=checkpoints)  # fmt: skip
    assert checkpoint_to_resume(run) == (tmp_path / "checkpoints" / "step-8", True)
    run.config = make_config(tmp_path, ["checkpoint.resume=never"])
    assert checkpoint_to_resume(run) == (None, False)


def test_a_state_of_another_version_is_named_with_its_checkpoint(tmp_path, built):
    """It must not end a rank with a bare TypeError."""
    for name in ("train", "eval"):
        write_rows(tmp_path, name, 4)
    run = built(make_config(tmp_path, train={"deterministic": False}))
    save(run)
    folder = run.checkpoints.folder
    content = run.checkpoints.read(folder / "step-0", False, lambda key, size: None)
    run.checkpoints.write(1, {**content, "state": {**content["state"], "later": 1}})
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}/step-1: ") + ".*'later'"):
        restore(run, folder / "step-1")


def _verified(folders, problem):
    """How many checkpoints this rank has read, and the error."""
    read, damage = [], checkpoint.damage
    checkpoint.damage = lambda path: read.append(path) or damage(path)
    with (
        open_runtime(detect(os.environ), "cpu", 20.0, 60.0) as runtime,
        pytest.raises(CheckpointError, match=problem) if problem else nullcontext(),
    ):
        verify(runtime, Path(folders[runtime.rank]))
    return len(read)


def test_each_copy_of_a_checkpoint_is_verified_before_it_is_restored(tmp_path):
    """Ranks 0 and 1 share a disk, and so do ranks 2 and 3. Rank 0 has verified its copy when it chose it."""
    here, there = tmp_path / "here", tmp_path / "there"
    Checkpoints(here, 2).write(8, {"state": {}})
    shutil.copytree(here, there)
    folders = [str(folder / "step-8") for folder in (here, here, there, there)]
    assert run_ranks(4, _verified, folders, "", group=False) == [0, 0, 1, 0]
    state = there / "step-8" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    assert run_ranks(4, _verified, folders, "the copy of rank 2: state.pt is damaged", group=False) == [0, 0, 1, 0]
    (there / "step-8" / "manifest.json").unlink()
    assert run_ranks(4, _verified, folders, "rank 2 cannot find the checkpoint", group=False) == [0, 0, 0, 0]


def test_a_resume_notices_that_the_log_was_damaged(tmp_path):
    """The checkpoint has its digest."""
    for name, rows in (("train", 8), ("eval", 4)):
        write_rows(tmp_path, name, rows)
    config = write_yaml(tmp_path / "config.yaml", settings(tmp_path, train={"epochs": 1, "deterministic": False}))
    assert run_ranks(1, cli.main, ["train", "-c", str(config)], group=False) == [0]
    log = tmp_path / "runs" / "small" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"lr": 0.1', '"lr": 0.2', 1))
    assert run_ranks(1, cli.main, ["train", "-c", str(config), "train.epochs=2"], group=False) == [0]
    assert '"lr": 0.2' in log.with_name("metrics.jsonl.damaged").read_text()


@pytest.fixture
def started(tmp_path, built):
    """Builds the run ``name`` with these overrides, which takes up other runs' checkpoints."""
    for split, rows in (("train", 16), ("eval", 4)):
        write_rows(tmp_path, split, rows)

    def begin(name, *overrides):
        run = built(make_config(tmp_path, [f"name={name}", "train.deterministic=false", *overrides]))
        resume(run)
        return run

    return begin


def trained(run):
    """Train until the run ends, and return the folder of its newest checkpoint."""
    loop.train(run)
    run.writer.wait()
    return run.checkpoints.folder / f"step-{run.state.step}"


SETTINGS = [
    ("adamw", ["weight_decay=0.3", "args={betas: [0.5, 0.9], eps: 1.0e-4}"]),
    ("sgd", ["momentum=0.5", "weight_decay=0.1", "args={nesterov: true, foreach: true}"]),
    ("fused_adam", ["weight_decay=0.3", "args={betas: [0.5, 0.9]}"]),
    ("fused_lamb", ["weight_decay=0.3", "args={max_grad_norm: 2.0}"]),
    ("adam", ["larc.trust_coefficient=0.01", "args={betas: [0.5, 0.9]}"]),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_new_run_from_a_checkpoint_has_its_own_optimizer_settings(started, name, settings):
    before = [f"optimizer.name={name}", *(["optimizer.larc.clip=true"] if settings[0].startswith("larc") else [])]
    place = trained(started("first", *before, "train.max_steps=3"))
    settings = [*before, *(f"optimizer.{setting}" for setting in settings)]
    fresh, forked = started("fresh", *settings), started("forked", *settings, f"checkpoint.resume={place}")

    def of(run):
        state = ("params", "step", "lr")
        return [
            {key: value for key, value in group.items() if key not in state} for group in run.optimizer.param_groups
        ]

    assert of(forked) == of(fresh)
    assert forked.optimizer.param_groups[0].get("step") == (3 if name.startswith("fused") else None)
    assert any(forked.optimizer.state.values()) == (name != "sgd")
    loop.train(forked)


def test_a_module_gets_the_version_of_its_weights(started):
    settings = ["model.name=tests.end_to_end.models.Versioned", "model.args={}", "train.max_steps=3"]
    run = started("first", *settings)
    trained(run)
    again = started("first", *settings)
    assert again.state.step == 3
    trained_run.load_into(again.module, load_weights(again.folder.weights), again.folder.path)


def test_a_new_run_from_a_checkpoint_has_its_own_groups(started):
    place = trained(started("first", "optimizer.groups=[{match: 1d, lr_scale: 0.5}]", "train.max_steps=3"))
    later = "optimizer.groups=[{match: 1d, lr_scale: 0.1, weight_decay: 0.2}]"
    group = started("forked", later, f"checkpoint.resume={place}").optimizer.param_groups[1]
    assert (group["lr_scale"], group["weight_decay"]) == (0.1, 0.2)


def test_a_setting_that_needs_other_state_is_refused(started):
    place = trained(started("first", "optimizer.name=adam", "train.max_steps=3"))
    with pytest.raises(CheckpointError, match="the optimizer's amsgrad needs averages that were not kept without it"):
        started("forked", "optimizer.name=adam", "optimizer.args={amsgrad: true}", f"checkpoint.resume={place}")


def test_the_state_of_another_optimizer_is_refused(started):
    place = trained(started("first", "optimizer.name=adamw", "train.max_steps=3"))
    with pytest.raises(CheckpointError, match="the state of the optimizer AdamW, but this run uses Adam\n"):
        started("forked", "optimizer.name=adam", f"checkpoint.resume={place}")


def test_a_new_run_has_only_its_own_evaluations(started):
    place = trained(started("first", "train.epochs=2"))
    forked = started("forked", "train.epochs=3", f"checkpoint.resume={place}")
    assert forked.state.history == []
    loop.begin(forked)
    assert list(steps(forked.checkpoints.folder)) == [8]  # so that it no longer needs the other one
    loop.train_to_end(forked)
    assert [entry["epoch"] for entry in forked.state.history] == [2, 3]  # it begins with one


def test_the_time_of_earlier_starts_counts(started):
    run = started("first", "train.max_steps=3")
    run.this_start.zero_s -= 3600
    trained(run)
    assert started("first", "train.max_steps=3").wall_s() > 3600


def test_a_moving_average_that_is_switched_on_begins_with_the_weights_of_the_checkpoint(started):
    place = trained(started("first", "train.max_steps=3", "optimizer.lr=1"))
    run = started("forked", "train.ema_decay=0.9", f"checkpoint.resume={place}")
    assert run.ema.num_updates == 0
    for average, weight in zip(run.ema.average, run.module.parameters(), strict=True):
        assert torch.equal(average, weight)


@pytest.mark.parametrize("setting", ["seed=1", "data.shard=global"])
def test_another_order_of_the_rows_is_refused_within_an_epoch(started, setting):
    place = trained(started("first", "train.max_steps=3"))
    with pytest.raises(CheckpointError, match=r"(?s)within an epoch.*-> use (seed=0|data\.shard=contiguous), or"):
        started("refused", setting, f"checkpoint.resume={place}")
    place = trained(started("whole", "train.epochs=1"))
    assert started("forked", setting, f"checkpoint.resume={place}").state.epoch == 1


def test_other_ranks_start_with_the_mean_of_the_buffers_that_all_have():
    """A model may have deleted one on some ranks."""
    meter = {"steps": 3, "rows": 2, "loss": 1.0}
    saved = [{"rng": {}, "meter": meter, "buffers": {"mean": torch.full((2,), rank), "gone": torch.ones(1)}}
             for rank in (1.0, 3.0)]  # fmt: skip
    del saved[1]["buffers"]["gone"]
    run = mock.MagicMock()
    run.ranks.num, run.ranks.own, run.runtime.rank = 1, range(1), 1
    resuming._restore_ranks(run, {"ranks": saved, "num_ranks": 2})
    (buffers,) = run.ranks.set_buffers.call_args.args
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {"mean": [2.0, 2.0]}
    run.meter.load_state.assert_called_once_with([{"steps": 3, "rows": 4, "loss": 2.0}])
