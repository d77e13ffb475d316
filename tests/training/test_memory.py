"""The error for a rank that runs out of memory, and memory that a rank keeps for its next step."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn

from harness.apex.on_cpu import half_kernels
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.training import build, loop
from harness.training.exit_report import explained
from harness.training.measuring import memory
from tests.fixtures import make_config, write_rows

CPU = torch.device("cpu")
OOM = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 78.03 GiB memory in use."
)


def run_out_of_memory(built, folder, overrides, world=1, at="training", measured=None):
    """The message of a run of a linear model (3 x 192 + 3 float32 weights, Adam) whose device runs out of memory."""
    write_rows(folder, "train", 16)
    write_rows(folder, "eval", 6)
    config = make_config(folder, ["batch.global=8", *overrides], optimizer={"name": "adam"}, model={"name": "linear"})
    run = built(config)
    (group, *_) = run.train_data.groups(0, [])
    run.module.train()
    loop.step(run, group)
    run.module.train(at == "training")
    run.runtime = Runtime(Launch(world_size=world), device=torch.device("cuda", 0) if measured else CPU)
    return explained(OOM, run)


def test_out_of_memory_names_the_largest_parts_and_settings(tmp_path, monkeypatch, built):
    monkeypatch.setattr(build.determinism, "require", lambda level: None)  # it changes settings of the whole process
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 78 * 2**30)
    error = run_out_of_memory(
        built, tmp_path / "a", ["precision.opt_level=O0", "train.ema_decay=0.9"], world=4, measured=True
    )
    assert error.exit_code == 70
    assert error.message.startswith(
        "out of memory on cuda:0 during training: tried to allocate 2.00 GiB; 1.06 GiB of 79.10 GiB is free. "
        "Largest: activations and temporary tensors, for 2 rows at a time, 78.0 GiB; optimizer state 1.5 KiB; "
    )
    for part in ("parameters", "gradients", "moving average"):
        assert f"; {part} 0.8 KiB" in error.message
    assert error.hint == (
        "use one of: batch.accumulate=2 (1 row at a time; the same batch size); precision.opt_level=O4 (activations "
        "in bfloat16, half the size); parallel.strategy=fsdp (weights, gradients and optimizer state shared by 4 ranks)"
    )
    error = run_out_of_memory(built, tmp_path / "b", ["batch.accumulate=2", "batch.eval_per_rank=6"], at="evaluation")
    assert "on cpu during evaluation" in error.message
    assert "for 6 rows at a time (not measured on a CPU)" in error.message
    assert "batch.eval_per_rank=3" in error.hint
    assert error.hint.count(";") == 2
    error = run_out_of_memory(built, tmp_path / "c", ["batch.accumulate=2"])
    assert "batch.accumulate=4 (2 rows at a time; the same batch size); batch.global=4 (a smaller batch" in error.hint


@pytest.mark.parametrize(
    ("settings", "world", "never"),
    [
        ({"batch": {"global": 1}}, 1, "--nproc"),  # two ranks cannot share one row
        ({"batch": {"global": None, "per_rank": 1}}, 1, "--nproc"),  # each would have as many
        ({"batch": {"global": 2}, "parallel": {"strategy": "dp"}}, 1, "--nproc"),
        ({"batch": {"global": 2}, "precision": {"opt_level": "O2"}}, 2, "fsdp"),
        ({"batch": {"global": 2}, "model": {"channels_last": True}}, 2, "fsdp"),
    ],
)
def test_only_settings_that_are_accepted_are_suggested(tmp_path, settings, world, never):
    config = make_config(tmp_path, **settings)
    assert never not in memory.remedies(config, world, "training", False, CPU)


def test_half_a_batch_has_whole_micro_batches(tmp_path):
    config = make_config(tmp_path, batch={"global": 6, "accumulate": 2})
    assert "; batch.global=2 (a smaller batch" in memory.remedies(config, 1, "training", False, CPU)


@pytest.mark.parametrize("slow", [True, False])
def test_bfloat16_is_suggested_only_where_the_cpu_computes_it(tmp_path, monkeypatch, slow):
    monkeypatch.setattr(half_kernels, "slow_dtypes", lambda: {torch.bfloat16} if slow else set())
    config = make_config(tmp_path, batch={"global": 8}, precision={"opt_level": "O0"})
    assert ("O4" in memory.remedies(config, 1, "training", False, CPU)) == (not slow)


def test_sizes_have_a_unit_that_shows_them():
    assert [memory.shown(size) for size in (512, 3 << 20, 5 << 30)] == ["0.5 KiB", "3.0 MiB", "5.0 GiB"]


def test_other_errors_of_memory():
    """Those of CUDA's libraries and of the CPU; before the run is built, only what is known then."""
    for text in (
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 400000000000 bytes. Error code 12",
    ):
        assert "out of memory while the run was being built" in str(explained(RuntimeError(text)))
    assert "tried to allocate 400000000000 bytes" in str(explained(RuntimeError(text)))
    assert "model.args" in explained(OOM).hint
    assert isinstance(explained(ValueError("out of memory")), ValueError)


FAULTS = """
import resource, torch
from harness.training.measuring import memory
memory.keep_freed_memory(torch.device("cpu"))
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(30 << 20) for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults of glibc's malloc")
def test_a_step_reuses_the_memory_of_the_one_before(tmp_path, monkeypatch, built):
    """Six blocks of 30 MiB are more than glibc keeps by itself, in any state of the heap."""
    environ = os.environ | {"MALLOC_TRIM_THRESHOLD_": "1000000"}  # takes precedence
    found = subprocess.run([sys.executable, "-c", FAULTS], env=environ, capture_output=True, check=True).stdout
    assert int(found) > 10_000

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensors = [torch.zeros(30 << 18) for _ in range(6)]
        del tensors
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    monkeypatch.setattr(build.determinism, "require", lambda level: None)  # it changes settings of the whole process
    run_out_of_memory(built, tmp_path, ["precision.opt_level=O0"])  # builds a run
    assert min(step() for _ in range(30)) < 1000  # the heap takes up to six steps to settle


@pytest.mark.parametrize("make", [
    lambda: torchvision.models.resnet18(num_classes=3),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)),
])  # fmt: skip
def test_activations_follow_from_the_shapes(make):
    """Without computing anything, equal to those of a real pass; and the model's buffers stay as they were."""
    model, rows = make(), torch.randn(6, 3, 64, 64)
    model(rows)
    kept = memory.KeptForBackward(6, [*model.parameters(), *model.buffers()])
    with kept:
        loss = model(rows).sum()
    buffers = [buffer.clone() for buffer in model.buffers()]
    assert memory.kept_of_shapes(model, rows[:2], 6).num_bytes == kept.num_bytes > 6 * 4 * 62 * 62 * 4
    assert memory.kept_of_shapes(model, rows[:2], 600).num_bytes > 90 * kept.num_bytes
    assert all(map(torch.equal, buffers, model.buffers()))
    loss.backward()


def test_a_change_in_place_is_still_an_error():
    """Which autograd does not look for in tensors that a hook has packed."""
    weight = torch.ones(3, requires_grad=True)
    with memory.KeptForBackward(1, [weight]):
        scaled = weight * 2
        loss = (scaled**2).sum()
    with torch.no_grad():
        scaled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
