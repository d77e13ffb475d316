"""What identifies a start: the code of the user's own parts, git's answers, and what changed since the last start."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from harness.config import loader
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.runs import provenance
from harness.version import __version__
from tests.fixtures import settings, write_yaml


def soon() -> float:
    return time.monotonic() + 600


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A configuration with a model of the user's own, which imports a module next to its package."""
    folder = tmp_path / "project"
    (folder / "nets").mkdir(parents=True)
    (folder / "nets" / "small.py").write_text("from torch.nn import Module as Model\nimport widths_of_nets\n")
    (folder / "widths_of_nets.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder, loader.load(write_yaml(tmp_path / "c.yaml", settings(tmp_path, model={"name": "nets.small.Model"})))
    for name in ("nets", "nets.small", "widths_of_nets"):
        sys.modules.pop(name, None)


def start(config, **changes):
    ranks = [{"host": "here", "device": "cpu", "name": "cpu", "processor": "a CPU, AVX2"}]
    return provenance.of_start(Runtime(), "harness.apex", ranks, provenance.code(config)) | changes


def test_start_counts_the_ranks(own_model):
    entry = provenance.of_start(
        Runtime(Launch(rank=1, world_size=4)), "harness.apex", [], provenance.code(own_model[1])
    )
    assert entry["world_size"] == 4


@pytest.mark.parametrize("name", ["timm:resnet18.a1_in1k", "hf:org/name-v1.0", "hf:./folder"])
def test_the_model_of_a_library_is_no_own_code(tmp_path, name):
    tree = settings(tmp_path, model={"name": name})
    assert provenance.own_code(loader.load(write_yaml(tmp_path / "c.yaml", tree))) == {}


@pytest.mark.parametrize(
    "sections",
    [
        {"task": {"loss": {"name": "part_of_nets.own"}}},
        {"task": {"metrics": ["loss", {"name": "part_of_nets.own", "better": "max"}]}},
        {"task": {"transforms": {"train": ["RandomHorizontalFlip", {"part_of_nets.own": {"mode": "a.b"}}]}}},
        {"train": {"on_gradients": "part_of_nets.own"}},
        {"hooks": ["part_of_nets.own"]},
    ],
)
def test_each_own_part_is_own_code(own_model, tmp_path, monkeypatch, sections):
    folder, _ = own_model
    monkeypatch.delitem(sys.modules, "part_of_nets", raising=False)
    (folder / "part_of_nets.py").write_text("def own(outputs, targets): ...\n")
    tree = settings(tmp_path, **sections)
    found = provenance.own_code(loader.load(write_yaml(tmp_path / "own.yaml", tree)))
    assert "part_of_nets" in found[folder]


def test_own_code_is_identified_with_and_without_git(own_model):
    folder, config = own_model
    own = start(config)["own_code"]
    assert list(own) == [str(folder)]
    assert own[str(folder)]["git"] is None
    assert sorted(own[str(folder)]["source"]) == ["nets.small", "widths_of_nets"]
    git(folder, "init")
    git(folder, "add", "nets")
    git(folder, "commit", "-m", "first")
    assert start(config)["own_code"][str(folder)]["git"]["changed"]  # one module was never committed
    git(folder, "add", ".")
    git(folder, "commit", "-m", "second")
    committed = start(config)["own_code"][str(folder)]["git"]
    assert len(committed["commit"]) == 40
    assert not committed["changed"]
    (folder / "widths_of_nets.py").write_text("WIDTH = 4\n")
    assert start(config)["own_code"][str(folder)]["git"] == {**committed, "changed": True}


def test_own_schedule_is_identified(tmp_path, monkeypatch):
    (tmp_path / "rates_of_this_test.py").write_text("def half(update, total):\n    return 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = loader.load(
        write_yaml(tmp_path / "c.yaml", settings(tmp_path, schedule={"name": "rates_of_this_test.half"}))
    )
    assert list(start(config)["own_code"][str(tmp_path)]["source"]) == ["rates_of_this_test"]


def test_harness_is_identified_from_any_folder(own_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = start(own_model[1])
    assert found["git"] is None  # of the working folder
    assert found["harness"]["version"] == __version__
    assert found["harness"]["source"] == provenance.harness_source()


def test_a_repository_that_does_not_hold_the_code_does_not_count(tmp_path):
    """As for a virtual environment inside a repository."""
    git(tmp_path, "init")
    (tmp_path / "a.txt").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "own.py").write_text("")
    assert provenance.commit(tmp_path, soon())
    assert provenance.commit(tmp_path / "venv", soon(), [tmp_path / "venv" / "own.py"]) is None


SCRIPTS = {"absent": None, "hangs": "exec sleep 60", "refuses": "echo 'fatal: dubious ownership' >&2; exit 128"}


@pytest.mark.parametrize("case", SCRIPTS)
def test_git_never_holds_up_a_run(tmp_path, monkeypatch, case):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep if SCRIPTS[case] else None)
    if script := SCRIPTS[case]:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "git").chmod(0o755)
    begin = time.monotonic()
    assert provenance.commit(tmp_path, begin + 0.5) is None
    assert time.monotonic() - begin < 60


def test_what_changed_since_the_last_start_is_named(own_model):
    folder, config = own_model
    before = start(config)
    assert provenance.warnings(before, start(config)) == []
    assert provenance.warnings({}, start(config)) == []  # an older version recorded less
    (folder / "widths_of_nets.py").write_text("WIDTH = 4\n")
    other = {"packages": {**before["packages"], "torch": "9.0", "pandas": "9.0"}, "amp": "apex 0.1"}
    (warning,) = provenance.warnings(before, start(config, **other))
    assert "amp harness.apex -> apex 0.1, torch " in warning
    assert " -> 9.0, source code of widths_of_nets " in warning
    assert "pandas" not in warning  # its output is compared itself
    other = {"packages": {**before["packages"], "pillow": "9.0"}, "ranks": [{**before["ranks"][0], "processor": "b"}]}
    (warning,) = provenance.warnings(before, start(config, **other))
    assert "pillow " in warning
    assert "device a CPU, AVX2 -> b" in warning
    (warning,) = provenance.warnings({**before, "threads": torch.get_num_threads() + 1}, before)
    assert f"set OMP_NUM_THREADS={torch.get_num_threads() + 1} to resume exactly" in warning
