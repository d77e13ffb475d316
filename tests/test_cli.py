"""Words in, an exit code out; and the list of words, so that adding one is a decision."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys

import pytest

from harness import cli
from harness.training import main
from tests.conftest import ROOT
from tests.fixtures import settings, write_rows, write_yaml

VERBS = {
    "bench": ["--config", "--out", "--rounds", "--steps", "--threads", "--world", "-c", "overrides", "{strategies}"],
    "check": ["--config", "--world", "-c", "overrides"],
    "compare": ["--json", "one", "other"],
    "data": ["--from", "dataset", "folder"],
    "doctor": ["--json"],
    "export": ["--format", "--out", "folder", "overrides"],
    "generate": ["--keep-existing", "--seed", "--start", "--temperature", "-n", "folder"],
    "launch": [
        "--config",
        "--detach",
        "--dry-run",
        "--engine",
        "--max-restarts",
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--rendezvous",
        "--scheduler",
        "--stopped-code",
        "-c",
        "overrides",
    ],
    "predict": ["--csv", "--out", "--world", "folder", "overrides"],
    "report": ["--format", "--out", "--target", "-o", "paths"],
    "schema": ["--of", "--out"],
    "sweep": ["--config", "--dry-run", "--engine", "--parallel", "--retry-failed", "-c", "overrides"],
}
DRIVER = ["--config", "--local-rank", "--local_rank", "-c", "overrides"]


@pytest.fixture
def yaml_file(tmp_path):
    write_rows(tmp_path, "train", 8)
    write_rows(tmp_path, "eval", 4)
    return str(write_yaml(tmp_path / "x.yaml", settings(tmp_path)))


def words_of(capsys, call, *argv) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        call([*argv, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text.split("options:")[1])) - {"-h", "--help"}
    positional = re.search(r"positional arguments:\n(.*?)\n\n", text, re.S)
    names = re.findall(r"^  (\S+)", positional.group(1), re.M) if positional else []
    return sorted(
        options
        | {
            {
                "{digits,mnist,fashion_mnist,pet_names}": "dataset",
                "key=value": "overrides",
                "RUN": "folder",
                "RUN_OR_SWEEP": "paths",
                "RUN_A": "one",
                "RUN_B": "other",
            }.get(name, name)
            for name in names
        }
    )


def test_the_words_are_these(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.M)
    assert listed == list(VERBS)
    for verb, words in VERBS.items():
        assert words_of(capsys, cli.main, verb) == words, verb
    assert words_of(capsys, cli.drive) == DRIVER


# driver.py


def test_drive_hands_everything_on(monkeypatch):
    seen = []
    monkeypatch.setattr(main, "main", lambda *arguments: seen.append(arguments) or 75)
    assert cli.drive(["-c", "x.yaml", "a=1", "--local_rank=2", "b=2"]) == 75
    assert cli.drive(["--local-rank", "1", "a=1", "--config", "y.yaml"]) == 75
    gc.unfreeze()  # it counts on its process to end by ``leave``
    parent = os.getppid()
    assert seen == [("x.yaml", ["a=1", "b=2"], os.environ, 2, parent), ("y.yaml", ["a=1"], os.environ, 1, parent)]


def test_leaving_keeps_the_code_and_loses_nothing(tmp_path):
    """What was printed is out, threads and exit handlers had their turn; what aborts while Python is taken apart has
    none."""
    script = tmp_path / "script.py"
    script.write_text("""
import atexit, os, threading, time
from concurrent.futures import ThreadPoolExecutor
from harness import cli

class Aborts:
    def __del__(self):
        os.abort()

aborts = Aborts()
atexit.register(print, "handler")
ThreadPoolExecutor(1).submit(int)  # its thread waits for more
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
cli.leave(75)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "main\nthread\nhandler\n", "")


@pytest.mark.parametrize("argv", [[], ["a=1"], ["-c"], ["-c", "x", "--local_rank=x"], ["-c", "x", "--epochs", "3"]])
def test_wrong_words_are_usage_errors(capsys, argv):
    for call, words in ((cli.drive, argv), (cli.main, ["check", *argv])):
        with pytest.raises(SystemExit) as stop:
            call(words)
        assert stop.value.code == 2
        assert "usage:" in capsys.readouterr().err


# harness check


def test_check_tells_the_facts(capsys, yaml_file):
    assert cli.main(["check", "-c", yaml_file]) == 0
    out, err = capsys.readouterr()
    assert "    train rows: 8\n" in out
    assert err == ""


def test_overrides_and_options_in_any_order(capsys, yaml_file):
    for words in (
        ["train.epochs=3", "-c", yaml_file, "--world", "2", "seed=1"],
        ["-c", yaml_file, "--world", "2", "train.epochs=3"],
        ["--world=2", "train.epochs=3", "seed=2", "-c", yaml_file],
    ):
        assert cli.main(["check", *words]) == 0
        out = capsys.readouterr().out
        assert "ranks: 2" in out
        assert "2 per epoch, 6 in total" in out


def test_check_without_argv_reads_the_command_line(capsys, yaml_file, monkeypatch):
    monkeypatch.setattr("sys.argv", ["harness", "check", "a=1", "-c", yaml_file, "b=2"])
    assert cli.main() == 2
    assert "a: unknown key" in capsys.readouterr().err


def test_check_tells_all_problems_and_the_gravest_code(capsys, yaml_file, tmp_path):
    assert cli.main(["check", "-c", yaml_file, "model.name=cnn", "optimizer.name=adamm"]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 2
    (tmp_path / "train.csv").unlink()
    assert cli.main(["check", "-c", yaml_file, "optimizer.name=adamm"]) == 65
    assert cli.main(["check", "-c", str(tmp_path / "nope.yaml")]) == 2


def test_check_needs_a_positive_world(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", "-c", "x.yaml", "--world", "0"])
    assert stop.value.code == 2
    assert "invalid positive int value: '0'" in capsys.readouterr().err


def test_unknown_words_after_a_verb_without_overrides(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["schema", "a=1"])
    assert stop.value.code == 2
    assert "unrecognized arguments: a=1" in capsys.readouterr().err


# harness schema and data


def test_schema(capsys, tmp_path):
    assert cli.main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["schema", "--out", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text() == printed
    assert json.loads(printed)["title"] == "apex-harness experiment"
    assert cli.main(["schema", "--out", str(tmp_path / "none" / "s.json")]) == 70
    assert "error: " in capsys.readouterr().err


def test_data(capsys, tmp_path):
    pytest.importorskip("sklearn")
    assert cli.main(["data", "digits", str(tmp_path / "d")]) == 0
    assert "wrote 1437" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert cli.main(["data", "digits", str(tmp_path / "file" / "d")]) == 65
    assert "error: " in capsys.readouterr().err
