"""docs/targets.md: its YAML is valid, its commands make the data that its configurations read."""

from __future__ import annotations

import re
import shlex
import shutil

import pandas as pd
import pytest
import yaml

from harness import cli
from harness.config import loader
from harness.config.targets import problems
from tests.conftest import ROOT
from tests.fixtures import write_yaml

PAGE = (ROOT / "docs" / "targets.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
def test_yaml(tmp_path, text):
    tree = {"name": "page", "batch": {"global": 8}, **yaml.safe_load(text)}
    assert list(problems(loader.load(write_yaml(tmp_path / "page.yaml", tree)).task)) == []


def test_commands(tmp_path, monkeypatch, capsys):
    """Each dataset has the columns that its configuration names, and the same rows everywhere."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^harness .*$", PAGE, re.M):
        words = shlex.split(line)[1:]
        if words[0] == "data":
            assert cli.main(words) == 0
        else:
            assert cli.main(["check", *words[1:], f"data.cache_dir={tmp_path}/cache"]) == 0, capsys.readouterr()
    canvases = pd.read_csv("data/digit_canvases/train.csv", dtype=str)
    assert len(canvases) == 3000
    assert canvases["tags"].str.split("|").map(len).value_counts().index.sort_values().tolist() == [1, 2, 3, 4]
    angles = pd.read_csv("data/rotated_digits/eval.csv")["angle"]
    assert (len(angles), angles.abs().max() <= 60) == (600, True)
    names = pd.concat([pd.read_csv(f"data/character_names/{split}.csv") for split in ("train", "eval")])
    assert len(names) == 12771  # Unicode 3.2 in any version of Python
    assert names["name"].is_unique
    assert dict(names.to_numpy().tolist())["GREEK SMALL LETTER ALPHA"] == "Ll"
