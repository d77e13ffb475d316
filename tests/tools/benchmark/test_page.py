"""docs/strategies.md: its commands work, and it covers every conflict of a strategy."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest

from harness.cli import main
from harness.tools.benchmark import strategies
from harness.tools.data import digits
from tests.conftest import ROOT
from tests.end_to_end.processes import shell
from tests.ranks import free_port

PAGE = (ROOT / "docs" / "strategies.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder like the repository, with the digits data."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "configs", folder / "configs")
    digits.write(folder / "data" / "digits")
    return folder


def words(start: str) -> list[list[str]]:
    found = [shlex.split(line) for line in COMMANDS if line.startswith(start)]
    assert found
    return found


def test_every_documented_command_is_tested():
    kinds = ("harness check ", "harness bench strategies ", "python -m torch.distributed.launch ")
    assert [line for line in COMMANDS if not line.startswith(kinds)] == []


@pytest.mark.slow
def test_documented_checks_pass(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for command in words("harness check"):
        assert main(command[1:]) == 0, capsys.readouterr().err


def test_documented_benchmark_is_planned(place, monkeypatch):
    monkeypatch.chdir(place)
    cases = []
    monkeypatch.setattr(strategies, "write", lambda found, out: out)
    monkeypatch.setattr(strategies, "text", lambda found: "")
    monkeypatch.setattr(strategies.log, "info", lambda *_: None)
    monkeypatch.setattr(strategies, "run", lambda case, *_: cases.append(case) or {"train_s": 1.0, "forward_s": 1.0})
    for command in words("harness bench"):
        assert main(command[1:]) == 0
    assert {case.name for case in cases} == {"none", "dp", "ddp delayed", "ddp overlapped", "fsdp"}


@pytest.mark.slow
def test_documented_fsdp_training(place):
    for command in words("python"):
        command.insert(command.index("--nproc_per_node=2"), f"--master_port={free_port()}")
        terminal = place / "terminal.txt"
        assert shell([*command, "train.max_steps=2", "runtime.device=cpu"], terminal, place) == 0, terminal.read_text()
        assert "parallel: fsdp" in terminal.read_text()
        terminal.unlink()


def test_every_conflict_of_a_strategy_is_documented():
    source = (ROOT / "harness" / "config" / "constraints.py").read_text()
    keys = re.findall(r'"(\w+\.\w+)"', source[source.index("def _parallel(") :])
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert len(keys) > 10
    for key in set(keys) - {"parallel.strategy", "optimizer.name"}:
        assert key in table, key
