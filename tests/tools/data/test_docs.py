"""docs/data.md: its commands run, in its order, and its configuration is valid."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
import yaml
from torchvision.io import encode_jpeg, write_jpeg

from harness import cli
from harness.config import loader
from tests.conftest import ROOT
from tests.tools.data.test_command import rows_of, write_table, write_tar

PAGE = (ROOT / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n(.*?)```", PAGE, re.S)


def test_every_block_is_tested():
    assert len(re.findall(r"^```\w+$", PAGE, re.M)) == len(BLOCKS)
    assert {kind for kind, _, _ in BLOCKS} == {"run", "config"}


def test_commands_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    pixels = torch.arange(192, dtype=torch.uint8).view(3, 8, 8)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(5):
            write_jpeg(pixels, str(tmp_path / "photos" / label / f"{number}.jpg"))
    (tmp_path / "new_photos").mkdir()
    write_jpeg(pixels, str(tmp_path / "new_photos" / "a b.jpg"))
    write_table(tmp_path / "scans.csv", [(f"{i}.jpg", i % 2, i // 2) for i in range(20)], ("path", "label", "patient"))
    (tmp_path / "shards").mkdir()
    jpeg = bytes(encode_jpeg(pixels).numpy())
    write_tar(tmp_path / "shards" / "train-000000.tar", {"a.jpg": jpeg, "a.cls": b"cat", "a.json": b'{"kind": "tom"}'})
    lines = [line for kind, _, text in BLOCKS if kind == "run" for line in text.splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines):
        assert words[:2] == ["harness", "data"]
        assert cli.main(words[1:]) == 0, words
    assert len(rows_of(tmp_path / "photos.train.csv")) == 8
    assert rows_of(tmp_path / "new.csv") == [{"path": "a b.jpg"}]
    assert rows_of(tmp_path / "kinds.csv") == [{"path": "train-000000.tar/a.jpg", "label": "tom"}]


@pytest.mark.parametrize("text", [text for kind, _, text in BLOCKS if kind == "config"])
def test_configuration_is_valid(tmp_path, text):
    path = tmp_path / "file.yaml"
    path.write_text(text + "batch: {global: 8}\n")
    task, given = loader.load(str(path), []).task, yaml.safe_load(text)["task"]
    assert (task.root, task.decode) == (given["root"], given.get("decode", "full"))
