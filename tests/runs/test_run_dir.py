"""The run folder: whose it is, what is moved aside and why, and the first failure."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import yaml

from harness.config import loader
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, DataError
from harness.runs import run_dir
from harness.runs.files import write_atomically
from harness.runs.run_dir import RunFolder, failure_report
from tests.fixtures import make_config


def claim(tmp_path: Path, **sections) -> str:
    return RunFolder(tmp_path / "runs" / "small").claim(make_config(tmp_path, **sections))


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "runs").iterdir())


# Whose folder it is


def test_a_new_run(tmp_path):
    assert claim(tmp_path) == ""
    run = tmp_path / "runs" / "small"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "logs"]
    assert loader.load(run / "config.yaml") == make_config(tmp_path)


def test_the_same_recipe_goes_on(tmp_path):
    claim(tmp_path)
    run = tmp_path / "runs" / "small"
    (run / "metrics.jsonl").write_text("x")
    (run / "failure.json").write_text("{}")
    assert claim(tmp_path, train={"epochs": 20}, data={"num_workers": 1}) == ""
    assert (run / "metrics.jsonl").exists()
    assert not (run / "failure.json").exists()  # it was of the start before
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 20
    assert kept(tmp_path) == ["small"]


def test_another_recipe_moves_the_folder_aside_and_says_why(tmp_path):
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "metrics.jsonl").write_text("first")
    told = claim(tmp_path, seed=3, optimizer={"lr": 0.2})
    why = "its recipe differs (optimizer.lr 0.1 -> 0.2, seed 0 -> 3)"
    assert told == f"the earlier run was moved to {tmp_path}/runs/small.1: {why}"
    assert not (tmp_path / "runs" / "small" / "metrics.jsonl").exists()
    assert "small.2" in claim(tmp_path, seed=4)
    assert kept(tmp_path) == ["small", "small.1", "small.2"]
    assert (tmp_path / "runs" / "small.1" / "metrics.jsonl").read_text() == "first"


def test_many_differences_are_counted(tmp_path):
    claim(tmp_path)
    precision = {"opt_level": "O2", "loss_scale": 8.0, "master_weights": True, "keep_batchnorm_fp32": True}
    assert claim(tmp_path, seed=1, precision=precision).endswith(" and 1 more)")


def test_never_resuming_moves_it_aside(tmp_path):
    claim(tmp_path)
    assert claim(tmp_path, checkpoint={"resume": "never"}).endswith("small.1: checkpoint.resume=never")


def test_a_version_with_more_keys_goes_on_at_their_defaults(tmp_path):
    claim(tmp_path)
    saved = tmp_path / "runs" / "small" / "config.yaml"
    tree = yaml.safe_load(saved.read_text())
    del tree["train"]["ema_decay"], tree["parallel"]
    saved.write_text(yaml.safe_dump(tree))
    assert claim(tmp_path) == ""
    del tree["seed"]
    saved.write_text(yaml.safe_dump(tree))
    assert "seed 0 -> 5" in claim(tmp_path, seed=5)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [1", b"- 1\n", b"", b"seed: 0\nold_key: 3\n"])
def test_a_configuration_that_cannot_be_read_is_kept_aside(tmp_path, content):
    claim(tmp_path)
    (tmp_path / "runs" / "small" / "config.yaml").write_bytes(content)
    assert "small.1: its recipe differs" in claim(tmp_path)
    assert (tmp_path / "runs" / "small.1" / "config.yaml").read_bytes() == content


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="the run folder cannot be written: Not a directory\n  -> name another"):
        claim(tmp_path)


def test_a_folder_that_cannot_be_moved(tmp_path, monkeypatch):
    claim(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_dir.os, "rename", refuse)
    with pytest.raises(ConfigError, match="cannot be moved aside: Permission denied"):
        claim(tmp_path, seed=9)
    assert kept(tmp_path) == ["small"]


# Small files


def test_writing_atomically(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, "first")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_summary_is_json_also_with_numbers_that_are_not(tmp_path):
    run = RunFolder(tmp_path)
    run.summary({"best": {"loss": math.nan}, "history": [{"loss": math.inf}, {"loss": 1.0}], "n": (1, "x", None, True)})
    content = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert content == {"best": {"loss": None}, "history": [{"loss": None}, {"loss": 1.0}], "n": [1, "x", None, True]}


def test_confusion_is_a_table(tmp_path):
    run = RunFolder(tmp_path)
    run.confusion(None, [])
    assert not (tmp_path / "confusion.csv").exists()
    run.confusion([[3, 1], [0, 2]], ["a", "b,c"])
    assert (tmp_path / "confusion.csv").read_text() == 'label,a,"b,c"\na,3,1\n"b,c",0,2\n'


def test_provenance_grows_with_every_start(tmp_path):
    run, runtime = RunFolder(tmp_path), Runtime(Launch(world_size=2))
    for _ in range(2):
        run.provenance(runtime, "harness.apex", ["a: cpu", "b: cpu"])
    starts = json.loads((tmp_path / "provenance.json").read_text())
    assert len(starts) == 2
    assert starts[1]["amp"] == "harness.apex"
    assert starts[1]["ranks"] == ["a: cpu", "b: cpu"]
    assert starts[1]["packages"]["torch"]
    (tmp_path / "provenance.json").write_text("[{")
    run.provenance(runtime, "harness.apex", [])
    assert len(json.loads((tmp_path / "provenance.json").read_text())) == 1


def test_the_first_failure_stays(tmp_path):
    run = RunFolder(tmp_path)
    reports = [
        failure_report(Runtime(Launch(rank=rank)), 7, DataError("bad", where=f"a.csv:{rank}"), ["trace"])
        for rank in (2, 0)
    ]
    assert run.failure(reports[0]) == reports[0]
    assert run.failure(reports[1]) == reports[0]
    written = json.loads((tmp_path / "failure.json").read_text())
    assert (written["rank"], written["step"], written["error"], written["exit_code"]) == (2, 7, "DataError", 65)
    assert written["message"] == "a.csv:2: bad"
    assert written["traceback"] == ["trace"]
    assert failure_report(Runtime(), 0, ValueError("x"), [])["exit_code"] == 70


def test_a_failure_that_is_being_written_is_waited_for(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "failure.json").write_text('{"rank": ')
    writer = threading.Timer(0.15, lambda: (tmp_path / "failure.json").write_text('{"rank": 3}'))
    writer.start()
    assert run.failure({"rank": 1}) == {"rank": 3}
    writer.join()


def test_a_failure_where_nothing_can_be_written_is_no_second_failure(tmp_path):
    assert RunFolder(tmp_path / "none").failure({"rank": 1}) == {"rank": 1}
