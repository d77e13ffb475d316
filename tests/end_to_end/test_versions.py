"""The versions that the project claims are those that ``make test-versions`` tests; tests of the script itself."""

from __future__ import annotations

import configparser
import re

from benchmarks import versions
from tests.conftest import ROOT


def test_every_dependency_has_a_floor_that_is_tested():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    python, packages = next(iter(versions.VERSIONS.items()))
    assert setup["options"]["python_requires"] == f">={python}"
    assert packages
    assert all(re.fullmatch(r"[a-z]+==[\d.]+", package) for package in packages), packages


def test_the_page_names_the_oldest_versions():
    section = (ROOT / "docs" / "install.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    python, packages = next(iter(versions.VERSIONS.items()))
    torch = next(package.partition("==")[2] for package in packages if package.startswith("torch=="))
    assert f"Python {python} and torch {torch} are the oldest" in section


def test_newest_and_missing_interpreters(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for name in ("3.12.9", "3.12.10"):
        (tmp_path / "versions" / name / "bin").mkdir(parents=True)
        (tmp_path / "versions" / name / "bin" / "python").touch()
    assert versions.interpreter("3.12") == str(tmp_path / "versions" / "3.12.10" / "bin" / "python")
    assert versions.fault("3.99", tmp_path, []) == "there is no interpreter on this machine"
