"""The commands of docs/compare.md and docs/verify_resume.md, with a few training steps instead of many."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest

from harness.cli import main
from harness.tools.data import digits
from tests.conftest import ROOT
from tests.end_to_end.processes import python
from tests.ranks import start, wait_for

PAGE = (ROOT / "docs" / "compare.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)]
SHORT = ["train.max_steps=3", "train.log_every=1", "data.num_workers=0"]


def _drive(words: list[str]) -> None:
    from harness.cli import main

    raise SystemExit(main(["train", *words]))


def unrolled(line: str) -> list[str]:
    """The commands of ``for NAME in WORDS; do COMMAND; done``, or the line itself."""
    loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.*); done", line)
    return [loop[3].replace(f"${loop[1]}", word) for word in loop[2].split()] if loop else [line]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder like the repository, with the digits data."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    digits.write(tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=["two runs", "seeds"])
def test_documented_commands(place, block, capsys):
    compared = 0
    for line in (command for written in block for command in unrolled(written)):
        words = shlex.split(line)
        if words[:2] == ["python", "driver.py"]:
            assert wait_for([start(_drive, ([*words[2:], *SHORT],))], 60) == [0], line
        else:
            assert words[:2] == ["harness", "compare"]
            assert main(words[1:]) == 1
            out = capsys.readouterr().out
            assert (
                json.loads(out)["same"] is False if "--json" in words else re.search(r"optimizer\.lr +0\.1 +0\.05", out)
            )
            compared += 1
    assert compared
    if "seeds" in out:
        assert "over seeds (A: 3, B: 3)" in out
        assert re.search(r"top1 +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+", out)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_verify_resume(place):
    page = (ROOT / "docs" / "verify_resume.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.S) for line in block.splitlines()]
    first, second = map(shlex.split, lines)
    assert second[: len(first)] == first  # with more options: running it covers both
    terminal = place / "terminal.txt"
    assert python(["-m", *second, "--kills", "1", "--steps", "4"], terminal, cwd=place) == 0, terminal.read_text()
    assert re.search(r"^exact: killed 1 time,", terminal.read_text(), re.M)
