"""docs/apex.md: its blocks are run as a reader would run them, and its tables name all there is."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
import torch
import yaml

import harness.apex
from harness.apex import amp
from harness.config import loader
from tests.conftest import ROOT
from tests.ranks import free_port

PAGE = (ROOT / "docs" / "apex.md").read_text()
BLOCKS = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n(.*?)```", PAGE, re.S)


def blocks(kind: str) -> list[str]:
    return [text for mark, _, text in BLOCKS if mark == kind]


def commands(kind: str) -> list[str]:
    return [line for text in blocks(kind) for line in text.splitlines() if line.strip()]


def test_every_block_is_tested():
    assert len(re.findall(r"^```\w+$", PAGE, re.M)) == len(BLOCKS)
    assert {mark for mark, _, _ in BLOCKS} == {"train.py", "needs a GPU", "run", "exec", "yaml"}


@pytest.mark.contract("6.5.simple", "9")
@pytest.mark.parametrize("command", commands("run"))
def test_the_commands_for_a_machine_without_a_gpu(command, tmp_path):
    _run(command, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("command", commands("needs a GPU"))
def test_the_commands_for_a_machine_with_gpus(command, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _run(command.replace("nproc_per_node=2", f"nproc_per_node={min(2, torch.cuda.device_count())}"), tmp_path)


def _run(command: str, folder) -> None:
    (script,) = blocks("train.py")
    (folder / "train.py").write_text(script)
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    words = command.split()
    if "launch" in command or words[0] == "torchrun":
        # a reader has the default port to himself; a test does not
        words.insert(words.index("--nproc_per_node=2"), f"--master_port={free_port()}")
        environ["PYTHONWARNINGS"] = "ignore"
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\d\.\d{3})", done.stdout)]  # lines of two ranks may mix
    assert len(losses) == (2 if "nproc" in command else 1)
    assert all(loss < 0.9 for loss in losses), "it starts at 1.1"
    assert ("ran on the CPU" in done.stderr) == ("--device cpu" in command)


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("text", blocks("exec"))
def test_the_imports(text):
    try:
        exec(text, {"__name__": "script"})
    finally:
        harness.apex.uninstall()
    assert "apex" not in sys.modules


def test_the_yaml_is_a_configuration(tmp_path):
    (text,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(text)
    config = loader.load(tmp_path / "mine.yaml", [])
    assert config.precision.opt_level == yaml.safe_load(text)["precision"]["opt_level"] == "O2"


PACKAGES = ("amp", "parallel", "optimizers", "normalization", "mlp", "fused_dense", "multi_tensor_apply", "fp16_utils")


def documented() -> set[str]:
    """The names in the first column of the tables under "Every name"."""
    section = PAGE.split("## Every name")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_a_table(package):
    module = importlib.import_module(f"harness.apex.{package}")
    assert module.__all__, package
    assert not set(module.__all__) - documented()
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_tables_name_nothing_that_is_not_there():
    known = {name for package in PACKAGES for name in importlib.import_module(f"harness.apex.{package}").__all__}
    known |= {"install", "uninstall", "DeprecatedFeatureWarning", "reset", "amp_C"} | set(
        dir(torch.optim.SGD([torch.ones(1)]))
    )
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    amp.initialize(torch.nn.Linear(1, 1), optimizer, opt_level="O2", verbosity=0)
    known |= {name for name in vars(optimizer) if name.startswith("_")}
    options = {
        "num_allreduce_streams",
        "allreduce_communicators",
        "prof",
        "gradient_average_split_factor",
        "shared_param",
    }
    assert not documented() - known - options


def test_every_fix_that_is_referred_to_is_explained():
    referred = {int(n) for found in re.findall(r"\| fixed ([\d, ]+)\|", PAGE) for n in found.split(",") if n.strip()}
    explained = {int(n) for n in re.findall(r"^(\d+)\. ", PAGE.split("## What is fixed")[1].split("\n## ")[0], re.M)}
    assert explained == set(range(1, 18)), "the numbers of the traps in the contract (10.1 to 10.17)"
    assert referred <= explained


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        if not link.startswith("http"):
            assert (ROOT / "docs" / link).exists(), link
