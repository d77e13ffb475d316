"""Following a log that is being written and rewritten."""

from __future__ import annotations

import json
import os

import pytest

from harness.tools.sweep import process
from harness.tools.sweep.process import TrialLogReader, final_value
from tests.end_to_end.processes import wait_until
from tests.tools.sweep.sweeping import write_base


def lines(*entries: dict) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def train(step: int, wall_s: float = 1.0) -> dict:
    return {"split": "train", "step": step, "epoch": step // 10, "loss": 1 / step, "wall_s": wall_s}


def evaluation(epoch: int, value: float | None, **more) -> dict:
    return {"split": "eval", "step": epoch * 10, "epoch": epoch, "top1": value, **more}


def test_whole_lines_are_read_as_they_are_written(tmp_path):
    reader, record = TrialLogReader(tmp_path, "top1"), tmp_path / "metrics.jsonl"
    reader.read()
    assert reader.step == 0
    text = lines(train(5), evaluation(1, 0.5), train(15))
    for size in range(0, len(text) + 1, 7):
        record.write_text(text[:size])
        reader.read()
    record.write_text(text)
    reader.read()
    assert (reader.step, reader.evaluations) == (15, {1: 0.5})


def test_rewritten_log_is_read_again(tmp_path):
    """A resumed run cuts off the lines after its checkpoint and writes them again, with other lengths."""
    reader, record = TrialLogReader(tmp_path, "top1"), tmp_path / "metrics.jsonl"
    first = lines(train(5), evaluation(1, 0.5))
    record.write_text(first + lines(train(15), train(16)))
    reader.read()
    record.write_text(first + lines(train(15, wall_s=1.25), evaluation(2, 0.75), train(26), train(27), train(28)))
    reader.read()
    assert reader.evaluations == {1: 0.5, 2: 0.75}
    assert reader.step == 28
    record.write_text(first)
    reader.read()
    assert (reader.step, reader.evaluations) == (10, {1: 0.5})


def test_missing_metrics_and_broken_lines_are_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "{half\n3\nnull\n[]\n" + lines(evaluation(1, None), evaluation(2, 0.5), evaluation(2, 0.7))
    )
    reader = TrialLogReader(tmp_path, "top1")
    reader.read()
    assert reader.evaluations == {2: 0.5}


def test_value_of_a_finished_run_is_its_best(tmp_path):
    assert final_value(tmp_path, "top1", "maximize") is None
    history = [{"epoch": 1, "top1": 0.9}, {"epoch": 2, "top1": 0.7}, {"epoch": 3, "top1": None}]
    summary = {"finished": True, "history": history}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert final_value(tmp_path, "top1", "maximize") == 0.9
    assert final_value(tmp_path, "top1", "minimize") == 0.7
    assert final_value(tmp_path, "loss", "minimize") is None
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "finished": False}))
    assert final_value(tmp_path, "top1", "maximize") is None


@pytest.mark.parametrize(("word", "why"), [
    ("launch.engine=slurmm", "unknown engine 'slurmm'; did you mean slurm?"),  # of harness launch
    ("runtime.device=cuda", "-> set runtime.device=cpu"),  # of a rank before it meets the others
    ("train.epochs=3", "cannot write to the run folder: File exists -> choose another"),  # and after that
])  # fmt: skip
def test_an_error_before_the_run_begins_is_the_reason(tmp_path, monkeypatch, word, why):
    monkeypatch.chdir(tmp_path)
    base, folder = write_base(tmp_path), tmp_path / "trials" / "0000"
    folder.parent.mkdir()
    folder.write_text("no folder")
    (tmp_path / "trials" / "0000.failure.json").write_text('{"rank": 0, "cause": "error", "exit_code": 2}')
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    trial = process.TrialProcess(process.launch_command(str(base), [word], folder), folder, environ, [])
    end = wait_until(trial.ended, 100, "the end of the trial")
    assert end.how == "failed"
    assert why in end.why, "not that of an earlier start"
