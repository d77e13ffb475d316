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


def test_report_and_patch(script, capfdbinary):
    assert cli.main(["port", "train.py"]) == 0
    report = capfdbinary.readouterr().out
    assert b"python -m harness.apex train.py" in report
    assert b"with --modernize before the script" in report
    assert report.count(b"apex.amp.scale_loss") == script.read_text().count("amp.scale_loss(") == 3
    assert report.count(b"docs/migrate.md#one-loss") == 4
    assert cli.main(["port", "train.py", "--patch"]) == 0
    printed = capfdbinary.readouterr()
    assert printed.err == report
    assert [script] == list(script.parent.iterdir())
    assert script.read_bytes() == SCRIPT.read_bytes(), "the patch is only printed"
    done = subprocess.run(["patch", "train.py"], input=printed.out, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert cli.main(["port", "train.py"]) == 0
    assert capfdbinary.readouterr().out == b"train.py does not import Apex\n"


def test_exit_codes(script, capfd):
    script.write_text("from apex.optimizers import FusedLAMB\nfrom apex.transformer import a\nFusedLAMB(p)\n")
    assert cli.main(["port", "train.py", "--patch"]) == 1
    printed = capfd.readouterr()
    assert "    2  apex.transformer.a" in printed.err
    assert "runs as it is" not in printed.err
    assert "\n+from harness.apex.optimizers import FusedLAMB\n from apex.transformer import a\n" in printed.out
    script.write_text("print 'Python 2'\n")
    assert cli.main(["port", "train.py"]) == 65
    assert cli.main(["port", "missing.py"]) == 65


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("first", [b"from apex import amp\n", b"import torch\n\x0c\nfrom apex import amp\n"])
def test_patch_of_a_script_with_a_byte_order_mark_or_form_feeds(script, capfdbinary, mark, first):
    """``patch`` knows no line ends but newlines, and the mark belongs to the first line of the script."""
    script.write_bytes(mark + first + b"\x0c\nx = 'a\x1cb'\n\x0cy = 1\n")
    assert cli.main(["port", "train.py", "--patch"]) == 0
    printed = capfdbinary.readouterr().out
    assert printed.startswith(b"--- train.py\n")
    expected = script.read_bytes().replace(b"from apex import", b"from harness.apex import")
    done = subprocess.run(["patch", "train.py"], input=printed, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert script.read_bytes() == expected
