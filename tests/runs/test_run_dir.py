"""The run folder: who owns it, when an earlier run is moved aside, its small files, and the first failure."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from harness.config import loader, seals
from harness.errors import CheckpointError, ConfigError
from harness.runs import run_dir
from harness.runs.files import identity, read_sealed
from harness.runs.run_dir import RunFolder
from tests.fixtures import make_config


def claim(tmp_path: Path, **sections) -> str:
    return RunFolder(tmp_path / "runs" / "small").claim(make_config(tmp_path, **sections))


def runs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "runs").iterdir())


# Claiming a folder


def test_a_new_run(tmp_path):
    assert claim(tmp_path) == ""
    run = tmp_path / "runs" / "small"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "logs"]
    assert loader.load(run / "config.yaml") == make_config(tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, in which even root creates no file")
def test_a_place_without_files_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.Lock, "acquire", lambda *_: pytest.fail("waits for a lock"))
    folder = RunFolder(Path("/proc/run"))
    for start in (folder.lock, lambda: folder.claim(make_config(tmp_path))):
        with pytest.raises(ConfigError, match="cannot write to the run folder"):
            start()


def test_the_same_recipe_resumes(tmp_path):
    claim(tmp_path)
    run = tmp_path / "runs" / "small"
    (run / "metrics.jsonl").write_text("x")
    (run / "failure.json").write_text("{}")
    folder = RunFolder(run)
    longer = {"train": {"epochs": 20, "max_steps": 50}, "data": {"num_workers": 1}}
    was = make_config(tmp_path).train.epochs
    folder.checkpoints.write(8, {"state": {}})
    assert folder.claim(make_config(tmp_path, **longer)) == (
        f"train.epochs {was} -> 20, train.max_steps null -> 50 since the last start; the schedule now spans 20 epochs, "
        "at most 50 steps"
    )
    assert (run / "metrics.jsonl").exists()
    assert not (run / "failure.json").exists()  # it was about the earlier start
    assert loader.load(run / "config.yaml") == make_config(tmp_path)  # until it is known that something is trained
    folder.write_config()
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 20
    assert RunFolder(run).claim(make_config(tmp_path, **longer)) == ""
    assert runs(tmp_path) == ["small"]


def test_another_recipe_moves_the_folder_aside(tmp_path):
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "metrics.jsonl").write_text("first")
    note = claim(tmp_path, seed=3, optimizer={"lr": 0.2})
    why = "its recipe differs (optimizer.lr 0.1 -> 0.2, seed 0 -> 3)"
    assert note == f"the earlier run was moved to {tmp_path}/runs/small.1: {why}"
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()
    precision = {"opt_level": "O2", "loss_scale": 8.0, "max_loss_scale": 16.0, "keep_batchnorm_fp32": True}
    (tmp_path / "runs" / "small" / "metrics.jsonl").write_text("second")
    assert claim(tmp_path, seed=4, precision=precision, optimizer={"lr": 0.2}).endswith(" and 1 more)")
    again = {"seed": 4, "precision": precision, "optimizer": {"lr": 0.2}, "checkpoint": {"resume": "never"}}
    assert claim(tmp_path, **again).endswith("small.3: checkpoint.resume=never")
    assert runs(tmp_path) == ["small", "small.1", "small.2", "small.3"]
    assert (tmp_path / "runs" / "small.1" / "metrics.jsonl").read_text() == "first"


def test_a_start_that_failed_before_its_first_step_leaves_no_folder(tmp_path):
    claim(tmp_path, seed=3)
    (tmp_path / "runs" / "small" / "metrics.jsonl").touch()  # opened, and nothing logged
    (tmp_path / "runs" / "small" / "failure.json").write_text("{}")
    assert claim(tmp_path) == ""
    assert runs(tmp_path) == ["small"]
    assert yaml.safe_load((tmp_path / "runs" / "small" / "config.yaml").read_text())["seed"] == 0
    assert not (tmp_path / "runs" / "small" / "failure.json").exists()


@pytest.mark.parametrize("resume", ["auto", "never", "memory://bucket/run/checkpoints/step-3"])
def test_a_command_may_be_given_inside_the_run_folder(tmp_path, monkeypatch, resume):
    """There, a word that is no path would name a file of the run."""
    claim(tmp_path)
    monkeypatch.chdir(tmp_path / "runs" / "small")
    with pytest.raises(ConfigError, match="is a checkpoint of this run itself"):
        claim(tmp_path, checkpoint={"resume": "checkpoints/step-3"})
    claim(tmp_path, checkpoint={"resume": resume})


def test_a_configuration_of_an_earlier_version_resumes_with_defaults(tmp_path):
    claim(tmp_path)
    saved = tmp_path / "runs" / "small" / "config.yaml"
    tree = yaml.safe_load(saved.read_text())
    (saved.parent / "metrics.jsonl").write_text("trained")
    del tree["train"]["ema_decay"], tree["parallel"]
    saved.write_text(yaml.safe_dump(tree))
    assert claim(tmp_path) == ""
    del tree["seed"]
    saved.write_text(yaml.safe_dump(tree))
    assert "seed 0 -> 5" in claim(tmp_path, seed=5)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [1", b"- 1\n", b""])
def test_a_run_with_a_damaged_configuration_is_not_started_from_scratch(tmp_path, content):
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.yaml: the configuration .* is damaged(.|\n)*resume=never"):
        claim(tmp_path)
    assert runs(tmp_path) == ["small"]
    assert claim(tmp_path, checkpoint={"resume": "never"}).endswith("small.1: checkpoint.resume=never")


def test_results_without_checkpoints_are_moved_aside(tmp_path):
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "weights.safetensors").write_text("trained for a week")
    note = claim(tmp_path, train={"epochs": 20})
    assert note.endswith("small.1: it has results, but no checkpoint to resume from")
    assert (tmp_path / "runs" / "small.1" / "weights.safetensors").read_text() == "trained for a week"
    assert claim(tmp_path) == ""


def test_a_run_without_a_task_of_ours_is_moved_aside(tmp_path):
    """Its ``task`` may be of any kind of YAML."""
    claim(tmp_path)
    saved = tmp_path / "runs" / "small" / "config.yaml"
    (saved.parent / "metrics.jsonl").write_text("trained")
    saved.write_text(yaml.safe_dump({**yaml.safe_load(saved.read_text()), "task": "none"}))
    assert "small.1: its recipe differs" in claim(tmp_path)


@pytest.mark.parametrize("gone", ["checkpoints", "logs"])
def test_a_run_is_one_without_its_checkpoints_or_logs(tmp_path, gone):
    """Somebody has deleted them to save space."""
    claim(tmp_path)
    run = tmp_path / "runs" / "small"
    (run / "metrics.jsonl").write_text("trained for a week")
    (run / gone).rmdir()
    assert claim(tmp_path, seed=1).endswith("small.1: its recipe differs (seed 0 -> 1)")
    assert (tmp_path / "runs" / "small.1" / "metrics.jsonl").read_text() == "trained for a week"


def test_results_of_an_unknown_recipe_are_not_continued(tmp_path):
    claim(tmp_path)
    run = tmp_path / "runs" / "small"
    (run / "config.yaml").unlink()
    assert claim(tmp_path) == "", "a run killed in its first moments"
    (run / "config.yaml").unlink()
    (run / "metrics.jsonl").write_text("first")
    with pytest.raises(ConfigError, match=r"results in this folder \(metrics.jsonl\) is unknown(.|\n)*resume=never"):
        claim(tmp_path)
    assert [path.read_text() for path in run.glob("*.*")] == ["first"]
    assert claim(tmp_path, checkpoint={"resume": "never"}).endswith("small.1: checkpoint.resume=never")
    assert (tmp_path / "runs" / "small.1" / "metrics.jsonl").read_text() == "first"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "weights.safetensors", "sweep.json"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_folder_of_another_program_is_left_alone(tmp_path, name, resume):
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / name).write_text("mine")
    with pytest.raises(
        ConfigError, match=f"not a run folder, but it contains files that a run would overwrite: {name}"
    ):
        claim(tmp_path, checkpoint={"resume": resume})
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, "notes.txt"])
    assert runs(tmp_path) == ["small"]
    (folder / name).unlink()
    assert claim(tmp_path) == "", "files of other names are no obstacle"


def test_folders_that_cannot_be_written_or_moved(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(
        ConfigError, match="cannot write to the run folder: Not a directory\n  -> a part of this path is a file"
    ):
        claim(tmp_path)
    (tmp_path / "runs").unlink()
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "metrics.jsonl").write_text("trained")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ConfigError, match="cannot be moved aside: Permission denied"):
        claim(tmp_path, seed=9)
    assert runs(tmp_path) == ["small"]


# Small files


def test_summary_has_null_for_numbers_that_are_not_finite(tmp_path):
    run = RunFolder(tmp_path)
    run.summary({"best": {"loss": math.nan}, "history": [{"loss": math.inf}, {"loss": 1.0}], "n": (1, "x", None, True)})
    content = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert seals.unsealed(content) == {
        "best": {"loss": None},
        "history": [{"loss": None}, {"loss": 1.0}],
        "n": [1, "x", None, True],
    }


def _write_for_ever(folder):
    run = RunFolder(folder)
    for number in itertools.count():
        run.summary({"step": number})
        run.learned({"classes": [number]})


def test_a_kill_between_two_writes_leaves_readable_files(tmp_path):
    for _ in range(10):
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(tmp_path,))
        writer.start()
        before, limit = identity(tmp_path / "task.json"), time.monotonic() + 30
        while identity(tmp_path / "task.json") == before and time.monotonic() < limit:
            pass
        writer.kill()
        writer.join(30)
        assert writer.exitcode == -signal.SIGKILL
        assert read_sealed(tmp_path / "task.json").keys() == {"classes"}
        assert read_sealed(tmp_path / "summary.json").keys() == {"step"}


def test_confusion_is_a_table(tmp_path):
    run = RunFolder(tmp_path)
    run.confusion({"loss": 0.5})
    assert not (tmp_path / "confusion.csv").exists()
    run.confusion({"confusion": [[3, 1], [0, 2]], "class_accuracy": {"a": 0.75, "b,c": 1.0}})
    assert (tmp_path / "confusion.csv").read_text() == 'label,a,"b,c"\na,3,1\n"b,c",0,2\n'


def test_provenance_grows_with_every_start(tmp_path):
    run, start = RunFolder(tmp_path), {"threads": 1, "cuda": None}
    for _ in range(2):
        assert run.add_start(start) == []
    assert json.loads((tmp_path / "provenance.json").read_text()) == [start] * 2
    for damaged in ("[{", "5", '{"a": 1}', '[3, "x", null]'):  # not worth a failure
        (tmp_path / "provenance.json").write_text(damaged)
        run.add_start(start)
        assert json.loads((tmp_path / "provenance.json").read_text()) == [start]


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_folder_that_is_gone_is_not_made_again(tmp_path, how):
    folder = RunFolder(tmp_path / "runs" / "small")
    folder.claim(make_config(tmp_path))
    folder.checkpoints.write(1, {"state": {"step": 1}})
    if how == "renamed":
        folder.path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder.path)
    for write in (
        lambda: folder.checkpoints.write(2, {"state": {"step": 2}}),
        lambda: folder.checkpoints.mark_best(1, {}, folder.weights),
    ):
        with pytest.raises(CheckpointError, match="small: the run folder was removed or renamed during the run"):
            write()
    assert not folder.path.exists()
