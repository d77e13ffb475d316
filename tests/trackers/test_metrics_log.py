"""The metrics log: whole entries at full precision, cut where a checkpoint ends, and an error for a full disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from harness.errors import CheckpointError, ConfigError
from harness.trackers import metrics_log
from harness.trackers.base import EntryTimes, scalars
from harness.trackers.metrics_log import MetricsLog
from tests.fixtures import make_config, write_rows


def entries(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in path.open()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_entries_are_flushed_exact_and_valid_json(path):
    log = MetricsLog(path)
    log.log("train", {"step": 1, "loss": 0.1 + 0.2, "name": "ü"})
    assert entries(path) == [{"split": "train", "step": 1, "loss": 0.1 + 0.2, "name": "ü"}]
    log.log("eval", {"a": math.nan, "b": math.inf, "c": np.float64("nan"), "d": None, "e": 2})
    log.close()
    assert entries(path)[1] == {"split": "eval", "a": None, "b": None, "c": None, "d": None, "e": 2}


def test_rewind_deletes_later_entries(path):
    log = MetricsLog(path)
    log.log("train", {"step": 1, "word": "ü"})
    offset = log.offset()
    assert offset == path.stat().st_size
    log.log("train", {"step": 2})
    log.close()
    resumed = MetricsLog(path)
    assert resumed.offset() == path.stat().st_size
    resumed.rewind(offset)
    resumed.log("train", {"step": 2, "again": True})
    assert resumed.offset() == path.stat().st_size
    resumed.close()
    assert [entry.get("again") for entry in entries(path)] == [None, True]


@pytest.mark.parametrize("offset", [0, 500])  # 500: the log was deleted meanwhile, and must not be filled with zeros
def test_rewind_to_the_start_or_past_the_end(path, offset):
    log = MetricsLog(path)
    if not offset:
        log.log("train", {"step": 1})
    log.rewind(offset)
    assert log.offset() == 0
    log.log("train", {"step": 9})
    log.close()
    assert entries(path) == [{"split": "train", "step": 9}]


def _shorter(text):
    return text[: len(text) // 2]


def _with_a_hole(text):
    return text[:60] + b"\0" * 40 + text[100:]


def _with_another_digit(text):
    return text.replace(b'"loss": 3', b'"loss": 8', 1)


@pytest.mark.parametrize("harm", [_shorter, _with_a_hole, _with_another_digit, lambda text: b""])
def test_damaged_log_is_mended_and_its_loss_is_stated(path, harm):
    """Every line stays a whole one; evaluations come back from the checkpoint; the damaged file is kept."""
    log = MetricsLog(path)
    for step in range(1, 9):
        log.log("train", {"step": step, "loss": float(step)})
        if step % 4 == 0:
            log.log("eval", {"step": step, "top1": step / 10})
    offset, digest = log.offset(), log.digest()
    log.close()
    path.write_bytes(damaged := harm(path.read_bytes()))
    resumed = MetricsLog(path)
    resumed.rewind(offset, digest, [{"step": 4, "top1": 0.4}, {"step": 8, "top1": 0.8}])
    resumed.log("train", {"step": 9})
    resumed.close()
    found = entries(path)
    assert [entry["top1"] for entry in found if entry["split"] == "eval"] == [0.4, 0.8]
    assert [entry["step"] for entry in found] == sorted(entry["step"] for entry in found)
    assert found[-1] == {"split": "train", "step": 9}
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert f"{len(damaged)} of the {offset} bytes" in resumed.damage


def test_intact_log_is_not_mended(path):
    log = MetricsLog(path)
    log.log("train", {"step": 1})
    offset, digest = log.offset(), log.digest()
    log.log("train", {"step": 2})
    log.rewind(offset, digest)
    assert (log.damage, log.offset(), log.digest()) == ("", offset, digest)
    log.close()
    assert [name.name for name in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_an_error(path):
    path.symlink_to("/dev/full")
    log = MetricsLog(path)
    with pytest.raises(CheckpointError, match="No space left"):
        log.log("train", {"step": 1})
    with pytest.raises(CheckpointError, match="No space left"):
        log.offset()
    log.close()  # must not raise for the entry that is still buffered


def test_only_rank_0_writes(tmp_path, path):
    write_rows(tmp_path, "train", 4)
    other = metrics_log.open_log(path, 1, make_config(tmp_path, trackers=["wandb"]), "")
    other.log("train", {"step": 1})
    other.rewind(7)
    assert other.offset() == 0
    other.close()
    assert not path.exists()
    metrics_log.open_log(path, 0, make_config(tmp_path), "").close()
    assert path.exists()
    assert not (tmp_path / "trackers.json").exists()


def test_tracker_that_is_not_installed_is_a_config_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    metrics_log.require(["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match="(?s)trackers: mlflow is not installed.*pip install 'apex-harness.mlflow.'"):
        metrics_log.require(["wandb", "mlflow"])


def test_scalars_of_an_entry():
    entry = {"split": "eval", "step": 3, "epoch": 1, "top1": 0.5, "loss": None, "name": "x", "good": True, "wall_s": 2}
    assert scalars(entry) == {"eval/top1": 0.5}
    counts = {"split": "epoch", "rows": 9, "rows_used": 9, "rows_updated": 8, "steps_skipped": 1, "bad_rows": 0}
    assert scalars(counts) == {"epoch/rows_updated": 8, "epoch/steps_skipped": 1}  # only what is worth a look


def test_times_come_from_the_log():
    times = EntryTimes(1000.0)
    assert [times.time(entry) for entry in ({"wall_s": 2.5}, {}, {"wall_s": 4.0})] == [1002.5, 1002.5, 1004.0]
