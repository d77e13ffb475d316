from __future__ import annotations

import json
import shutil
import sys

import pytest

from harness import cli
from tests.audit import fake_training


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "neither -c CONFIG nor a command"),
        (["--resume", "x"], "neither -c CONFIG nor a command"),
        (["--"], "no command after --"),
        (["-c", "x.yaml", "--", "python", "train.py"], "both"),
        (["train.epochs=1", "--", "python", "train.py"], "both"),
        (["--engine", "local", "--", "python", "-c", "pass"], "--engine needs -c CONFIG"),
        (["-c", "x.yaml", "--resume", "--from {latest}"], "--resume needs a command"),
    ],
)
def test_usage(words, error, capsys):
    assert cli.main(["verify-resume", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--out", "x"]])
def test_a_command_without_the_dashes(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["verify-resume", "python", "train.py", *options])
    assert "or a command after --: harness verify-resume -- python train.py (found" in capsys.readouterr().err


def test_words_after_the_dashes_are_those_of_the_command(tmp_path, monkeypatch, capsys):
    shutil.copy(fake_training.__file__, tmp_path)
    monkeypatch.chdir(tmp_path)
    options = ["--json", "--kills", "1", "--seed", "2", "--resume", "--resume {latest}"]
    command = [sys.executable, "fake_training.py", "--steps", "6", "--save-every", "2", "--out", "a=b"]
    code = cli.main(["verify-resume", *options, "--", *command])
    captured = capsys.readouterr()
    verdict = json.loads(captured.out)
    assert (code, verdict["verdict"], verdict["findings"]) == (0, "exact", [])
    assert verdict["starts"][0]["command"][1:] == command[1:]
    assert "starting 'undisturbed'" in captured.err


def test_a_page(tmp_path, monkeypatch, capsys):
    shutil.copy(fake_training.__file__, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["--report", "resume.html", "--", sys.executable, "fake_training.py", "--fault", "fail"]
    assert cli.main(["verify-resume", *words]) == 3
    assert "there is no data" in capsys.readouterr().out
    assert "there is no data" in (tmp_path / "resume.html").read_text()
