"""docs/targets.md: its YAML is valid, its commands run, and each configuration that it links accepts such a table."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
import yaml

from harness import cli
from harness.config import loader
from harness.config.targets import problems
from tests import datasets
from tests.conftest import ROOT
from tests.fixtures import write_yaml
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "targets.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
def test_yaml(tmp_path, text):
    tree = {"name": "page", "batch": {"global": 8}, **yaml.safe_load(text)}
    assert list(problems(loader.load(write_yaml(tmp_path / "page.yaml", tree)).task)) == []


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    """With the page's table, and with each configuration that it links."""
    datasets.own_table(tmp_path / "made", "multi_label")
    for split in ("train", "eval"):
        shutil.copy(tmp_path / "made" / "image_csv" / f"{split}.csv", tmp_path)
        shutil.copytree(tmp_path / "made" / "image_csv" / split, tmp_path / split)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    cache = f"data.cache_dir={tmp_path}/cache"
    lines = [shlex.split(line) for line in re.findall(r"^harness .*$", PAGE, re.M)]
    assert [words[1] for words in lines] == ["check", "train"]
    for words in lines:
        more = ["train.max_steps=1"] if words[1] == "train" else []
        assert run_ranks(1, cli.main, [*words[1:], cache, *more], group=False) == [0]
    linked = re.findall(r"configs/(\w+)\.yaml\)", PAGE)
    assert linked == list(datasets.OWN_TABLES)
    for name in linked[1:]:
        made = datasets.own_table(tmp_path / name, name)
        assert cli.main(["check", "-c", f"configs/{name}.yaml", *made]) == 0, capsys.readouterr()
