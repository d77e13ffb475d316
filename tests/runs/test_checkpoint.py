"""Checkpoints: complete or absent, refused by name when damaged, and the right ones kept."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError
from harness.runs import checkpoint, files, ownership
from harness.runs import checkpoints as module
from harness.runs.checkpoint import VERSION, damage
from harness.runs.checkpoints import Checkpoints, read
from harness.runs.storage import LocalStore
from harness.runs.weights_file import load_weights, on_host, save_weights


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    caplog.set_level(logging.INFO, "harness")
    return caplog


def content(step: int) -> dict:
    return {"model": {"weight": torch.full((4,), float(step))}, "state": {"step": step}, "opt_level": "O0"}


def made(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for step in steps:
        checkpoints.write(step, content(step))
    return checkpoints


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


# Writing and reading


def test_ranks_must_not_write_the_same_file(tmp_path, monkeypatch):
    checkpoints = made(tmp_path, 1)
    ranks = Runtime()
    monkeypatch.setattr(ranks, "gather", lambda files: [files, files])
    with pytest.raises(CheckpointError, match="several ranks wrote the same file"):
        checkpoints.write(2, content(2), ranks)
    assert names(checkpoints) == names(made(tmp_path / "other", 1))


def test_write_then_read(tmp_path):
    checkpoints = made(tmp_path, 7)
    path = checkpoints.newest()
    assert path == tmp_path / "checkpoints" / "step-7"
    assert damage(path) is None
    loaded = read(path)
    assert loaded["state"] == {"step": 7}
    assert torch.equal(loaded["model"]["weight"], torch.full((4,), 7.0))
    assert names(checkpoints) == ["latest", "step-7"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.pt"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["state.pt"]["bytes"] == (path / "state.pt").stat().st_size


def test_a_mapped_file_may_be_removed(tmp_path):
    checkpoints = made(tmp_path, 7)
    loaded = read(checkpoints.newest(), mapped=True)
    shutil.rmtree(checkpoints.folder)
    assert torch.equal(loaded["model"]["weight"], torch.full((4,), 7.0))


def test_a_format_with_a_dot_is_imported_for_an_own_run(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 3, "harness.runs.formats.whole")
    checkpoints.write(7, content(7))
    (tmp_path / "run" / "config.yaml").write_text("name: x\n")
    with pytest.raises(CheckpointError, match="whose code would be imported"):
        read(checkpoints.newest())
    ownership.remember("name: x\n")
    assert read(checkpoints.newest())["state"] == {"step": 7}


def test_writing_a_step_again_replaces_it(tmp_path):
    checkpoints = made(tmp_path, 7)
    (tmp_path / "checkpoints" / "step-7" / "state.pt").write_bytes(b"damaged")
    checkpoints.write(7, content(8))
    assert read(checkpoints.newest())["state"] == {"step": 8}


def test_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path / "none", 3).newest() is None


# Writing that fails


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file\nat ...")]
)
def test_a_failed_write_leaves_earlier_checkpoints(tmp_path, monkeypatch, error):
    checkpoints = made(tmp_path, 1, 2)

    def half_written(content, file):
        file.write(b"x" * 100)
        raise error

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.write(3, content(3))
    assert "the checkpoint of step 3 could not be written: " in str(caught.value)
    assert "it resumes from the previous checkpoint" in str(caught.value)
    assert "MiB free" in str(caught.value)
    assert "\nat" not in str(caught.value)
    assert names(checkpoints) == ["latest", "step-1", "step-2"]
    assert read(checkpoints.newest())["state"] == {"step": 2}


@pytest.mark.parametrize("earlier", [(), (1, 2)])
@pytest.mark.parametrize("failing", range(1, 8))
def test_a_disk_that_is_full_at_any_file(tmp_path, monkeypatch, failing, earlier):
    checkpoints = made(tmp_path, *earlier)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == failing:  # of state.pt, the manifest, the folders, or the pointer
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.write(3, content(3))
    assert not list(checkpoints.folder.glob("*.tmp"))
    newest = checkpoints.newest()  # raises if `latest` names one that is not there
    if earlier:
        assert "step-2" in names(checkpoints)
    assert newest is None if not earlier and failing < 5 else damage(newest) is None


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written: Not a directory(.|\n)*starts from the beginning"):
        made(tmp_path / "file", 1)


def test_an_incomplete_checkpoint_is_ignored_and_removed(tmp_path):
    checkpoints = made(tmp_path, 1)
    shutil.copytree(checkpoints.folder / "step-1", checkpoints.folder / "step-9.tmp")
    assert checkpoints.newest().name == "step-1"
    checkpoints.write(2, content(2))
    assert names(checkpoints) == ["latest", "step-1", "step-2"]


# Damage


def truncate(path: Path) -> None:
    with open(path / "state.pt", "r+b") as file:
        file.truncate(50)


def flip(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def edit(**changes):
    def change(path: Path) -> None:
        files.write_sealed(path / "manifest.json", {**files.read_sealed(path / "manifest.json"), **changes})

    return change


DAMAGES = {
    "truncated": (truncate, "state.pt is truncated: 50 of "),
    "flipped bit": (flip, "state.pt is damaged: its SHA-256"),
    "no state": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "manifest cut": (lambda path: (path / "manifest.json").write_text('{"bytes"'), "manifest.json cannot be used"),
    "manifest foreign": (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json cannot be used"),
    "manifest without": (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json cannot be used"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_is_reported_and_skipped(tmp_path, log, kind):
    do, message = DAMAGES[kind]
    checkpoints = made(tmp_path, 10, 20, 30)
    do(checkpoints.folder / "step-30")
    assert message in damage(checkpoints.folder / "step-30")
    assert checkpoints.newest().name == "step-20"
    assert f"checkpoint rejected: {checkpoints.folder / 'step-30'}: " in log.text
    assert message in log.text
    assert "step-20" not in log.text


def test_missing_checkpoint_is_reported_and_skipped(tmp_path, log):
    checkpoints = made(tmp_path, 10, 20)
    shutil.rmtree(checkpoints.folder / "step-20")
    assert checkpoints.newest().name == "step-10"
    assert f"checkpoint rejected: {checkpoints.folder / 'step-20'}: it is missing" in log.text


def test_checkpoint_of_another_version_is_not_passed_over(tmp_path):
    """An older one would lose steps that are intact."""
    checkpoints = made(tmp_path, 10, 20, 30, 40)
    flip(checkpoints.folder / "step-40")
    edit(version=99)(checkpoints.folder / "step-30")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.newest()
    text, newer = str(caught.value), checkpoints.folder / "step-30"
    assert text.startswith(
        f"{newer}: its version is 99, but this version of the harness reads {VERSION}: use the version that wrote it"
    )
    assert "continue from the older step-20" in text
    assert f"remove step-30, or start a new run with name=NAME checkpoint.resume={newer.with_name('step-20')}" in text
    shutil.rmtree(newer)
    assert checkpoints.newest().name == "step-20"


def test_all_are_damaged(tmp_path, log):
    checkpoints = made(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(checkpoints.folder / f"step-{step}")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.newest()
    first, *lines, hint = str(caught.value).splitlines()
    assert first == f"{checkpoints.folder}: no checkpoint of this run can be used"
    assert [line.partition(": state.pt is truncated")[0] for line in lines] == ["  step-2", "  step-1"]
    assert "restore one of them; or start from scratch with checkpoint.resume=never" in hint
    assert log.text.count("checkpoint rejected") == 2
    for step in (1, 2):
        shutil.rmtree(checkpoints.folder / f"step-{step}")
    with pytest.raises(CheckpointError, match="  step-2: it is missing"):
        checkpoints.newest()
    (checkpoints.folder / "latest").unlink()
    assert checkpoints.newest() is None, "it has none"


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path, monkeypatch):
    checkpoints, whole = made(tmp_path, 1, 2), checkpoint.sha256

    def failing(file):
        if "step-2" in str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return whole(file)

    monkeypatch.setattr(checkpoint, "sha256", failing)
    assert damage(checkpoints.folder / "step-2") == "state.pt: Input/output error"
    assert checkpoints.newest().name == "step-1"


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    path = made(tmp_path, 1).newest()
    manifest = path / "manifest.json"
    intact = manifest.read_bytes()
    for place in range(8 * len(intact)):
        flipped = bytearray(intact)
        flipped[place // 8] ^= 1 << place % 8
        manifest.write_bytes(flipped)
        assert damage(path), place
    manifest.write_bytes(intact)
    assert damage(path) is None
    manifest.write_text(json.dumps(files.read_sealed(manifest)))
    assert "it has no seal" in damage(path)


def test_damage_of_something_else(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")
    assert damage(tmp_path / "model.pt")
    assert damage(tmp_path / "nothing")


# Other and hostile files


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
def test_a_file_that_would_execute_code_is_refused(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    path = made(tmp_path, 1).newest()
    write({"model": Code()}, path / "state.pt")
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: the checkpoint is rejected: ")
    assert "checkpoint.resume" in str(caught.value)
    assert "weights_only" not in str(caught.value), "torch advises to load the file without the check"
    assert "can still be loaded" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("value", "manifest"), [({"weight": torch.ones(1)}, False), (torch.ones(1), True), ([], True)])
def test_foreign_files(tmp_path, value, manifest):
    torch.save(value, tmp_path / "state.pt")
    if manifest:
        files.write_sealed(tmp_path / "manifest.json", {"version": 5, "format": "whole", "files": {}})
    with pytest.raises(CheckpointError, match="not a checkpoint of this harness"):
        read(tmp_path)


@pytest.mark.parametrize("data", [b"", b"text", None])
def test_empty_and_missing_files(tmp_path, data):
    state = made(tmp_path, 1).newest() / "state.pt"
    state.unlink()
    if data is not None:
        state.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read|the checkpoint is rejected") as caught:
        read(state.parent)
    assert "weights_only" not in str(caught.value)


# Which are kept


def test_the_best_is_kept_too(tmp_path):
    checkpoints = made(tmp_path, 1, keep=2)
    weights = {"weight": torch.ones(2), "tied": torch.ones(2)}
    weights["tied"] = weights["weight"]
    checkpoints.mark_best(1, on_host(weights), tmp_path / "weights.safetensors")
    for step in (2, 3, 4):
        checkpoints.write(step, content(step))
    assert names(checkpoints) == ["best", "latest", "step-1", "step-3", "step-4"]
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["tied"], torch.ones(2))
    checkpoints.mark_best(4, on_host(weights), tmp_path / "weights.safetensors")
    assert names(checkpoints) == ["best", "latest", "step-3", "step-4"]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("pointer", ["best", "latest"])
def test_nothing_is_removed_while_a_pointer_cannot_be_read(tmp_path, monkeypatch, log, pointer):
    checkpoints = made(tmp_path, 10, keep=1)
    checkpoints.mark_best(10, {"w": torch.ones(1)}, tmp_path / "weights.safetensors")
    real = module.read_text

    def stale(path):
        if path.name == pointer:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_text", stale)
        for step in (20, 30):
            checkpoints.write(step, content(step))
        assert {"step-10", "step-20", "step-30"} <= set(names(checkpoints))
        with pytest.raises(CheckpointError, match="cannot be read"), checkpoints.pinned():
            pass
        if pointer == "latest":  # a higher number may belong to an abandoned step
            with pytest.raises(CheckpointError, match="cannot be read"):
                checkpoints.newest()
    checkpoints.sweep()
    assert names(checkpoints) == ["best", "latest", "step-10", "step-30"]


def test_the_best_weights_and_checkpoints_on_another_disk(tmp_path, monkeypatch):
    checkpoints, real = made(tmp_path, 10), os.replace

    def replace(source, target):  # a file system of its own, behind a link
        if checkpoints.folder in Path(source).parents and checkpoints.folder not in Path(target).parents:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    checkpoints.mark_best(10, {"w": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert load_weights(tmp_path / "weights.safetensors").keys() == {"w"}


def test_best_weights_that_cannot_be_written(tmp_path):
    checkpoints = made(tmp_path, 1)
    checkpoints.mark_best(1, {"w": torch.ones(1)}, tmp_path / "w.safetensors")
    before = (tmp_path / "w.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="best weights could not be written"):
        checkpoints.mark_best(1, {"w": torch.ones(1)}, tmp_path / "none" / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_a_limit_on_file_sizes_is_named(tmp_path):
    checkpoints, before = made(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"w": torch.ones(1 << 16)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large.*\n.*ulimit -f"):
            checkpoints.write(2, large)
        with pytest.raises(CheckpointError, match="could not be written: File too large\n.*ulimit -f"):
            checkpoints.mark_best(1, large, tmp_path / "w.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(checkpoints) == ["latest", "step-1"]
    assert not list(tmp_path.glob("w*"))


def test_abandoned_steps_do_not_count_as_the_newest(tmp_path, log):
    checkpoints = made(tmp_path, 10, 20, 30)
    for step in (20, 30):
        flip(checkpoints.folder / f"step-{step}")
    assert checkpoints.newest().name == "step-10"
    checkpoints.write(15, content(15))
    assert checkpoints.newest().name == "step-15"
    assert names(checkpoints) == ["latest", "step-10", "step-15"]  # 10 is what is left if 15 is damaged


def test_latest_comes_first(tmp_path):
    checkpoints = made(tmp_path, 10, 20)
    (checkpoints.folder / "latest").write_text("step-10\n")
    assert checkpoints.newest().name == "step-10"


@pytest.mark.parametrize("text", ["", "step-99\n", "nonsense", "step-x"])
def test_latest_that_names_no_checkpoint(tmp_path, text):
    checkpoints = made(tmp_path, 10, 20, keep=1)
    (checkpoints.folder / "latest").write_text(text)
    assert checkpoints.newest().name == "step-20"
    checkpoints.sweep()
    assert checkpoints.newest().name == "step-20"


def test_no_file_of_safetensors_is_uploaded_or_left(tmp_path, monkeypatch):
    """save_file writes to a file of a random name first, which a kill leaves behind."""

    class Killed(BaseException):
        pass

    def killed(tensors, path, metadata):
        (Path(path).parent / ".tmpaBc123").write_bytes(b"half")
        seen.update(LocalStore(tmp_path).files())
        raise Killed

    seen: dict[str, str] = {}
    checkpoints = made(tmp_path, 1)
    weights = {"w": torch.ones(1)}
    with monkeypatch.context() as patch:
        patch.setattr("harness.runs.weights_file.save_file", killed)
        with pytest.raises(Killed):
            checkpoints.mark_best(1, weights, tmp_path / "weights.safetensors")
    assert set(seen) == {f"checkpoints/{name}" for name in ("latest", "step-1/state.pt", "step-1/manifest.json")}
    checkpoints.mark_best(1, weights, tmp_path / "weights.safetensors")
    assert names(checkpoints) == ["best", "latest", "step-1"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "weights.safetensors"}


def test_every_flipped_bit_of_the_weights_is_noticed(tmp_path):
    """In the header (a name, a shape, the metadata) and in the values; what is read is otherwise what was written."""
    path = tmp_path / "weights.safetensors"
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.ones(2, dtype=torch.bfloat16)}
    save_weights(weights, path, {"step": "8"}, tmp_path / "work")
    intact, whole = path.read_bytes(), load_weights(path)
    assert all(torch.equal(whole[name], value) for name, value in weights.items())
    for place in range(len(intact)):
        flipped = bytearray(intact)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with suppress(CheckpointError):
            found = load_weights(path)
            assert all(torch.equal(found[name], value) for name, value in weights.items()), place  # only white space


def test_weights_without_a_digest_are_refused_unless_they_are_foreign(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="no digest"):
        load_weights(tmp_path / "w.safetensors")
    assert load_weights(tmp_path / "w.safetensors", of_run=False).keys() == {"w"}


def test_the_same_weights_give_the_same_bytes(tmp_path):
    """safetensors writes several keys of metadata in an order of its own, which differs from file to file."""
    for number in range(8):
        metadata = {"step": "3", "model": "linear", "args": "{}"}
        save_weights({"w": torch.ones(2)}, tmp_path / f"{number}", metadata, tmp_path / "work")
    assert len({(tmp_path / f"{number}").read_bytes() for number in range(8)}) == 1
