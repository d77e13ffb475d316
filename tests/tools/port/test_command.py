"""``harness port``: output and exit codes."""

from __future__ import annotations

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


def test_report(script, capfd):
    assert cli.main(["port", "train.py"]) == 0
    report = capfd.readouterr().out
    assert "python -m harness.apex train.py" in report
    assert report.count("apex.amp.scale_loss") == script.read_text().count("amp.scale_loss(") == 3
    assert report.count("docs/migrate.md#one-loss") == 4
    script.write_text("import torch\n")
    assert cli.main(["port", "train.py"]) == 0
    assert capfd.readouterr().out == "train.py does not import Apex\n"


def test_exit_codes(script, capfd):
    script.write_bytes(
        b"\xef\xbb\xbffrom apex.optimizers import FusedLAMB\nfrom apex.transformer import a\nFusedLAMB(p)\n"
    )
    assert cli.main(["port", "train.py"]) == 1
    assert "    2  apex.transformer.a" in capfd.readouterr().out
    script.write_text("print 'Python 2'\n")
    assert cli.main(["port", "train.py"]) == 65
    assert cli.main(["port", "missing.py"]) == 65
