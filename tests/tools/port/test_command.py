"""``harness port``: output, files and exit codes."""

from __future__ import annotations

import subprocess

import pytest

from harness import cli
from tests.conftest import ROOT

SCRIPT = ROOT / "tests" / "apex" / "scripts" / "gan_style.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT.read_bytes())
    return path


def test_report_and_patch(script, capsys):
    assert cli.main(["port", "train.py"]) == 0
    report = capsys.readouterr().out
    assert [script] == list(script.parent.iterdir())
    assert "python -m harness.apex train.py" in report
    assert report.count("apex.amp.scale_loss") == script.read_text().count("amp.scale_loss(") == 3
    assert report.count("docs/migrate.md#one-loss") == 4
    assert cli.main(["port", "train.py", "--write"]) == 0
    assert "patch train.py train.py.patch" in capsys.readouterr().out
    assert script.read_bytes() == SCRIPT.read_bytes(), "only the patch is written"
    assert cli.main(["port", "train.py", "--write", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (script.parent / "train.py.patch").read_text()
    assert printed.err == report
    done = subprocess.run(["patch", "train.py", "train.py.patch"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert cli.main(["port", "train.py"]) == 0
    assert capsys.readouterr().out == "train.py does not import Apex\n"


def test_existing_files_are_kept(script, capsys):
    patch = script.parent / "mine.patch"
    patch.write_text("mine")
    assert cli.main(["port", "train.py", "--write", "mine.patch"]) == 2
    assert "mine.patch: this file already exists\n  -> remove it, or choose another" in capsys.readouterr().err
    assert patch.read_text() == "mine"
    assert cli.main(["port", "train.py", "--write", "train.py"]) == 2
    assert script.read_bytes() == SCRIPT.read_bytes()
    assert cli.main(["port", "train.py", "--write", "missing/x.patch"]) == 70
    for _ in range(2):  # the same patch again is not an error
        assert cli.main(["port", "train.py", "--write"]) == 0


def test_exit_codes(script, capsys):
    script.write_text("from apex.optimizers import FusedLAMB\nfrom apex.transformer import a\nFusedLAMB(p)\n")
    assert cli.main(["port", "train.py", "--write"]) == 1
    assert "    2  apex.transformer.a" in capsys.readouterr().out
    patch = (script.parent / "train.py.patch").read_text()
    assert "\n+from harness.apex.optimizers import FusedLAMB\n from apex.transformer import a\n" in patch
    script.write_text("print 'Python 2'\n")
    assert cli.main(["port", "train.py"]) == 65
    assert cli.main(["port", "missing.py"]) == 65
