"""docs/engines.md: its commands are valid, and the settings and files it names exist.

Each ``harness launch`` line is rendered; the engines' own tests check what they do.
"""

from __future__ import annotations

import re
import shlex

import pytest

from harness import cli
from harness.config import loader
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "engines.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
LAUNCHES = [words for words in COMMANDS if words[:2] == ["harness", "launch"]]


@pytest.mark.parametrize("words", LAUNCHES, ids=" ".join)
def test_launch_commands_are_rendered(words, monkeypatch, capsys, tmp_path):
    if ">" in words:  # the shell's part
        words = words[: words.index(">")] + words[words.index(">") + 2 :]
    monkeypatch.chdir(ROOT)
    words = ["configs/digits.yaml" if word == "config.yaml" else word for word in words]
    more = [] if "--dry-run" in words else ["--dry-run"]
    assert cli.main([*words[1:], *more, f"data.cache_dir={tmp_path}"]) == 0
    assert re.search(r"driver\.py|@workflow", capsys.readouterr().out)


def test_other_commands_are_tested_elsewhere():
    """Typed by test_slurm.py, test_dask.py, test_flyte.py and tests/end_to_end/test_url.py."""
    others = {" ".join(words[:2]) for words in COMMANDS if words[:2] != ["harness", "launch"]}
    assert others == {
        "sbatch launch/slurm.sbatch", "sbatch launch/slurm_sweep.sbatch", "python launch/dask_cluster.py",
        "pyflyte run", "harness predict", "export AWS_ACCESS_KEY_ID=…", "pip install",
    }  # fmt: skip


def test_every_engine_has_a_section():
    from harness.config.launch import LaunchSection

    kinds = LaunchSection.model_json_schema()["properties"]["engine"]["anyOf"][0]["enum"]
    assert {heading.lower() for heading in re.findall(r"^## (\w+)$", PAGE, re.M)} == set(kinds)


def test_named_settings_and_files_exist():
    schema = loader.json_schema()
    for key in re.findall(r"`(?:launch|data|runtime|checkpoint|train)\.(?:\w+\.)?(\w+)", PAGE):
        assert f'"{key}"' in schema, key
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
    for name in re.findall(r"\blaunch/\w+\.\w+", PAGE):
        assert (ROOT / name).exists(), name
