"""docs/explain.md: its commands run, and its limits are those of the table of causes."""

from __future__ import annotations

import json
import re
import shlex

from harness.cli import main
from harness.tools.explain.causes import CAUSES
from tests.conftest import ROOT
from tests.tools.explain.test_facts import write_record

PAGE = (ROOT / "docs" / "explain.md").read_text()


def test_documented_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    write_record(tmp_path / "runs" / "digits", [(1, 9.0)] * 5)
    monkeypatch.chdir(tmp_path)
    plain, as_json = re.findall(r"^harness explain .*$", PAGE, re.M)
    assert main(shlex.split(plain)[1:]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("runs/digits waits for rank 1")
    assert main(shlex.split(as_json)[1:]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text


def test_the_table_has_each_cause_and_its_limit():
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]] for line in PAGE.splitlines() if re.search(r"\| \d+% \|", line)
    ]
    listed = {name: limit for names, limit in rows for name in names.split(", ")}
    assert listed == {cause.name: f"{cause.limit:.0%}" for cause in CAUSES}
