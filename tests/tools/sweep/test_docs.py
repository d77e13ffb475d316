"""docs/sweeps.md: its files are those of the repository, and its commands run."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
import yaml

from harness.tools.data import digits
from harness.tools.sweep.slots import Machine
from tests import datasets
from tests.conftest import ROOT
from tests.ranks import wait_for
from tests.tools.sweep.sweeping import output, start_command, table

PAGE = (ROOT / "docs" / "sweeps.md").read_text()
BLOCKS = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n(.*?)```", PAGE, re.S)
COMMANDS = [
    shlex.split(line.split("  #")[0]) for kind, _, text in BLOCKS if kind == "run" for line in text.splitlines()
]


def test_every_block_is_tested():
    assert len(re.findall(r"^```\w+$", PAGE, re.M)) == len(BLOCKS)
    assert {kind for kind, _, _ in BLOCKS} == {"file", "run"}


@pytest.mark.parametrize("text", [text for kind, _, text in BLOCKS if kind == "file"])
def test_files_are_those_of_the_repository(text):
    shown = yaml.safe_load(text)
    names = {"sweep_pet_names": "pet_names"}
    path = ROOT / "configs" / "sweeps" / f"{names.get(shown['name'], shown['name'])}.yaml"
    assert yaml.safe_load(path.read_text()) == shown


@pytest.mark.slow
def test_commands_run_one_after_the_other(tmp_path):
    """With quick trials in place of training; tests/end_to_end/test_sweep.py trains."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    digits.write(tmp_path / "data" / "digits")
    datasets.write_names(tmp_path / "data" / "pet_names" / "names.txt")
    for words in COMMANDS:
        assert words[:2] == ["harness", "sweep"]
        assert wait_for([start_command(tmp_path, words[1:], Machine(2))], 120) == [0], output(tmp_path)
    for name, count in (("sweep_pet_names", 12), ("try_out", 12), ("digits_search", 20)):
        states = [trial["state"] for trial in table(tmp_path / "runs", name)]
        assert len(states) == count
        assert set(states) <= {"finished", "pruned"}
    assert "best: trial 0002, char_loss 2.109" in output(tmp_path)
