"""Run folders and sweep folders in any state: complete, incomplete, damaged, foreign."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.distributed.rank_exit import Cause, RankExit
from harness.errors import EXIT_STOPPED, ConfigError
from harness.runs import exit_files, hints, reader, trained_run
from harness.runs.locks import Lock
from harness.tools.explain import facts

TRAIN = {"split": "train", "step": 10, "epoch": 0, "loss": 2, "lr": 0.1, "samples": 640, "wall_s": 1.5}
EVAL = {"split": "eval", "step": 10, "epoch": 1, "top1": 0.5, "class_accuracy": {"cat": 0.25, "dog": None}}


def write_run(folder, lines=(TRAIN, EVAL), finished=True, name="small", world=1):
    """A run folder with the files that a trained run has."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: {name}\nseed: 0\n")
    (folder / "provenance.json").write_text(json.dumps([{"world_size": world, "ranks": ["here: cpu"] * world}]))
    (folder / "summary.json").write_text(json.dumps({"name": name, "finished": finished}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_sweep(folder, trials):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"name": "s", "direction": "minimize", "metric": "loss", "space": {"seed": [0, 1]}, "trials": trials}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def test_a_complete_run(tmp_path):
    record = reader.read(write_run(tmp_path / "run", world=2))
    assert (record.name, record.state, record.problems, record.world_size) == ("small", "finished", [], 2)
    assert record.config["seed"] == 0
    rows = record.metrics().to_pylist()
    assert [row["split"] for row in rows] == ["train", "eval"]
    assert rows[0]["loss"] == 2.0
    assert rows[0]["top1"] is None
    assert rows[1]["class_accuracy"] == {"cat": 0.25, "dog": None}


def test_numbers_are_exact(tmp_path):
    values = [0.1 + 0.2, 1e-300, 2.2250738585072014e-308, 123456789.12345679]
    run = write_run(tmp_path / "run", [{**TRAIN, "loss": value, "extra": value} for value in values])
    table = reader.read(run).metrics()
    assert table["loss"].to_pylist() == table["extra"].to_pylist() == values


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_incomplete_last_line(tmp_path, kept):
    run = write_run(tmp_path / "run", finished=False)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + whole.splitlines()[0][:kept])
    record = reader.read(run)
    assert record.state == "unfinished"
    assert len(record.problems) == 1
    assert "mid-line" in record.problems[0]
    assert len(record.metrics()) == 2
    assert len(record.problems) == 1, "reported once"


def test_a_last_line_without_newline_is_read(tmp_path):
    run = write_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.rstrip("\n"))
    record = reader.read(run)
    assert len(record.metrics()) == 2
    assert record.problems == []


@pytest.mark.parametrize(
    ("damage", "left", "problem"),
    [
        (b"\0\0\0\n", 2, "left out: 1 of 3"),
        (b"[1, 2]\n", 2, "left out: 1 of 3"),
        (b'{"split": "train", "loss": "high"}\n', 3, "'loss' has values of several types"),
        (b'{"split": "train", "loss": 1%s}\n' % (b"0" * 400), 3, "'loss' has values of several types"),
        (b'{"split": "train", "step": 99999999999999999999}\n', 3, "'step' has values of several types"),
        (b'{"split": 7, "loss": 1.0}\n', 3, "'split' has values of several types"),
        (b'{"split": "eval", "top1": {"a": 1}}\n', 3, "'top1' has values of several types"),
        (b'{"split": "train", "step": 1.5}\n{"a": 1}{\n', 3, "left out: 1 of 4"),
        (b'{"loss": 1, "loss": 2}\n', 3, None),
        (b'{"split": "train", "loss": NaN}\n', 3, None),
        (b"\n\n", 2, None),
        (b"\xff\xfe\n", 2, "left out: 1 of 3"),
        (b'{"event": "\\ud800"}\n', 2, "left out: 1 of 3"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"\n", 2, "left out: 1 of 3"),
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}\n", 2, "left out: 1 of 3"),
    ],
)
def test_damaged_lines_are_left_out_and_reported(tmp_path, damage, left, problem):
    run = write_run(tmp_path / "run")
    first, second = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(first + damage + second)
    record = reader.read(run)
    table = record.metrics()
    assert len(table) == left
    assert table["loss"].to_pylist()[0] == 2.0
    if problem is None:
        assert record.problems == []
    else:
        assert [problem in found for found in record.problems] == [True]


def test_a_first_line_that_is_no_object(tmp_path):
    """Arrow's parser crashes on it."""
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(b"null\n[1]\n" + (run / "metrics.jsonl").read_bytes())
    record = reader.read(run)
    assert len(record.metrics()) == 2
    assert "left out: 2 of 4" in record.problems[0]


def test_states(tmp_path):
    failed = write_run(tmp_path / "failed", finished=False)
    (failed / "failure.json").write_text(json.dumps({"error": "TrainingError", "message": "nan", "step": 3}))
    assert reader.read(failed).state == "failed"
    assert reader.read(failed).failure["step"] == 3

    stopped = write_run(tmp_path / "stopped", finished=False)
    (stopped / "logs").mkdir()
    exit_files.write(stopped / "logs", RankExit(0, Cause.STOPPED, EXIT_STOPPED, "host", 9))
    assert reader.read(stopped).state == "stopped"
    exit_files.remove(stopped / "logs")  # as a new start does
    assert reader.read(stopped).state == "unfinished"
    lock = Lock(stopped, is_folder=True)
    assert lock.try_acquire()
    assert [reader.read(stopped).state for _ in range(2)] == ["running"] * 2
    lock.release()
    assert reader.read(stopped).state == "unfinished"


def test_before_the_first_evaluation_no_file_is_missing_but_the_state_is_told(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    assert reader.read(run).problems == ["it has no evaluation yet"]
    (run / "weights.safetensors").write_bytes(b"")
    assert "summary.json is missing" in reader.read(run).problems
    (run / "weights.safetensors").unlink()
    exit_files.write(run / "logs", RankExit(0, Cause.STOPPED, EXIT_STOPPED, "host", 9))
    assert reader.read(run).problems == ["it was stopped before its first evaluation"]
    (run / "failure.json").write_text(json.dumps({"message": "no such file: a.csv", "step": 0}))
    assert reader.read(run).problems == []


@pytest.mark.parametrize(("hint", "shown"), [("write it", "write it; then start"), ("", "mend this; then start")])
def test_commands_tell_why_a_failed_run_has_no_results(tmp_path, hint, shown):
    (tmp_path / "config.yaml").write_text("name: run\n")
    (tmp_path / "failure.json").write_text(json.dumps({"message": "no a.csv\nmore", "hint": hint, "step": 0}))
    for command in (facts.read, lambda path: trained_run.configuration(path, [])):
        with pytest.raises(ConfigError, match=r"failed at its start and has no .*: no a\.csv\n") as raised:
            command(tmp_path)
        assert raised.value.hint.startswith(shown)


def test_missing_and_broken_files(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("name: [")
    (bare / "summary.json").write_text("[]")
    (bare / "failure.json").write_text("{")
    record = reader.read(bare)
    assert (record.state, record.name, record.config, record.summary) == ("failed", "bare", {}, {})
    problems = "; ".join(record.problems)
    for part in (
        "config.yaml cannot be read",
        "summary.json contains type list where dict was expected",
        "failure.json cannot",
        "metrics.jsonl is mis",
    ):
        assert part in problems
    assert record.metrics().num_rows == 0
    assert "loss" in record.metrics().column_names


def test_foreign_folders(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"")
    assert reader.read(tmp_path / "photos").state == "unreadable"
    assert reader.read(tmp_path / "none").state == "unreadable"
    for path in (tmp_path / "photos", tmp_path / "none"):
        with pytest.raises(ConfigError, match="give a run folder"):
            reader.find([path])


def test_other_runs_in_place_of_one_that_does_not_exist(tmp_path, monkeypatch):
    """One with a similar name, or else the newest ones that have a result."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["photos", "b", "c", "d", "e", "f", "g"]):
        os.utime(write_run(tmp_path / "runs" / name) / "metrics.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "config.yaml").write_text("name: empty\n")
    (tmp_path / "photos").mkdir()
    for path in ("photos", "photo", "runs/Photos", "elsewhere/photos"):
        assert hints.run_hint(Path(path)) == "did you mean runs/photos?"
    assert hints.run_hint(Path("nope")) == "give a run folder, such as runs/photos, runs/b, runs/c, runs/d, runs/e"
    (tmp_path / "runs" / "c" / "weights.safetensors").touch()
    os.utime(tmp_path / "runs" / "c" / "weights.safetensors", (1, 1))
    for path in (Path("runs"), Path("runs").resolve()):
        assert hints.run_hint(path).endswith("such as runs/c, runs/photos, runs/b, runs/d, runs/e")
    for command in (
        lambda: facts.read(Path("nope")),
        lambda: trained_run.configuration(Path("nope"), ()),
        lambda: reader.find([Path("nope")]),
    ):
        with pytest.raises(
            ConfigError, match="nope: there is no such folder\n  -> give a run folder.*, such as runs/c, runs/photos, "
        ):
            command()


def test_find_returns_each_run_once(tmp_path):
    one = write_run(tmp_path / "runs" / "one")
    sweep = write_sweep(
        tmp_path / "runs" / "sweep",
        [
            {"number": 0, "run": "trials/0000", "params": {"seed": 0}, "world": 2, "state": "finished", "value": 0.5},
            {"number": 1, "run": "trials/0001", "params": {"seed": 1}, "world": 2, "state": "waiting", "value": None},
            {"number": 2, "run": "trials/0002", "params": {"seed": 2}, "state": "pruned", "value": 0.75},
            {"number": 3, "run": "trials/0003", "params": {}, "state": "failed", "error": "no such file"},
        ],
    )
    write_run(sweep / "trials" / "0000", name="0000")
    write_run(sweep / "trials" / "0002", name="0002", finished=False)
    found = reader.find([one, tmp_path / "runs", sweep])
    assert [record.path.name for record in found] == ["one", "0000", "0001", "0002", "0003"]
    assert [record.state for record in found] == ["finished", "finished", "waiting", "pruned", "failed"]
    assert found[0].sweep is None
    assert found[1].trial.params == {"seed": 0}
    assert found[1].trial.value == 0.5
    assert found[2].world_size == 2
    assert (found[1].sweep.direction, found[1].sweep.metric) == ("min", "loss")
    assert found[4].trial.error == "no such file"


@pytest.mark.parametrize("content", ["{", "[]", '{"trials": 3}', '{"trials": ["a"]}'])
def test_runs_of_a_sweep_with_a_damaged_file_are_found(tmp_path, content):
    sweep = write_sweep(tmp_path / "sweep", [])
    write_run(sweep / "trials" / "0000")
    (sweep / "sweep.json").write_text(content)
    assert [record.state for record in reader.find([sweep])] == ["finished"]


def test_a_run_of_a_sweep_whose_name_is_too_long_is_unreadable(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [{"number": 0, "run": "x" * 5000}])
    (record,) = reader.find([sweep])
    assert record.state == "unreadable"


def test_a_run_that_only_its_owner_may_enter_hides_no_other(tmp_path, monkeypatch):
    closed, stat = write_run(tmp_path / "closed"), os.stat
    write_run(tmp_path / "open")

    def only_owner(path, *args, **kwargs):  # as of a folder of mode 700; the superuser may enter all
        if closed in Path(os.fsdecode(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", only_owner)
    assert [record.path.name for record in reader.find([tmp_path])] == ["open"]
    assert reader.read(closed).state == "unreadable"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may not read it"):
        reader.find([closed])


@pytest.mark.parametrize("value", [[], {}, 3])
def test_a_metric_and_a_direction_of_a_wrong_type_are_ignored(tmp_path, value):
    sweep = write_sweep(tmp_path / "sweep", [])
    (sweep / "sweep.json").write_text(json.dumps({"metric": value, "direction": value}))
    write_run(sweep / "trials" / "0000")
    (record,) = reader.find([sweep])
    assert (record.sweep.metric, record.sweep.direction) == (None, None)


def test_reading_needs_no_torch_and_a_run_folder_no_pandas():
    code = "import sys; from harness.runs import reader; assert 'torch' not in sys.modules; from harness.runs import "
    code += "run_dir; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250).returncode == 0


def test_a_trial_that_has_not_written_anything_is_waiting(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [{"number": 0, "run": "trials/0000", "state": "running"}])
    (record,) = reader.find([sweep])
    assert (record.state, record.problems) == ("waiting", [])
    write_run(sweep / "trials" / "0000", finished=False)
    assert reader.find([sweep])[0].state == "unfinished"


@pytest.mark.parametrize("state", [{}, {"state": "lost"}, {"state": ["failed"]}])
def test_a_state_that_no_trial_has_is_ignored(tmp_path, state):
    sweep = write_sweep(tmp_path / "sweep", [{"number": 0, "run": "trials/0000", **state}])
    (record,) = reader.find([sweep])
    assert (record.state, record.trial.state) == ("unreadable", None)
