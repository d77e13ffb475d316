"""Whole scripts in the style of 2019 and 2020 (``scripts``), written for CUDA and Apex, run unmodified on the CPU.

They run alone and on two ranks, as under ``torch.distributed.launch``. The last line of each rank shows that it learned
and that ranks agree bit for bit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.apex.forked import run_apex

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.contract("9")


def run(name, *options, folder, ranks=1):
    """Run a script; returns the values of its last lines, {rank: {name: value}}, and its stderr."""
    done = run_apex("--device", "cpu", SCRIPTS / f"{name}.py", *options, cwd=folder, ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    ends = re.findall(r"^rank (\d+) (.*)$", done.stdout, re.M)
    result = {int(rank): dict(zip(*[iter(values.split())] * 2, strict=True)) for rank, values in ends}
    assert sorted(result) == list(range(ranks)), done.stdout
    assert done.stderr.count("harness.apex --device cpu: calls that ran on the CPU instead of CUDA") == 1
    assert "Traceback" not in done.stderr
    return result, done.stderr


def learned(result, by):
    first = result[0]
    return float(first["last"]) < by * float(first["first"])


@pytest.mark.contract("6.5.imagenet", "7.2", "9")
def test_imagenet_style_alone(tmp_path):
    result, stderr = run("imagenet_style", "--opt-level", "O1", "--loss-scale", "128.0", folder=tmp_path)
    assert learned(result, 0.5)
    assert float(result[0]["prec1"]) > 90
    checkpoint = torch.load(tmp_path / "checkpoint.pth.tar")
    assert checkpoint["amp"]["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 32}
    assert (tmp_path / "model_best.pth.tar").exists()
    for name in ("torch.cuda.Stream", "Tensor.record_stream", "DataLoader(pin_memory=True)", "Module.cuda"):
        assert name in stderr


@pytest.mark.slow
@pytest.mark.contract("6.5.imagenet")
def test_imagenet_style_on_two_ranks_resumes_exactly(tmp_path):
    options = ["-b", "8", "--deterministic", "--opt-level", "O2", "--sync_bn", "--keep-batchnorm-fp32", "True"]
    (tmp_path / "uninterrupted").mkdir()
    uninterrupted, stderr = run("imagenet_style", *options, folder=tmp_path / "uninterrupted", ranks=2)
    assert learned(uninterrupted, 0.6)
    assert uninterrupted[0]["checksum"] == uninterrupted[1]["checksum"]
    assert "init_process_group(nccl)" in stderr
    run("imagenet_style", *options, "--stop-after", "2", folder=tmp_path, ranks=2)
    resumed, _ = run("imagenet_style", *options, "--resume", "checkpoint.pth.tar", folder=tmp_path, ranks=2)
    for rank in (0, 1):
        for what in ("last", "checksum", "prec1"):
            assert resumed[rank][what] == uninterrupted[rank][what]


@pytest.mark.contract("6.5.dcgan")
@pytest.mark.parametrize(("ranks", "opt_level"), [(1, "O1"), pytest.param(2, "O2", marks=pytest.mark.slow)])
def test_gan_style(tmp_path, ranks, opt_level):
    result, stderr = run("gan_style", "--opt_level", opt_level, folder=tmp_path, ranks=ranks)
    assert learned(result, 0.9)
    assert len({values["checksum"] for values in result.values()}) == 1
    assert all(int(count) > 0 for count in result[0]["unskipped"].split(","))
    assert (tmp_path / "netG_epoch_5.pth").exists()
    assert "torch.cuda.FloatTensor" in stderr
