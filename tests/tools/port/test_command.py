"""``harness port``: output, files and exit codes."""

from __future__ import annotations

import subprocess
import sys

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
    for group in ("Runs as it is:", "Rewritten, same meaning:", "Changed meaning:"):
        assert f"\n{group}\n" in report
    assert "By hand" not in report
    assert "amp.initialize at the level opt.opt_level" in report
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
    script.write_text("from apex.optimizers import FusedLAMB\nFusedLAMB(p)\n")
    assert cli.main(["port", "train.py", "--write"]) == 1
    assert "\nBy hand:\n" in capsys.readouterr().out
    assert "+# TODO(apex): FusedLAMB: " in (script.parent / "train.py.patch").read_text()
    assert cli.main(["port", "train.py", "--to", "harness"]) == 0
    script.write_text("print 'Python 2'\n")
    assert cli.main(["port", "train.py"]) == 65
    assert cli.main(["port", "missing.py"]) == 65


def test_starts_without_torch():
    program = (
        f"import sys; from harness import cli; cli.main(['port', {str(SCRIPT)!r}]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0
