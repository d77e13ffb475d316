"""The versions that the project claims are those that ``make test-versions`` tests; tests of the script itself."""

from __future__ import annotations

import configparser
import re

from benchmarks import versions
from tests.conftest import ROOT


def test_claimed_versions_are_tested():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lowest = versions.VERSIONS[0]
    assert setup["options"]["python_requires"] == f">={lowest[0]}"
    assert f"torch>={lowest[1].rpartition('.')[0]}" in setup["options"]["install_requires"].split()
    section = (ROOT / "README.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \| (\d+\.\d+\.\d+)", section, re.M)
    tested = {(python, torch) for python, torch, _ in versions.VERSIONS if torch}
    assert tested <= set(rows)


def test_table_and_missing_interpreters(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for name in ("3.12.9", "3.12.10"):
        (tmp_path / "versions" / name / "bin").mkdir(parents=True)
        (tmp_path / "versions" / name / "bin" / "python").touch()
    assert versions.interpreter("3.12") == str(tmp_path / "versions" / "3.12.10" / "bin" / "python")
    absent = versions.measured(("3.99", "2.6.0", "0.21.0"), tmp_path, [])
    assert (absent.quick_start, absent.passed) == ("no interpreter on this machine", False)
    good = versions.Result("3.12.1", "2.11.0", "accuracy 0.9900", "12 passed, 1 skipped")
    bad = versions.Result("3.10.1", "2.6.0", "accuracy 0.9900", "11 passed, 1 failed", ("tests.test_x::test_y",))
    assert (good.passed, bad.passed) == (True, False)
    text = versions.table([good, bad, absent])
    assert "| 3.12.1 | 2.11.0 | accuracy 0.9900 | 12 passed, 1 skipped |" in text
    assert "- Python 3.10.1, torch 2.6.0: `tests.test_x::test_y`" in text
    assert "| 3.99 | 2.6.0 | no interpreter on this machine | – |" in text
