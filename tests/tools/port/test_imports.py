"""Imports of Apex, rewritten to harness.apex."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import harness.apex
from harness.apex import amp
from harness.apex.on_cpu import call_counter, redirect_cuda
from harness.tools.port import imports
from harness.tools.port.uses import ApexScript
from tests.conftest import ROOT

SCRIPTS = ROOT / "tests" / "apex" / "scripts"


def rewritten(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_bytes(text.encode())
    found = imports.rewritten(ApexScript(path))
    ast.parse(found)
    return found


def test_every_form_of_import(tmp_path):
    text = """\
import apex.amp as amp, apex, os  # all
import apex.parallel
from apex import amp as a, optimizers
from apex.parallel.LARC import LARC
from apex.amp.frontend import initialize
from apex.amp._amp_state import master_params
from apex.fp16_utils.fp16util import network_to_half
from apex.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_adam import FusedAdam as Old
from apex.fp16_utils import *
import amp_C
from amp_C import multi_tensor_scale
"""
    found = rewritten(tmp_path, text)
    assert "# all" in found
    assert not re.search(r"(?<!harness\.)\bapex\b(?! *(;|$|#))", found.replace("import apex", "import"), re.M)
    exec(found, names := {})
    assert names["amp"] is names["a"] is harness.apex.amp
    assert names["apex"].parallel is harness.apex.parallel
    assert names["network_to_half"].__module__.startswith("harness.apex")
    assert names["initialize"] is amp.initialize


@pytest.mark.parametrize(
    "statement",
    [
        "from apex.transformer import parallel_state",
        "from apex.amp import initialize, autocast",
        "from apex.parallel.distributed import no_such",
        "from apex.amp.frontend import no_such",
        "import apex.RNN.models",
        "from apex.reparameterization import *",
    ],
)
def test_an_import_that_harness_apex_cannot_satisfy_stays(tmp_path, statement):
    """The statement is left alone, and the others are rewritten."""
    found = rewritten(tmp_path, f"{statement}\nfrom apex import optimizers\n")
    assert found == f"{statement}\nfrom harness.apex import optimizers\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_everything_else_stays(tmp_path, newline):
    text = "x = 'é'; from apex import amp; y = 1  # naïve\n\x0cif x:\n\ttry:\n\t\tfrom apex.parallel import (Reducer,\n"
    text += "\t\t    ReduceOp)  # why\n\texcept ImportError: pass\nfrom torch import nn"
    found = rewritten(tmp_path, text.replace("\n", newline))
    new = "x = 'é'; from harness.apex import amp; y = 1  # naïve\n\x0cif x:\n\ttry:\n"
    new += "\t\tfrom harness.apex.parallel import Reducer, ReduceOp  # why\n\texcept ImportError: pass\n"
    new += "from torch import nn"
    assert found == new.replace("\n", newline)
    assert rewritten(tmp_path, found) == found


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs a script alone, its CUDA calls on the CPU, on one thread; returns its last line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums do not depend on the number of cores

    def run(text: str, with_apex: bool) -> str:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "train.py").write_text(text)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["train.py", "--deterministic", "--opt-level", "O2", "--epochs", "1"])
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if with_apex:
            harness.apex.install()
        redirect_cuda()
        try:
            runpy.run_path("train.py", run_name="__main__")
        finally:
            amp.reset()
            harness.apex.uninstall()
            call_counter.reset()
        (line,) = re.findall(r"^rank 0 (.*)$", capfd.readouterr().out, re.M)
        return re.sub(r" [a-z_]*s?/s\S*.*", "", line)

    yield run
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
def test_script_trains_equally(run):
    path = SCRIPTS / "imagenet_style.py"
    new = imports.rewritten(ApexScript(path))
    assert "from harness.apex import amp" in new
    assert run(new, with_apex=False) == run(path.read_text(), with_apex=True)


@pytest.mark.parametrize("name", ["imagenet_style", "gan_style"])
def test_patch_changes_imports_only(name):
    lines = imports.patch(ApexScript(SCRIPTS / f"{name}.py")).splitlines()[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert changed
    assert all(re.match(r"[+-] *(from|import) ", line) for line in changed)
