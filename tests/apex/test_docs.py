"""docs/apex.md, apex_api.md and apex_differences.md: their code runs as it stands; the tables name the whole API."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

import harness.apex
from benchmarks import compatibility
from harness.apex import amp
from harness.config import loader
from tests.conftest import ROOT
from tests.end_to_end.processes import python
from tests.ranks import free_port

PAGE = (ROOT / "docs" / "apex.md").read_text()
API = (ROOT / "docs" / "apex_api.md").read_text()
DIFFERENCES = (ROOT / "docs" / "apex_differences.md").read_text()
BLOCKS = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n(.*?)```", PAGE, re.S)
PACKAGES = ("amp", "parallel", "optimizers", "normalization", "mlp", "fused_dense", "multi_tensor_apply", "fp16_utils")


def blocks(kind: str) -> list[str]:
    return [text for mark, _, text in BLOCKS if mark == kind]


def commands(kind: str) -> list[str]:
    return [line for text in blocks(kind) for line in text.splitlines() if line.strip()]


def test_every_block_is_tested():
    assert len(re.findall(r"^```\w+$", PAGE, re.M)) == len(BLOCKS)
    assert {mark for mark, _, _ in BLOCKS} == {"train.py", "needs a GPU", "run", "exec", "yaml"}


@pytest.mark.contract("6.5.simple", "9")
@pytest.mark.parametrize("command", commands("run"))
def test_commands_for_a_machine_without_a_gpu(command, tmp_path):
    run(command, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("command", commands("needs a GPU"))
def test_commands_for_a_machine_with_gpus(command, tmp_path):
    run(command.replace("nproc_per_node=2", f"nproc_per_node={min(2, torch.cuda.device_count())}"), tmp_path)


def run(command: str, folder) -> None:
    (script,) = blocks("train.py")
    (folder / "train.py").write_text(script)
    words, terminal, ranks = command.split(), folder / "terminal.txt", 1
    environ = {"OMP_NUM_THREADS": "1"}
    for i, word in enumerate(words):
        if word.startswith("--nproc_per_node="):
            ranks = int(word.partition("=")[2])
            words.insert(i, f"--master_port={free_port()}")  # other tests may use the default port
            environ["PYTHONWARNINGS"] = "ignore"
            break
    if "cpu" in words:
        program, *arguments = words
        launcher = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        code = python([*launcher, *arguments], terminal, folder, **environ)
    else:
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        with open(terminal, "w") as file:
            code = subprocess.run(
                words, cwd=folder, env={**os.environ, "PATH": path, **environ}, stdout=file, stderr=file, timeout=250,
                check=False,
            ).returncode  # fmt: skip
    text = terminal.read_text()
    assert code == 0, text
    losses = [float(value) for value in re.findall(r"loss (\d\.\d{3})", text)]  # lines of two ranks may mix
    assert len(losses) == ranks
    assert all(loss < 0.9 for loss in losses), "it starts at 1.1"
    printed = text.count("harness.apex --device cpu: calls that ran on the CPU")
    assert printed == ("--device cpu" in command), "only local rank 0 prints it"


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("text", blocks("exec"))
def test_imports(text):
    try:
        exec(text, {"__name__": "script"})
    finally:
        harness.apex.uninstall()
    assert "apex" not in sys.modules


def test_yaml_is_a_configuration(tmp_path):
    (text,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(text)
    config = loader.load(tmp_path / "mine.yaml", [])
    assert config.precision.opt_level == yaml.safe_load(text)["precision"]["opt_level"] == "O2"


def documented() -> set[str]:
    """The names in the first column of the API tables."""
    cells = [line.split("|")[1] for line in API.partition("## Waits")[0].splitlines() if line.startswith("| ")]
    return {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_a_table(package):
    module = importlib.import_module(f"harness.apex.{package}")
    assert module.__all__
    assert not set(module.__all__) - documented()
    assert all(hasattr(module, name) for name in module.__all__)


def test_tables_only_name_what_exists():
    known = {name for package in PACKAGES for name in importlib.import_module(f"harness.apex.{package}").__all__}
    known |= {"install", "uninstall", "DeprecatedFeatureWarning", "amp_C", "optimizers", "adam"}
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    amp.initialize(torch.nn.Linear(1, 1), optimizer, opt_level="O2", verbosity=0)
    known |= {name for name in vars(optimizer) if name.startswith("_")}
    known |= set(inspect.signature(harness.apex.parallel.DistributedDataParallel).parameters)
    assert not documented() - known


def test_every_fix_that_is_referred_to_is_explained():
    referred = {int(n) for found in re.findall(r"\| fixed ([\d, ]+)\|", API) for n in found.split(",") if n.strip()}
    explained = {int(n) for n in re.findall(r"^(\d+)\. ", DIFFERENCES, re.M)}
    assert explained == set(range(1, 19)), "the numbers of the traps in the contract (10.1 to 10.18)"
    assert referred <= explained


def test_compatibility_page_shows_the_record():
    assert compatibility.PAGE.read_text() == compatibility.page(compatibility.read()), "type: make compatibility"
    share = re.search(r"resume if the script can\*\* \| \*\*(\d+) of (\d+)", compatibility.PAGE.read_text())
    assert share
    assert f"Of the other {share[2]} projects, {share[1]} train with a falling loss and" in " ".join(PAGE.split())


def test_compatibility_counts_what_was_run():
    run = compatibility.Run("a/b", "0" * 40, "trains", "train.py", "2026-11-22", steps=2, first_loss=2.0, last_loss=1.0)
    projects = [
        run,
        replace(run, last_loss=3.0, resumed="yes"),
        replace(run, resumed="cannot"),
        replace(run, resumed="yes"),
        replace(run, last_loss=1.99, resumed="yes"),
        replace(run, outcome="starts", note="stops"),
        replace(run, outcome="other", note="stops"),
    ]
    page = compatibility.page({**compatibility.read(), "projects": projects, "libraries": []})
    for line in (
        "chosen | 7",
        "nothing to do with Apex | 1",
        "the rest | 6",
        "is finite | 5",
        "the time limit | 1",
        "falls by more than 1 % | 3",
        "the script supports resuming | 4",
        "own checkpoints | 3",
        "resume if the script can** | **2 of 6 (33 %)**",
    ):
        assert f"{line} |" in page
    with pytest.raises(ValueError, match=r"compatibility.json: record of a/b: no command, date, steps"):
        replace(run, steps=0)
    with pytest.raises(ValueError, match="outcome 'works'"):
        replace(run, outcome="works")
    with pytest.raises(ValueError, match="no reason in note"):
        replace(run, outcome="other")
