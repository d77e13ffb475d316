"""docs/reports.md: its commands and its program run, and its limits are those of the code."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.cli import main
from harness.tools.report import curves
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reports.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines() if line]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the runs that the page names."""
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "mnist"):
        write_run(tmp_path / "runs" / name, Fake(name=name, epochs=2))
    write_sweep(tmp_path / "runs" / "sweep_pet_names", [Fake(epochs=2), Fake(epochs=2, world=2)])
    return tmp_path


def test_every_command_is_a_report():
    assert COMMANDS
    assert [line for line in COMMANDS if not line.startswith("harness report ")] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition("#")[0].strip())
def test_documented_command(place, capsys, command):
    assert main(shlex.split(command, comments=True)[1:]) == 0
    written = capsys.readouterr().out.split()
    assert written
    for name in written:
        assert (place / name).stat().st_size > 100


def test_documented_program(place, capsys):
    (program,) = re.findall(r"<!-- test: records -->\n```python\n(.*?)```", PAGE, re.S)
    exec(compile(program, "docs/reports.md", "exec"), {})
    assert capsys.readouterr().out.startswith("digits finished [] ")


def test_documented_limit():
    assert f"the {curves.MAX_LINES} best runs" in " ".join(PAGE.split())


def test_example_is_small_enough_to_open_on_a_phone():
    assert (ROOT / "docs" / "example_report.html").stat().st_size <= 2_000_000
