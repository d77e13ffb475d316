"""Checkpoints that are written behind the training, and shards from every rank."""

from __future__ import annotations

import io
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError
from harness.runs import checkpoint
from harness.runs.checkpoint import damage
from harness.runs.checkpoints import Checkpoints, read
from harness.runs.formats import sharded, whole
from harness.training.checkpoints import checkpoint_writer
from harness.training.checkpoints.checkpoint_writer import CheckpointWriter, copied
from tests.ranks import run_ranks


def writer(folder: Path, **options) -> CheckpointWriter:
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    return CheckpointWriter(Runtime(), checkpoints, publish=lambda: None, **options)


# Behind the training


def test_what_is_written_is_what_was_copied(tmp_path, monkeypatch):
    """Training changes the tensors while the thread waits; the second checkpoint waits for the first."""
    behind = writer(tmp_path, behind=True)
    go, original = threading.Event(), Checkpoints.write

    def late(checkpoints, *args):
        assert go.wait(20)
        original(checkpoints, *args)

    monkeypatch.setattr(Checkpoints, "write", late)
    weight = torch.ones(1000, 10).t()
    content = {"model": {"w": weight}, "state": {"step": 1}, "ranks": [{"rng": [torch.arange(3)]}]}
    behind.write(1, content)
    weight.fill_(2.0)
    assert not behind.checkpoints.exist()
    go.set()
    behind.write(2, {**content, "state": {"step": 2}})
    weight.fill_(3.0)
    assert behind.checkpoints.newest().name in ("step-1", "step-2")
    behind.wait()
    for step in (1, 2):
        found = read(behind.checkpoints.folder / f"step-{step}")
        assert torch.equal(found["model"]["w"], torch.full((10, 1000), float(step)))
        assert found["state"] == {"step": step}
        assert torch.equal(found["ranks"][0]["rng"][0], torch.arange(3))
    behind.wait()
    behind.close()


def test_only_a_written_checkpoint_counts_as_complete(tmp_path, monkeypatch):
    behind, go, original = writer(tmp_path, behind=True), threading.Event(), Checkpoints.write
    behind.write(1, {"state": {}})
    behind.wait()
    monkeypatch.setattr(Checkpoints, "write", lambda *args: go.wait(20) and original(*args))
    behind.write(2, {"state": {}})
    monkeypatch.setattr(checkpoint_writer, "_CLOSE_S", 0.1)
    behind.close()  # when a run fails
    assert (behind.complete, behind.checkpoints.named("latest")) == (1, "step-1")
    go.set()
    monkeypatch.setattr(checkpoint_writer, "_CLOSE_S", 20.0)
    behind.close()
    assert (behind.complete, behind.checkpoints.named("latest")) == (2, "step-2")


def test_a_copy_uses_the_memory_of_the_one_before():
    first = copied({"a": torch.ones(3), "b": [torch.ones(2), 1]}, None)
    second = copied({"a": torch.zeros(3), "b": [torch.ones(4), 1], "c": torch.ones(1)}, first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["b"][0].shape == (4,)
    assert torch.equal(second["c"], torch.ones(1))


def test_a_failed_write_fails_the_next_call(tmp_path, monkeypatch):
    behind = writer(tmp_path, behind=True)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    behind.write(1, {"state": {}})
    with pytest.raises(CheckpointError, match="checkpoint of step 1 could not be written: No space left"):
        behind.write(2, {"state": {}})
    behind.write(3, {"state": {}})
    behind.close()  # of a run that fails anyway
    with pytest.raises(CheckpointError, match="step 3"):
        behind.wait()
    assert list(behind.checkpoints.folder.iterdir()) == []


# Shards


def _rank(folder: str, behind: bool) -> CheckpointWriter:
    launch = Launch(dist.get_rank(), dist.get_rank(), 2, 2)
    runtime = Runtime(launch, timeout_s=20)
    return CheckpointWriter(runtime, Checkpoints(Path(folder), 2, "sharded"), behind=behind, publish=lambda: None)


def _content() -> dict:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    return {"model": {"a.b": weight, "plain": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": weight * 2}}}}


def _written(folder, behind):
    writer, content = _rank(folder, behind), _content()
    for step in (1, 2, 3):
        content["model"]["a.b"].to_local().fill_(step)
        writer.write(step, content)
    writer.wait()
    return [path.name for path in sorted(Path(folder).iterdir())]


@pytest.mark.parametrize("behind", [False, True])
def test_shards_are_read_as_whole_tensors(tmp_path, behind):
    assert run_ranks(2, _written, str(tmp_path), behind)[0] == ["latest", "step-2", "step-3"]
    found = read(tmp_path / "step-3")
    assert torch.equal(found["model"]["a.b"], torch.full((5, 3), 3.0))
    assert type(found["model"]["a.b"]) is torch.Tensor
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], torch.arange(15.0).view(5, 3) * 2)
    for name in ("__1_0.distcp", ".metadata"):
        path = tmp_path / "step-3" / name
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert damage(tmp_path / "step-3").startswith(f"{name} is truncated: ")
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert damage(tmp_path / "step-3").startswith(f"{name} is damaged: ")
        path.unlink()
        assert damage(tmp_path / "step-3") == f"{name} is missing"
        path.write_bytes(data)
    assert Checkpoints(tmp_path, 2).newest().name == "step-3"


def _one_fails(folder, behind):
    from torch.distributed.checkpoint import FileSystemWriter

    writer, content = _rank(folder, behind), _content()
    writer.write(1, content)
    writer.wait()
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError) as caught:  # noqa: PT012  either call raises
        writer.write(2, content)
        writer.wait()
    return str(caught.value), damage(Path(folder) / "step-1"), Checkpoints(Path(folder), 2).named("latest")


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_cannot_write_fails_all(tmp_path, behind):
    for message, problem, latest in run_ranks(2, _one_fails, str(tmp_path), behind):
        assert "rank 1 could not write its shards: " in message
        assert "No space left" in message
        assert (problem, latest) == (None, "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def _one_cannot_read_again(folder, behind):
    writer, content = _rank(folder, behind), _content()
    if dist.get_rank() == 1:
        checkpoint.sha256 = lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:  # noqa: PT012  either call raises
        writer.write(1, content)
        writer.wait()
    return str(caught.value), caught.value.origin_rank, time.monotonic() - began < 15


@pytest.mark.parametrize("behind", [False, True])
def test_an_error_after_the_shards_are_written_is_that_of_all_ranks(tmp_path, behind):
    for rank, found in enumerate(run_ranks(2, _one_cannot_read_again, str(tmp_path), behind)):
        assert "the checkpoint of step 1 could not be written: Input/output error" in found[0]
        assert found[1:] == (None if rank == 1 else 1, True)
    assert list(tmp_path.iterdir()) == []


def _first_cannot_write_the_rest(folder):
    writer, content = _rank(folder, False), _content()
    if dist.get_rank() == 0:
        whole.Format.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        writer.write(1, content)
    return str(caught.value), time.monotonic() - began < 15


def test_an_error_of_the_first_rank_beside_the_shards_is_that_of_all(tmp_path):
    for message, soon in run_ranks(2, _first_cannot_write_the_rest, str(tmp_path)):
        assert "the checkpoint of step 1 could not be written: No space left" in message
        assert soon
    assert list(tmp_path.iterdir()) == []


def _devices(folder, behind):
    """The current device of each thread that synchronizes one or writes shards, on a rank whose device is 1 + rank."""
    current, used = threading.local(), []

    def device():
        return getattr(current, "number", 0)

    def recorded(original):
        def work(*args, **options):
            used.append((threading.current_thread() is threading.main_thread(), device()))
            return original(*args, **options)

        return work

    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = device
    torch.cuda.set_device = lambda number: setattr(current, "number", number)
    torch.cuda.set_device(1 + dist.get_rank())
    sharded._save = recorded(sharded._save)
    checkpoint_writer._synchronize = recorded(checkpoint_writer._synchronize)
    writer, content = _rank(folder, behind), _content()
    writer.runtime.device = torch.device("cuda", 1 + dist.get_rank())
    writer.write(1, content)
    writer.wait()
    return used


@pytest.mark.parametrize("behind", [False, True])
def test_every_thread_works_on_the_device_of_its_rank(tmp_path, behind):
    """Otherwise it would synchronize the stream of cuda:0, and write what its own device is still copying."""
    for rank, used in enumerate(run_ranks(2, _devices, str(tmp_path), behind)):
        assert used == [(True, 1 + rank), (False, 1 + rank)]  # the copy, then the writing


def _one_has_another_folder(folder):
    other = Path(folder) / f"machine-{dist.get_rank()}"
    writer = _rank(str(other), False)
    (other / "step-1.tmp").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        writer.write(1, _content())
    return str(caught.value)


def test_machines_without_a_shared_folder(tmp_path):
    for message in run_ranks(2, _one_has_another_folder, str(tmp_path)):
        assert "rank 0 cannot find __1_0.distcp, which another rank has written" in message
        assert "checkpoint.format=whole" in message


def _own_shards(folder):
    like = _content()["model"]["a.b"]
    found = read(Path(folder) / "step-3", own=lambda key, size: like if key == "model/a.b" else None)
    part = found["model"]["a.b"]
    return type(part) is DTensor, part.to_local().tolist(), type(found["optimizer"]["state"][0]["exp_avg"]).__name__


def test_shards_in_a_tuple_are_read(tmp_path):
    """As the state of an optimizer of the user's own may have them."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=True), no_dist=True)
    found = sharded._filled(tmp_path, {"state": (1, {sharded._MARK: "x"})}, lambda key, size: None)
    assert found["state"][0] == 1
    assert torch.equal(found["state"][1], torch.ones(3))


def test_a_rank_reads_its_shards_only(tmp_path):
    run_ranks(2, _written, str(tmp_path), False)
    assert run_ranks(2, _own_shards, str(tmp_path)) == [
        (True, [[3.0] * 3] * 3, "Tensor"),
        (True, [[3.0] * 3] * 2, "Tensor"),
    ]


class Code:
    def __reduce__(self):
        return exec, ("open('executed', 'w')",)


def test_metadata_that_would_execute_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(2, _written, str(tmp_path), False)
    (tmp_path / "step-3" / ".metadata").write_bytes(pickle.dumps(Code()))
    with pytest.raises(CheckpointError, match=r"is rejected: .* refers to builtins\.exec"):
        read(tmp_path / "step-3")
    assert not (tmp_path / "executed").exists()


class Got:
    """An object that is pickled as ``getattr(*arguments)``, as Python 3.11.2 does with a member of an enumeration."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_a_member_of_an_enumeration_is_the_only_attribute_that_metadata_may_ask_for():
    encoding = metadata._MEM_FORMAT_ENCODING
    asked = pickle.dumps(Got(encoding, "TORCH_PRESERVE_FORMAT"))
    assert sharded._Unpickler(io.BytesIO(asked)).load() is encoding.TORCH_PRESERVE_FORMAT
    for arguments in ((encoding, "__class__"), (torch.Size, "__init__"), ([], "append")):
        with pytest.raises(pickle.UnpicklingError, match="asks for"):
            sharded._Unpickler(io.BytesIO(pickle.dumps(Got(*arguments)))).load()
